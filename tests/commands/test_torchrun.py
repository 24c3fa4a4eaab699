"""``finetune run`` by torchrun on this host, where some processes die."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from held import FINETUNE, STEP, Hold, Start
from tiny_runs import flags, run_tiny, weights_of

pytestmark = pytest.mark.slow

# The same with any number of processes; at the fourth of six steps there is a checkpoint.
SHORT = {
    "num_train_epochs": 3, "early_stopping_patience": 0, "max_train_samples": 32,
    "save_strategy": "steps", "save_steps": 1, "save_total_limit": 5,
}  # fmt: skip
# torchrun prints a traceback of its own and exits with 1.
TORCHRUN = (*FINETUNE[:2], "torch.distributed.run", "--nproc-per-node=2", *FINETUNE[1:])
# A lost process is noticed within 20 s; if it were not, the others would wait for half an hour.
ENDS_WITHIN_SECONDS = 60


def run_flags(folder: Path, model: Path, options: dict[str, Any] = SHORT) -> list[str]:
    return ["run", *flags(**options), "--model", str(model), "--output-dir", str(folder)]


def kill_second(process: subprocess.Popen[str]) -> None:
    """Kill the second of the processes that a launcher has started."""
    workers = psutil.Process(process.pid).children()
    next(one for one in workers if one.environ()["RANK"] == "1").kill()


@pytest.fixture
def hold(tmp_path: Path) -> Hold:
    """The second process waits in the middle of its training."""
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
    assert "another process of the run has ended, or no longer answers" in errors

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


def test_torchrun_restarts_a_run_that_goes_on_from_its_checkpoint(
    start: Start, hold: Hold, tmp_path: Path, model_without_dropout: Path, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    process = start(
        *TORCHRUN[:-2], "--max-restarts=1", *TORCHRUN[-2:],
        *run_flags(folder, model_without_dropout),
        "--resume-from-checkpoint", "auto",
        environment=hold.environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    hold.wait(process)
    kill_second(process)
    output, errors = process.communicate(timeout=300)

    assert process.returncode == 0, errors
    assert output.count("report: ") == 1
    assert "resuming after step" in errors
    assert_same_weights(folder, whole_run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_launcher_that_ends_stops_all_processes_after_one_step(
    number: int, start: Start, hold: Hold, tmp_path: Path, model_without_dropout: Path
) -> None:
    endless = SHORT | {"num_train_epochs": 100_000}
    arguments = run_flags(tmp_path / "run", model_without_dropout, endless)
    process = start(*TORCHRUN, *arguments, environment=hold.environment())
    hold.wait(process)
    process.send_signal(number)
    hold.let_go()
    output, errors = process.communicate(timeout=300)

    assert process.returncode != 0
    assert output == ""
    assert errors.count("error: stopped after step") == errors.count("error: ") == 1


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

    def start(self, start: Start, *command: str, hold: Hold) -> list[subprocess.Popen[str]]:
        """Start the command in one process on each host with torchrun."""
        return [
            start(
                "ip", "netns", "exec", one, sys.executable, "-m", "torch.distributed.run",
                "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1",
                "--master-addr=10.199.0.1", "--master-port=29512", "-m", "finetune", *command,
                environment={"GLOO_SOCKET_IFNAME": f"{one}e", **hold.environment()},
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
    start: Start, two_hosts: TwoHosts, hold: Hold, tmp_path: Path, model_without_dropout: Path,
    whole_run: Path,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    arguments = [*run_flags(folder, model_without_dropout), "--resume-from-checkpoint", "auto"]
    started = two_hosts.start(start, *arguments, hold=hold)
    hold.wait(started[1])
    two_hosts.plug("down")
    hold.let_go()

    for process in started:
        _, errors = process.communicate(timeout=ENDS_WITHIN_SECONDS)
        assert process.returncode == 1
        assert "another process of the run has ended, or no longer answers" in errors

    two_hosts.plug("up")
    started = two_hosts.start(start, *arguments, hold=hold)
    ended = [process.communicate(timeout=300) for process in started]

    assert [process.returncode for process in started] == [0, 0], ended
    assert "resuming after step" in ended[0][1]
    assert_same_weights(folder, whole_run)
