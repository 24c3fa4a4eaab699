"""``finetune run`` under torchrun on this host, with processes that die."""

import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from held import FINETUNE, STEP, Hold, Start
from tiny_runs import flags, run_tiny, weights_of

pytestmark = pytest.mark.slow

# The steps don't depend on the number of processes. A checkpoint follows the fourth of six steps.
SHORT = {
    "num_train_epochs": 3, "early_stopping_patience": 0, "max_train_samples": 32,
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 5,
}  # fmt: skip
# torchrun prints its own traceback and exits with 1.
TORCHRUN = (*FINETUNE[:2], "torch.distributed.run", "--nproc-per-node=2", *FINETUNE[1:])
# A lost process is noticed within 20 s. Otherwise the others would wait for half an hour.
ENDS_WITHIN_SECONDS = 60


def run_flags(folder: Path, model: Path, options: dict[str, Any] = SHORT) -> list[str]:
    return ["run", *flags(**options), "--model", str(model), "--output-dir", str(folder)]


def kill_second(process: subprocess.Popen[str]) -> None:
    """Kill the second process that the launcher started."""
    workers = psutil.Process(process.pid).children()
    next(one for one in workers if one.environ()["RANK"] == "1").kill()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """Make the second process wait in the middle of its training."""
    (tmp_path / "hold").mkdir()
    return Hold(tmp_path / "hold", STEP, call=4, rank=1)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, model_without_dropout: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_tiny(folder, model=model_without_dropout, **SHORT)
    return folder


def assert_same_weights(run: Path, other: Path) -> None:
    weights, expected = weights_of(run), weights_of(other)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


def test_a_killed_process_ends_the_run_which_is_resumed(
    start: Start, hold: Hold, tmp_path: Path, model_without_dropout: Path, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    arguments = [*run_flags(folder, model_without_dropout), "--resume-from-checkpoint", "auto"]
    process = start(*TORCHRUN, *arguments, environment=hold.environment())
    hold.wait(process)
    kill_second(process)
    output, errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)

    assert process.returncode == 1
    assert output == ""
    assert "another process of the run ended or no longer answers" in errors

    again = start(*TORCHRUN, *arguments)
    output, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    assert output.count("report: ") == 1
    assert "resuming after step" in errors
    assert_same_weights(folder, whole_run)


def test_an_error_of_all_ranks_is_reported_once(start: Start, tmp_path: Path) -> None:
    wrong = ("--data", "missing.csv", "--output-dir", str(tmp_path / "run"))
    process = start(*TORCHRUN, "run", *wrong)
    _, errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)

    assert process.returncode == 1
    assert errors.count("error: there is no file missing.csv") == 1
    assert not list(tmp_path.iterdir())


def test_ctrl_c_stops_all_processes_after_one_step(
    start: Start, hold: Hold, tmp_path: Path, model_without_dropout: Path
) -> None:
    endless = SHORT | {"num_train_epochs": 100_000}
    arguments = run_flags(tmp_path / "run", model_without_dropout, endless)
    process = start(*TORCHRUN, *arguments, environment=hold.environment())
    hold.wait(process)
    process.send_signal(signal.SIGINT)
    hold.let_go()
    output, errors = process.communicate(timeout=300)

    assert process.returncode != 0
    assert output == ""
    assert errors.count("error: stopped after step") == errors.count("error: ") == 1
