"""``finetune run`` in several processes of this host, some of which die."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_runs import finetune_in_a_child, flags, run_tiny, start_finetune, weights_of

pytestmark = pytest.mark.slow

# So that a run can be caught in the middle, and is the same with any number of processes.
LONG = {
    "num_train_epochs": 120, "early_stopping_patience": 0, "max_train_samples": 32, "save_steps": 1,
    "save_total_limit": 5,
}  # fmt: skip


# The second process validates for longer than a host that was cut off may go unnoticed.
SLOW_VALIDATION = """
import time
from pathlib import Path

from finetune.cli.main import main
from finetune.runs.run import Run

validate = Run._validate


def validate_slowly(run: Run) -> object:
    if not run.processes.is_main:
        Path(__file__).with_name("validates").touch()
        time.sleep(60)
    return validate(run)


Run._validate = validate_slowly
main()
"""

# Few validations and checkpoints, at which one process may wait long for another.
MANY_UPDATES = {
    "num_train_epochs": 2, "max_train_samples": 400, "batch_size": 2, "save_steps": 50,
    "logging_steps": 50,
}  # fmt: skip


def run_flags(folder: Path, model: Path, options: dict[str, Any] = LONG) -> list[str]:
    return ["run", *flags(**options), "--model", str(model), "--output-dir", str(folder)]


def await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list(folder.glob("checkpoints/step-*[0-9]")):
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


def test_an_error_of_the_processes_gives_the_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    missing = tmp_path / "missing.csv"
    ended = finetune_in_a_child(
        *("run", "--data", str(missing), "--output-dir", str(folder), "--num-processes", "2")
    )

    assert ended.returncode == 3
    assert f"error: there is no file {missing}" in ended.stderr
    assert not folder.exists()


def test_torchrun_restarts_a_run_that_goes_on_from_its_checkpoint(
    tmp_path: Path, model_without_dropout: Path, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
            "--max-restarts=1", "-m", "finetune", *run_flags(folder, model_without_dropout),
            "--resume-from-checkpoint", "auto",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    await_checkpoint(folder, process)
    workers_of(process)[1].kill()
    output, errors = process.communicate(timeout=300)

    assert process.returncode == 0, errors
    assert output.count("run folder") == 1
    assert "resuming after update" in errors
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


class TwoHosts:
    """Two network namespaces of this machine, joined by one cable."""

    def __init__(self, name: str) -> None:
        self.names = [f"{name}{host}" for host in range(2)]
        ends = [f"{one}e" for one in self.names]
        for one in self.names:
            ip("netns", "add", one)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, (one, end) in enumerate(zip(self.names, ends, strict=True)):
            ip("link", "set", end, "netns", one)
            ip("-n", one, "addr", "add", f"10.199.0.{host + 1}/24", "dev", end)
            ip("-n", one, "link", "set", "lo", "up")
        self.plug("up")

    def plug(self, state: str) -> None:
        """Connect the cable, or cut it at the second host: ``up`` or ``down``."""
        for one in self.names if state == "up" else self.names[1:]:
            ip("-n", one, "link", "set", f"{one}e", state)

    def start(self, *command: str) -> list[subprocess.Popen[str]]:
        """Start a command, a module or a script, in one process on each host with torchrun."""
        return [
            subprocess.Popen(
                [
                    "ip", "netns", "exec", one, sys.executable, "-m", "torch.distributed.run",
                    "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1",
                    "--master-addr=10.199.0.1", "--master-port=29512", *command,
                ],
                env=os.environ | {"GLOO_SOCKET_IFNAME": f"{one}e"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, one in enumerate(self.names)
        ]  # fmt: skip

    def close(self) -> None:
        for one in self.names:
            ip("netns", "del", one)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    try:
        hosts = TwoHosts(f"ft{os.getpid() % 10000}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    yield hosts
    hosts.close()


def test_a_host_that_is_cut_off_ends_the_run_on_both_which_is_started_again(
    two_hosts: TwoHosts, tmp_path: Path, model_without_dropout: Path
) -> None:
    folder, whole_run = tmp_path / "run", tmp_path / "whole"
    run_tiny(whole_run, model=model_without_dropout, **MANY_UPDATES)
    arguments = run_flags(folder, model_without_dropout, MANY_UPDATES)
    command = ["-m", "finetune", *arguments, "--resume-from-checkpoint", "auto"]
    started = two_hosts.start(*command)
    await_checkpoint(folder, started[0])
    two_hosts.plug("down")
    cut_at = time.monotonic()
    ended = [process.communicate(timeout=120) for process in started]

    assert time.monotonic() - cut_at < 30
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 1
        assert "another process of the run has ended, or no longer answers" in errors

    two_hosts.plug("up")
    started = two_hosts.start(*command)
    ended = [process.communicate(timeout=300) for process in started]

    assert [process.returncode for process in started] == [0, 0], ended
    assert "resuming after update" in ended[0][1]
    assert_same_weights(folder, whole_run)


def test_a_host_that_is_cut_off_while_the_other_waits_for_it_to_validate_ends_the_run(
    two_hosts: TwoHosts, tmp_path: Path, model_without_dropout: Path
) -> None:
    script = tmp_path / "slow_validation.py"
    script.write_text(SLOW_VALIDATION)
    options = LONG | {"num_train_epochs": 1}
    first, second = two_hosts.start(
        str(script), *run_flags(tmp_path / "run", model_without_dropout, options)
    )
    while first.poll() is None and not (tmp_path / "validates").exists():
        time.sleep(0.05)
    two_hosts.plug("down")
    cut_at = time.monotonic()
    _, errors = first.communicate(timeout=120)
    for one in [*psutil.Process(second.pid).children(), second]:
        one.kill()

    assert time.monotonic() - cut_at < 30
    assert first.returncode == 1
    assert "another process of the run has ended, or no longer answers" in errors
    assert "10.199.0.2" in errors
