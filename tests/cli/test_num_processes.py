"""``finetune run`` in several processes of this host, some of which die."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny_runs import finetune_in_a_child, flags, run_tiny, start_finetune, weights_of

pytestmark = pytest.mark.slow

# So that a run can be caught in the middle, and is the same with any number of processes.
LONG = {"num_train_epochs": 40, "max_train_samples": 32, "save_steps": 1, "save_total_limit": 5}


def run_flags(folder: Path, model: Path) -> list[str]:
    return ["run", *flags(**LONG), "--model", str(model), "--output-dir", str(folder)]


def await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list(folder.glob("checkpoints/step-?")):
        time.sleep(0.05)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return sorted(psutil.Process(process.pid).children(), key=lambda one: one.environ()["RANK"])


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, model_without_dropout: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_tiny(folder, model=model_without_dropout, **LONG)
    return folder


def assert_same_weights(run: Path, other: Path) -> None:
    weights, expected = weights_of(run), weights_of(other)
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=0)


def test_a_killed_process_ends_the_run_which_is_resumed(
    tmp_path: Path, model_without_dropout: Path, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    arguments = [*run_flags(folder, model_without_dropout), "--resume-from-checkpoint", "auto"]
    process = start_finetune(*arguments, "--num-processes", "2")
    await_checkpoint(folder, process)
    workers_of(process)[1].kill()
    killed_at = time.monotonic()
    output, errors = process.communicate()

    assert process.returncode == 1
    assert time.monotonic() - killed_at < 30
    assert output == ""
    assert f"process 1 on {socket.gethostname()} was killed by SIGKILL" in errors
    assert "Traceback" not in errors

    again = finetune_in_a_child(*arguments, "--num-processes", "2")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("run folder") == 1
    assert "resuming after update" in again.stderr
    assert_same_weights(folder, whole_run)


def test_ctrl_c_stops_all_processes_after_one_update(
    tmp_path: Path, model_without_dropout: Path
) -> None:
    folder = tmp_path / "run"
    process = start_finetune(*run_flags(folder, model_without_dropout), "--num-processes", "2")
    await_checkpoint(folder, process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()

    assert process.returncode == 128 + signal.SIGINT
    assert output == ""
    assert errors.count("stopped after update") == 1
    assert "Traceback" not in errors


def test_torchrun_restarts_a_run_whose_process_was_killed(
    tmp_path: Path, model_without_dropout: Path, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "--max-restarts=1", "-m", "finetune", *run_flags(folder, model_without_dropout),
            "--resume-from-checkpoint", "auto",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    await_checkpoint(folder, process)
    workers_of(process)[0].kill()
    _, errors = process.communicate()

    assert process.returncode == 0, errors
    assert "resuming after update" in errors
    assert_same_weights(folder, whole_run)
