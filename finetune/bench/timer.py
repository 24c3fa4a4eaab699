"""Times a workload on several devices in turn, and goes on where one of them fails."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from finetune.bench.bert import SEED
from finetune.bench.groups import Phase
from finetune.bench.results import Row
from finetune.bench.workload import Load, Workload
from finetune.devices.base import Device

Announce = Callable[[str], None]
"""Is given the name of the device that is about to compute, which may end the process."""


@dataclass(frozen=True)
class Effort:
    """How long is timed.

    Args:
        step_seconds: A step that takes longer is taken with fewer rows.
        least_seconds: Of one timing: as many steps as it takes.
        repeats: Timings of each row.
        fewest_repeats: Timings even where they take longer than ``most_seconds``.
        most_seconds: Of all timings of a row.
    """

    step_seconds: float
    least_seconds: float
    repeats: int
    fewest_repeats: int
    most_seconds: float


FULL = Effort(step_seconds=7.0, least_seconds=0.5, repeats=5, fewest_repeats=2, most_seconds=7.0)
QUICK = Effort(step_seconds=0.3, least_seconds=0.05, repeats=3, fewest_repeats=1, most_seconds=0.3)

# A first step that takes this many times as long as it may is slow by itself.
_MOST_START = 16


def time_workload(
    workload: Workload, devices: Sequence[Device], *, effort: Effort, announce: Announce
) -> list[Row]:
    """Return a row for each device and phase, with the devices in turn within each repeat."""
    trials = [_Trial(workload, device, effort, announce) for device in devices]
    rows = [row for phase in workload.phases for row in _time_in_turn(trials, phase, effort)]
    trials.clear()
    gc.collect()
    for device in devices:
        device.memory.release()
    return rows


def _time_in_turn(trials: Sequence["_Trial"], phase: Phase, effort: Effort) -> list[Row]:
    for trial in trials:
        trial.begin(phase)
    for _ in range(effort.repeats):
        for trial in trials:
            trial.repeat()
    return [trial.row() for trial in trials]


class _Trial:
    """A workload on one device: what was timed so far, or why it failed."""

    def __init__(
        self, workload: Workload, device: Device, effort: Effort, announce: Announce
    ) -> None:
        self._workload, self._device = workload, device
        self._effort, self._announce = effort, announce
        self._load: Load | None = None

    def begin(self, phase: Phase) -> None:
        """Warm up with as many rows as the workload wants, or as time and memory allow."""
        self._phase, self._rows, self._calls, self._note = phase, 0, 1, ""
        self._seconds: list[float] = []
        self._announce(self._device.name)
        with self._noting_failure():
            torch.manual_seed(SEED)
            self._load = self._load or self._workload.build(self._device)
            seconds = self._grow()
            if seconds < self._effort.least_seconds:
                # The first step also paid for new memory and kernels.
                seconds = self._time(calls=1)
                self._calls = max(1, math.ceil(self._effort.least_seconds / seconds))
                self._seconds = []

    def repeat(self) -> None:
        """Time once more, unless that has taken long enough, or failed."""
        is_enough = sum(self._seconds) * self._calls >= self._effort.most_seconds
        if not self._rows or (is_enough and len(self._seconds) >= self._effort.fewest_repeats):
            return
        with self._noting_failure():
            self._seconds.append(self._time(calls=self._calls) / self._calls)

    def row(self) -> Row:
        """Return what was measured; a later failure leaves nothing of it."""
        row = self._workload.row(self._phase, self._device.name, note=self._note)
        seconds = tuple(self._seconds) if self._rows else ()
        return replace(row, timed_rows=self._rows, seconds=seconds)

    def _grow(self) -> float:
        """Take steps of more and more rows until all do, or time or memory end; return the last's.

        The seconds are those of a first step of its shape.
        """
        wanted, rows = self._workload.rows, self._workload.least_rows
        limit = self._effort.step_seconds
        seconds = self._first_step(rows)
        if rows < wanted and limit < 2 * seconds < _MOST_START * limit:
            # Most of it may have been the start of the device.
            seconds = self._time(calls=1)
            # It is warm: where no larger step is taken, it counts.
            self._seconds = [seconds]
        while rows < wanted:
            if 2 * seconds > limit:
                self._note = f"{wanted:,} rows a step would take too long"
                break
            larger = min(wanted, rows * (4 if 4 * seconds <= limit else 2))
            if larger_seconds := self._step_that_fits(larger):
                rows, seconds = larger, larger_seconds
                continue
            self._note = f"out of memory with {larger:,} rows a step"
            wanted = max(rows, larger // 2)
            self._device.memory.release()
            if wanted == rows:
                seconds = self._first_step(rows)
        self._rows = rows
        return seconds

    def _step_that_fits(self, rows: int) -> float | None:
        """Return None where memory runs out; the tensors of the failed step are free then."""
        try:
            return self._first_step(rows)
        except (RuntimeError, MemoryError) as error:
            if not self._device.memory.is_out_of_memory(error):
                raise
        return None

    def _first_step(self, rows: int) -> float:
        assert self._load
        self._steps = self._load(rows)
        self._seconds = []
        return self._time(calls=1)

    def _time(self, *, calls: int) -> float:
        self._announce(self._device.name)
        return self._device.time_calls(self._steps[self._phase], calls=calls)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        # Of every kind that PyTorch, a model or a device can raise.
        except Exception as error:
            self._rows, self._note = 0, _explain(error, self._device)


def _explain(error: Exception, device: Device) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, NotImplementedError):
        return f"{device.name} lacks an operation: {first_line}"
    if device.memory.is_out_of_memory(error):
        return f"out of memory: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"
