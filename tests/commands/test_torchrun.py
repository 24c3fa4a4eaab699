"""``finetune run`` under torchrun on one host, with processes that are killed."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from blocking import FINETUNE, STEP, BlockedCall, Start
from tiny_runs import flags, run_tiny, weights_of

import finetune

pytestmark = pytest.mark.slow

# Six steps, each followed by a checkpoint.
SHORT = {
    "num_train_epochs": 3, "early_stopping_patience": 0, "max_train_samples": 32,
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 5,
}  # fmt: skip
# torchrun prints its own traceback and exits with 1.
TORCHRUN = (*FINETUNE[:2], "torch.distributed.run", "--nproc-per-node=2", *FINETUNE[1:])
# A lost process is detected within 20 s. Without that, the others would wait for half an hour.
ENDS_WITHIN_SECONDS = 60


def kill_second(process: subprocess.Popen[str]) -> None:
    """Kill the second process that the launcher started."""
    workers = psutil.Process(process.pid).children()
    next(one for one in workers if one.environ()["RANK"] == "1").kill()


def block_second(folder: Path, *, call: int) -> BlockedCall:
    """Block the second process during training."""
    folder.mkdir()
    return BlockedCall(folder, STEP, call=call, rank=1)


def test_killed_process_ends_the_run_and_ctrl_c_stops_all_processes(
    start: Start, tmp_path: Path, model_without_dropout: Path
) -> None:
    folder, options = tmp_path / "run", SHORT | {"model": str(model_without_dropout)}
    arguments = ["run", *flags(**options), "--output-dir", str(folder)]
    arguments += ["--resume-from-checkpoint", "auto"]
    blocked = block_second(tmp_path / "blocked", call=3)
    process = start(*TORCHRUN, *arguments, environment=blocked.environment())
    blocked.wait(process)
    kill_second(process)
    output, errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)

    assert process.returncode == 1
    assert output == ""
    assert "another process of the run ended or no longer answers" in errors

    blocked = block_second(tmp_path / "again", call=2)
    again = start(*TORCHRUN, *arguments, environment=blocked.environment())
    blocked.wait(again)
    again.send_signal(signal.SIGINT)
    blocked.release()
    output, errors = again.communicate(timeout=300)

    assert again.returncode != 0
    assert output == ""
    assert "resuming after step 2" in errors
    assert errors.count("error: stopped after step 4") == errors.count("error: ") == 1

    # The steps don't depend on the number of processes.
    finetune.run(resume_from_checkpoint=folder)
    run_tiny(tmp_path / "whole", **options)
    weights, expected = weights_of(folder), weights_of(tmp_path / "whole")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


def test_error_on_all_ranks_is_reported_once(start: Start, tmp_path: Path) -> None:
    wrong = ("--data", "missing.csv", "--output-dir", str(tmp_path / "run"))
    process = start(*TORCHRUN, "run", *wrong)
    _, errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)

    assert process.returncode == 1
    assert errors.count("error: file not found: missing.csv") == 1
    assert not list(tmp_path.iterdir())
