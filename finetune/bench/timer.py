"""Times workloads on several devices in turn, more than once, and goes on where one fails."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from finetune.bench.bert import SEED
from finetune.bench.results import Phase, Row
from finetune.bench.workload import Effort, Load, Workload
from finetune.devices.base import Device

Announce = Callable[[str], None]
"""Is given the name of the device that is about to compute, which may end the process."""


VISITS = 4
"""The most visits to a workload. Where they differ by chance alone, the ranges of four visits in
each of two benches do not meet in 3 of 100 cases, those of two visits in 33."""

# A step that takes this many times as long as the next one also paid for new memory and kernels.
_COLD = 1.25


@dataclass
class _Timed:
    """A workload, its devices, and what was timed so far.

    Args:
        seconds: Of the last visit, with all that is not timed.
    """

    workload: Workload
    devices: Sequence[Device]
    rows: list[Row] = field(default_factory=list)
    visits: int = 0
    seconds: float = 0.0

    def visit(self, effort: Effort, announce: Announce) -> list[Row]:
        """Time it once more, and return its rows."""
        started = time.time()
        self.rows = time_workload(
            self.workload, self.devices, effort=effort, announce=announce, before=self.rows
        )
        self.visits, self.seconds = self.visits + 1, time.time() - started
        return self.rows

    def is_due(self, *, until: float) -> bool:
        """Return whether another visit ends in time, and may find something."""
        has_timings = any(row.seconds for row in self.rows)
        return has_timings and self.visits < VISITS and time.time() + self.seconds < until


def time_in_rounds(
    workloads: Iterable[tuple[Workload, Sequence[Device]]],
    *,
    effort: Effort,
    announce: Announce,
    until: float,
) -> Iterator[list[Row]]:
    """Yield the rows of each workload in order; then again, with more timings, while time is left.

    What else a machine does comes and goes, which timings far apart show, in a row they do not.

    Args:
        workloads: Each with the devices that it is timed on.
        effort: How long is timed.
        announce: Is given the name of each device before it computes.
        until: When, as ``time.time`` returns it, the last visit should have ended.
    """
    timed = [_Timed(*one) for one in workloads]
    for one in timed:
        yield one.visit(effort, announce)
    while due := [one for one in timed if one.is_due(until=until)]:
        yield min(due, key=lambda one: (one.visits, one.seconds)).visit(effort, announce)


def time_workload(
    workload: Workload,
    devices: Sequence[Device],
    *,
    effort: Effort,
    announce: Announce,
    before: Iterable[Row] = (),
) -> list[Row]:
    """Return a row for each device and phase, with the devices in turn at each timing.

    Args:
        workload: To be timed.
        devices: To be compared.
        effort: How long is timed.
        announce: Is given the name of each device before it computes.
        before: Rows of an earlier visit, to which timings of as many rows a step are added.
    """
    earlier = {(row.phase, row.device): row for row in before}
    trials = [_Trial(workload, device, effort, announce) for device in devices]
    rows: list[Row] = []
    for phase in workload.phases:
        for trial in trials:
            trial.begin(phase, earlier.get((phase, trial.device.name)))
        while due := [trial for trial in trials if trial.is_due]:
            for trial in due:
                trial.repeat()
        rows += [trial.row for trial in trials]
    trials.clear()
    gc.collect()
    for device in devices:
        device.memory.release()
    return rows


class _Trial:
    """A workload on one device.

    Attributes:
        row: What was timed so far, or why it failed.
        is_due: Whether it is to be timed again in this visit.
    """

    def __init__(
        self, workload: Workload, device: Device, effort: Effort, announce: Announce
    ) -> None:
        self.device = device
        self._workload, self._effort, self._announce = workload, effort, announce
        self._load: Load | None = None

    def begin(self, phase: Phase, before: Row | None) -> None:
        """Warm up with as many rows as before, or as the workload wants and time and memory allow.

        What failed before is not tried again.
        """
        self._phase = phase
        self.row = self._before = before or self._workload.row(phase, self.device.name)
        self.is_due = before is None or bool(before.seconds)
        if not self.is_due:
            return
        with self._noting_failure():
            self._announce(self.device.name)
            torch.manual_seed(SEED)
            self._load = self._load or self._workload.build(self.device)
            if before:
                self._take_first_step(before.timed_rows)
            else:
                self._grow()
            seconds = self._warm_up()
            self._left_seconds = self._effort.visit_seconds
            self._calls = max(1, math.ceil(self._effort.timing_seconds / seconds[-1]))
            if self._calls == 1:
                self._add(seconds)

    def repeat(self) -> None:
        """Time once more."""
        with self._noting_failure():
            self._add([self._time(calls=self._calls) / self._calls])

    def _add(self, seconds: Sequence[float]) -> None:
        self._left_seconds -= self._calls * sum(seconds)
        self.is_due = self._left_seconds > 0
        self.row = replace(self.row, timed_rows=self._rows, seconds=(*self.row.seconds, *seconds))

    def _grow(self) -> None:
        """Take steps of more and more rows until all do, or time or memory end."""
        wanted, limit = self._workload.rows, self._effort.step_seconds
        self._take_first_step(self._workload.least_rows)
        while self._rows < wanted:
            seconds = self._taken_seconds[-1]
            if 2 * seconds > limit:
                seconds = self._warm_up()[-1]
            if 2 * seconds > limit:
                self._add_note(f"{wanted:,} rows a step would take too long")
                return
            rows, larger = self._rows, min(wanted, self._rows * (4 if 4 * seconds <= limit else 2))
            if not self._fits(larger):
                self._add_note(f"out of memory with {larger:,} rows a step")
                wanted = max(rows, larger // 2)
                self.device.memory.release()
                self._take_first_step(rows)

    def _fits(self, rows: int) -> bool:
        """Return whether memory holds a step; the tensors of a failed one are free then."""
        try:
            self._take_first_step(rows)
        except (RuntimeError, MemoryError) as error:
            if not self.device.memory.is_out_of_memory(error):
                raise
            return False
        return True

    def _take_first_step(self, rows: int) -> None:
        assert self._load
        self._rows, self._steps = rows, self._load(rows)
        self._taken_seconds = [self._time(calls=1)]

    def _warm_up(self) -> list[float]:
        """Take steps until two in a row agree, or for as long as a visit; return the last two."""
        taken = self._taken_seconds
        while len(taken) < 2 or (
            taken[-2] > _COLD * taken[-1]
            and (len(taken) == 2 or sum(taken[1:]) < self._effort.visit_seconds)
        ):
            taken.append(self._time(calls=1))
        return taken[-2:]

    def _time(self, *, calls: int) -> float:
        self._announce(self.device.name)
        seconds = self.device.time_calls(self._steps[self._phase], calls=calls)
        return seconds

    def _add_note(self, note: str) -> None:
        self.row = replace(self.row, note="; ".join(filter(None, [self.row.note, note])))

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Leave nothing of this visit but a note where it fails."""
        try:
            yield
        # Of every kind that PyTorch, a model or a device can raise.
        except Exception as error:
            self.row, self.is_due = self._before, False
            self._add_note(_explain(error, self.device))


def _explain(error: Exception, device: Device) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, NotImplementedError):
        return f"{device.name} lacks an operation: {first_line}"
    if device.memory.is_out_of_memory(error):
        return f"out of memory: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"
