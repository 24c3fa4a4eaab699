"""Children are real processes, which ``odd_worker`` ends as the batch size says."""

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

from finetune.batch_finder import prober as prober_module
from finetune.batch_finder.child import Child, starting
from finetune.batch_finder.prober import Prober
from finetune.devices import host_memory
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.mps.device import MpsDevice
from finetune.errors import ProbeFailed

TINY = tiny_case()
PROBE_ODDLY = """
import sys
from odd_worker import HANGS
from finetune.batch_finder.case import Case
from finetune.batch_finder.prober import Prober
from finetune.devices.cpu import CpuDevice
from finetune.config.mode import Mode

case = Case("cpu", {}, 6, Mode("full"), 16, "fp32", "adamw", gradient_checkpointing=False)
with Prober(
    case, device=CpuDevice(), limit_bytes=None, timeout_seconds=600, worker="odd_worker"
) as prober:
    prober.budget_bytes()
    print("begun", flush=True)
    prober.probe(HANGS)
"""


def odd_prober(*, device: Device | None = None, spares: list[Child] | None = None) -> Prober:
    return Prober(
        TINY,
        device=device or CpuDevice(),
        limit_bytes=None,
        timeout_seconds=30,
        spares=spares,
        worker="odd_worker",
    )


@pytest.fixture
def prober(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prober]:
    """Its children hold memory until it has looked at them."""
    numbers = count()

    def process_bytes(process_id: int) -> int:
        held_bytes = host_memory.process_bytes(process_id)
        (tmp_path / str(next(numbers))).touch()
        return held_bytes

    monkeypatch.setattr(prober_module, "process_bytes", process_bytes)
    monkeypatch.setenv(odd_worker.LOOKS, str(tmp_path))
    with odd_prober() as prober:
        yield prober


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def test_a_child_that_only_told_its_budget_is_still_fresh(prober: Prober) -> None:
    prober.budget_bytes()
    [child] = children()
    assert prober.probe_afresh(3).examples_per_second == child


def test_where_a_child_can_not_tell_its_peak_it_is_the_most_that_was_seen(
    prober: Prober,
) -> None:
    outcome = prober.probe(odd_worker.KNOWS_NO_PEAK)
    assert outcome.verdict == "fits"
    assert outcome.peak_bytes == pytest.approx(40 * 2**20, rel=0.5)


def test_a_size_that_passed_beyond_the_budget_unseen_is_too_big(prober: Prober) -> None:
    outcome = prober.probe(odd_worker.BUDGET_BYTES)
    assert (outcome.verdict, outcome.reason) == ("too_big", "it held more than 0.1 GiB")


def test_a_size_that_passes_is_told_with_what_it_took(prober: Prober) -> None:
    outcome = prober.probe(7)
    assert (outcome.verdict, outcome.peak_bytes, outcome.is_strained) == ("fits", 7_000, False)
    assert outcome.batch_size == 7
    assert 0 < outcome.seconds < 10


def test_the_budget_is_what_the_child_finds(prober: Prober) -> None:
    assert prober.budget_bytes() == odd_worker.BUDGET_BYTES


def test_a_strained_allocator_is_told(prober: Prober) -> None:
    outcome = prober.probe(odd_worker.STRAINED)
    assert (outcome.verdict, outcome.is_strained) == ("fits", True)


def test_a_child_is_used_again_until_it_fails_or_a_new_one_is_wanted(prober: Prober) -> None:
    first, second = prober.probe(1), prober.probe(2)
    assert first.examples_per_second == second.examples_per_second
    prober.probe(odd_worker.SEGFAULT)
    third = prober.probe(3)
    assert third.examples_per_second != first.examples_per_second
    fourth = prober.probe_afresh(3)
    assert fourth.examples_per_second != third.examples_per_second
    assert len(children()) == 1


@pytest.mark.parametrize(
    ("size", "verdict", "reason"),
    [
        (odd_worker.KILLED, "failed", "the process was killed by SIGKILL"),
        (odd_worker.SEGFAULT, "failed", "the process was killed by SIGSEGV"),
        (odd_worker.ABORTED, "failed", "SIGABRT: -[MTLDebugDevice newBuffer]: failed assertion"),
        (odd_worker.EXITS, "failed", "ended with exit code 1: the library gave up"),
        (odd_worker.FAILS, "failed", "ValueError: no such thing"),
        (odd_worker.MAKES_NO_CODE, "failed", "RuntimeError: could not create a primitive"),
        (odd_worker.NO_MEMORY, "too_big", "RuntimeError: can't allocate"),
        (odd_worker.ABORTED_FOR_MEMORY, "too_big", "SIGABRT: terminate called after"),
        (odd_worker.GROWS, "too_big", "it held more than 0.1 GiB"),
        (odd_worker.GROWS_AND_MAKES_NO_CODE, "too_big", "could not create a primitive"),
        (odd_worker.GROWS_AND_IS_KILLED, "too_big", "SIGKILL, which the system does when memory"),
    ],
)
def test_each_end_of_a_child_is_called_by_its_name(
    prober: Prober, size: int, verdict: str, reason: str
) -> None:
    outcome = prober.probe(size)
    assert outcome.verdict == verdict
    assert reason in outcome.reason
    assert outcome.examples_per_second is None


def test_a_child_that_hangs_is_given_up_when_its_time_is_over(
    prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober.budget_bytes()
    clock = count(step=10.0)
    monkeypatch.setattr(prober_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    outcome = prober.probe(odd_worker.HANGS)
    assert children() == []
    assert (outcome.verdict, outcome.reason) == ("timed_out", "not done after 30 s")
    assert outcome.seconds == 60


def test_a_size_is_too_big_if_metal_only_writes_that_memory_did_not_suffice() -> None:
    with odd_prober(device=MpsDevice(chip="Apple M2")) as prober:
        outcome = prober.probe(odd_worker.SPEAKS_OF_MEMORY)
    assert outcome.verdict == "too_big"
    assert "Insufficient Memory" in outcome.reason


def test_a_machine_that_begins_to_swap_makes_a_size_too_big(
    prober: Prober, monkeypatch: pytest.MonkeyPatch
) -> None:
    prober.budget_bytes()
    real = psutil.swap_memory()
    swapped = iter([real, real._replace(used=real.used + 2**30)])
    monkeypatch.setattr(psutil, "swap_memory", lambda: next(swapped))
    outcome = prober.probe(odd_worker.HANGS)
    assert (outcome.verdict, outcome.reason) == ("too_big", "the machine swapped 1.0 GiB")


def test_where_memory_is_the_devices_own_the_next_children_are_ready_in_time() -> None:
    device = CpuDevice()
    device.memory.is_shared = False
    with odd_prober(device=device) as prober:
        first = prober.probe(1).examples_per_second
        spares = [child for child in children() if child != first]
        assert prober.probe(odd_worker.GROWS).verdict == "fits"
        assert prober.probe(odd_worker.SEGFAULT).verdict == "failed"
        assert prober.probe(1).examples_per_second in spares
        assert len(children()) == 3
    assert children() == []


def test_a_child_that_was_started_before_trains_first_and_none_is_left_that_never_does() -> None:
    with starting("odd_worker") as spares:
        [early] = children()
        with odd_prober(spares=spares) as prober:
            assert prober.probe(1).examples_per_second == early
        assert children() == []
    with starting("odd_worker"):
        assert len(children()) == 1
    assert children() == []


def test_no_child_is_left_when_the_context_ends() -> None:
    with odd_prober() as prober:
        prober.probe(1)
        assert len(children()) == 1
    assert children() == []


def test_a_child_that_can_not_begin_is_an_error() -> None:
    prober = Prober(
        TINY, device=CpuDevice(), limit_bytes=None, timeout_seconds=9, worker="no_such_module"
    )
    with prober, pytest.raises(ProbeFailed, match="No module named no_such_module"):
        prober.probe(1)


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    """A process that waits for a child that hangs."""
    path = os.pathsep.join([str(Path(odd_worker.__file__).parent), os.getcwd()])
    with subprocess.Popen(
        [sys.executable, "-c", PROBE_ODDLY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_does_not_outlive_its_parent(
    parent: "subprocess.Popen[str]", number: signal.Signals
) -> None:
    [child] = psutil.Process(parent.pid).children()
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (number is signal.SIGINT)
    child.wait(timeout=60)


@pytest.mark.slow
def test_a_tiny_model_trains_within_its_cap_and_is_refused_memory_beyond() -> None:
    with Prober(TINY, device=CpuDevice(), limit_bytes=3 * 2**29, timeout_seconds=60) as prober:
        small = prober.probe(2)
        assert small.verdict == "fits"
        assert small.peak_bytes is not None
        assert (
            small.peak_bytes < prober.budget_bytes() == CpuDevice().memory.budget_bytes(3 * 2**29)
        )
        large = prober.probe(1_000_000)
        assert large.verdict == "too_big"
        assert "DefaultCPUAllocator: can't allocate memory" in large.reason
        assert prober.probe(2).verdict == "fits"
