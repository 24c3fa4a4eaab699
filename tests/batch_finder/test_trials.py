"""Trials in real child processes. The batch size tells ``misbehaving_worker`` how to fail."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import misbehaving_worker
import psutil
import pytest
from tiny_models import tiny_case

from finetune.batch_finder import trials as trials_module
from finetune.batch_finder.trials import TrialRunner, TrialServer
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.device import MpsDevice
from finetune.errors import FinetuneError

TINY = tiny_case()
TRY_AND_HANG = """
import sys
from misbehaving_worker import HANGS
from finetune.batch_finder.results import Case
from finetune.batch_finder.trials import TrialRunner, TrialServer
from finetune.devices.cpu import CpuDevice
from finetune.config.modes import Mode

case = Case("cpu", {}, 6, Mode("full"), 16)
with (
    TrialServer("misbehaving_worker") as server,
    TrialRunner(case, CpuDevice(), server, limit_bytes=None, timeout_seconds=600) as runner,
):
    runner.budget_bytes()
    print("started", flush=True)
    runner.run(HANGS)
"""


def misbehaving_runner(server: TrialServer, device: Device | None = None) -> TrialRunner:
    return TrialRunner(TINY, device or CpuDevice(), server, limit_bytes=None, timeout_seconds=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialServer]:
    """A server whose children keep memory until the parent has measured it."""
    measurements_folder, numbers = tmp_path_factory.mktemp("measurements_folder"), count()

    def process_bytes(process_id: int) -> int:
        reserved_bytes = host.process_bytes(process_id)
        (measurements_folder / str(next(numbers))).touch()
        return reserved_bytes

    with pytest.MonkeyPatch.context() as patch, TrialServer("misbehaving_worker") as server:
        patch.setattr(trials_module, "process_bytes", process_bytes)
        patch.setenv(misbehaving_worker.MEASUREMENTS, str(measurements_folder))
        yield server


@pytest.fixture
def runner(server: TrialServer) -> Iterator[TrialRunner]:
    with misbehaving_runner(server) as runner:
        yield runner


@pytest.fixture
def no_fork(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialRunner]:
    """A runner on a system where forks are not safe."""
    monkeypatch.setenv(misbehaving_worker.NO_FORK, "1")
    with TrialServer("misbehaving_worker") as server, misbehaving_runner(server) as runner:
        yield runner


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.parametrize(
    ("size", "status", "reason"),
    [
        (7, "fits", ""),
        (misbehaving_worker.HAS_NO_PEAK, "fits", ""),
        (misbehaving_worker.BUDGET_BYTES, "too_big", "it used more than 0.1 GiB"),
        (misbehaving_worker.KILLED, "too_big", "SIGKILL, which the system does when memory"),
        (misbehaving_worker.SEGFAULT, "failed", "the process was killed by SIGSEGV"),
        (
            misbehaving_worker.ABORTED,
            "failed",
            "SIGABRT: -[MTLDebugDevice newBuffer]: failed assertion",
        ),
        (misbehaving_worker.EXITS, "failed", "ended with exit code 1: the library gave up"),
        (misbehaving_worker.FAILS, "failed", "ValueError: no such thing"),
        (misbehaving_worker.NO_MEMORY, "too_big", "RuntimeError: can't allocate"),
        (misbehaving_worker.ABORTED_FOR_MEMORY, "too_big", "SIGABRT: terminate called after"),
        (misbehaving_worker.GROWS, "too_big", "it used more than 0.1 GiB"),
    ],
)
def test_trial_reports_its_outcome(
    runner: TrialRunner, size: int, status: str, reason: str
) -> None:
    trial = runner.run(size)
    assert (trial.status, trial.batch_size) == (status, size)
    assert reason in trial.reason
    assert trial.seconds > 0
    if size == misbehaving_worker.HAS_NO_PEAK:
        assert trial.peak_bytes == pytest.approx(40 * 2**20, rel=0.5)
    elif status == "fits":
        assert trial.peak_bytes == 1000 * size


@pytest.mark.parametrize("name", ["runner", "no_fork"])
def test_child_is_reused_until_it_fails_or_a_new_process_is_requested(
    name: str, request: pytest.FixtureRequest
) -> None:
    runner: TrialRunner = request.getfixturevalue(name)
    first, second = (runner.run(size).examples_per_second for size in (1, 2))
    assert first == second
    failed = runner.run(misbehaving_worker.ABORTED)
    assert "was killed by SIGABRT: -[MTLDebugDevice newBuffer]" in failed.reason
    third = runner.run(3).examples_per_second
    fourth = runner.run(3, new_process=True).examples_per_second
    assert len({first, third, fourth}) == 3
    assert runner.server.child_id == fourth
    assert not {first, third} & set(children())


def test_killed_server_is_replaced(runner: TrialRunner) -> None:
    runner.budget_bytes()
    [server] = psutil.Process().children()
    server.kill()
    trial = runner.run(misbehaving_worker.HANGS)
    assert (trial.status, "SIGKILL" in trial.reason) == ("too_big", True)
    assert runner.run(7).status == "fits"


def test_server_that_cannot_start_is_reported() -> None:
    message = "ended with exit code 1: .*No module named no_such_module"
    with (
        TrialServer("no_such_module") as server,
        misbehaving_runner(server) as runner,
        pytest.raises(FinetuneError, match=message),
    ):
        runner.run(7)


def test_hanging_child_is_killed_after_the_time_limit(
    runner: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.budget_bytes()
    child_id = runner.server.child_id
    assert child_id in children()
    clock = count(step=10.0)
    monkeypatch.setattr(trials_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trial = runner.run(misbehaving_worker.HANGS)
    assert child_id not in children()
    assert (trial.status, trial.reason) == ("timed_out", "the trial took longer than 30 s")


def test_out_of_memory_message_from_metal_marks_a_size_as_too_big(server: TrialServer) -> None:
    with misbehaving_runner(server, device=MpsDevice(chip="Apple M2")) as runner:
        trial = runner.run(misbehaving_worker.PRINTS_OOM_MESSAGE)
        assert trial.status == "too_big"
        assert "Insufficient Memory" in trial.reason
        assert runner.run(7).status == "fits"


def test_child_uses_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with TrialServer("misbehaving_worker") as server, misbehaving_runner(server) as runner:
        runner.budget_bytes()
        assert psutil.Process(server.child_id).environ()["LOCAL_RANK"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_child_exits_with_its_parent(number: signal.Signals) -> None:
    path = os.pathsep.join([str(Path(misbehaving_worker.__file__).parent), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-c", TRY_AND_HANG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    ) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "started\n"
        processes = psutil.Process(parent.pid).children(recursive=True)
        assert len(processes) == 2
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=60)
        assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []


@pytest.mark.slow
def test_tiny_model_trains_within_the_memory_limit_and_not_beyond() -> None:
    with (
        TrialServer() as server,
        TrialRunner(TINY, CpuDevice(), server, limit_bytes=3 * 2**29, timeout_seconds=60) as runner,
    ):
        small = runner.run(2)
        assert small.status == "fits"
        assert 0 < (small.peak_bytes or 0) < runner.budget_bytes()
        large = runner.run(1_000_000)
        assert large.status == "too_big"
        assert "DefaultCPUAllocator: can't allocate memory" in large.reason
        assert runner.run(2).status == "fits"
