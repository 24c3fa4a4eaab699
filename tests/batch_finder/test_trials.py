"""Trials in real child processes. ``odd_worker`` ends as the batch size tells it to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import odd_worker
import psutil
import pytest
from tiny_models import tiny_case

from finetune.batch_finder import trials as trials_module
from finetune.batch_finder.trials import TrialRunner
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.device import MpsDevice

TINY = tiny_case()
TRY_AND_HANG = """
import sys
from odd_worker import HANGS
from finetune.batch_finder.results import Case
from finetune.batch_finder.trials import TrialRunner
from finetune.devices.cpu import CpuDevice
from finetune.config.schema import Mode

case = Case("cpu", {}, 6, Mode("full"), 16)
with TrialRunner(
    case, CpuDevice(), limit_bytes=None, timeout_seconds=600, module="odd_worker"
) as runner:
    runner.budget_bytes()
    print("begun", flush=True)
    runner.run(HANGS)
"""


def odd_runner(device: Device | None = None) -> TrialRunner:
    return TrialRunner(
        TINY, device or CpuDevice(), limit_bytes=None, timeout_seconds=30, module="odd_worker"
    )


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrialRunner]:
    """Its children keep memory until the parent has measured it."""
    numbers = count()

    def process_bytes(process_id: int) -> int:
        reserved_bytes = host.process_bytes(process_id)
        (tmp_path / str(next(numbers))).touch()
        return reserved_bytes

    monkeypatch.setattr(trials_module, "process_bytes", process_bytes)
    monkeypatch.setenv(odd_worker.LOOKS, str(tmp_path))
    with odd_runner() as runner:
        yield runner


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


@pytest.mark.parametrize(
    ("size", "status", "reason"),
    [
        (7, "fits", ""),
        (odd_worker.KNOWS_NO_PEAK, "fits", ""),
        (odd_worker.BUDGET_BYTES, "too_big", "it used more than 0.1 GiB"),
        (odd_worker.KILLED, "too_big", "SIGKILL, which the system does when memory"),
        (odd_worker.SEGFAULT, "failed", "the process was killed by SIGSEGV"),
        (odd_worker.ABORTED, "failed", "SIGABRT: -[MTLDebugDevice newBuffer]: failed assertion"),
        (odd_worker.EXITS, "failed", "ended with exit code 1: the library gave up"),
        (odd_worker.FAILS, "failed", "ValueError: no such thing"),
        (odd_worker.NO_MEMORY, "too_big", "RuntimeError: can't allocate"),
        (odd_worker.ABORTED_FOR_MEMORY, "too_big", "SIGABRT: terminate called after"),
        (odd_worker.GROWS, "too_big", "it used more than 0.1 GiB"),
    ],
)
def test_a_trial_reports_how_it_ended(
    runner: TrialRunner, size: int, status: str, reason: str
) -> None:
    trial = runner.run(size)
    assert (trial.status, trial.batch_size) == (status, size)
    assert reason in trial.reason
    assert trial.seconds > 0
    if size == odd_worker.KNOWS_NO_PEAK:
        assert trial.peak_bytes == pytest.approx(40 * 2**20, rel=0.5)
    elif status == "fits":
        assert trial.peak_bytes == 1000 * size


def test_a_child_is_used_again_until_it_fails_or_a_new_one_is_wanted(runner: TrialRunner) -> None:
    first, second = (runner.run(size).examples_per_second for size in (1, 2))
    assert first == second
    runner.run(odd_worker.SEGFAULT)
    third = runner.run(3).examples_per_second
    fourth = runner.run(3, new_process=True).examples_per_second
    assert len({first, third, fourth}) == 3
    assert len(children()) == 1


def test_a_child_that_hangs_is_ended_after_the_time_limit(
    runner: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.budget_bytes()
    clock = count(step=10.0)
    monkeypatch.setattr(trials_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    trial = runner.run(odd_worker.HANGS)
    assert children() == []
    assert (trial.status, trial.reason) == ("timed_out", "the trial took longer than 30 s")


def test_a_size_is_too_big_if_metal_only_writes_that_memory_did_not_suffice() -> None:
    with odd_runner(device=MpsDevice(chip="Apple M2")) as runner:
        trial = runner.run(odd_worker.SPEAKS_OF_MEMORY)
    assert trial.status == "too_big"
    assert "Insufficient Memory" in trial.reason


def test_a_child_uses_the_gpu_of_its_rank(
    runner: TrialRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    runner.budget_bytes()
    [child] = children()
    assert psutil.Process(child).environ()["LOCAL_RANK"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_does_not_outlive_its_parent(number: signal.Signals) -> None:
    path = os.pathsep.join([str(Path(odd_worker.__file__).parent), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-c", TRY_AND_HANG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    ) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "begun\n"
        [child] = psutil.Process(parent.pid).children()
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=60)
        assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)
        child.wait(timeout=60)


@pytest.mark.slow
def test_a_tiny_model_trains_within_its_limit_and_gets_no_memory_beyond() -> None:
    with TrialRunner(TINY, CpuDevice(), limit_bytes=3 * 2**29, timeout_seconds=60) as runner:
        small = runner.run(2)
        assert small.status == "fits"
        assert 0 < (small.peak_bytes or 0) < runner.budget_bytes()
        large = runner.run(1_000_000)
        assert large.status == "too_big"
        assert "DefaultCPUAllocator: can't allocate memory" in large.reason
        assert runner.run(2).status == "fits"
