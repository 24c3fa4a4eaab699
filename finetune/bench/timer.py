"""Times a workload on several devices in turn, and goes on where one of them fails."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from finetune.bench.bert import SEED
from finetune.bench.results import Row
from finetune.bench.workload import Phase, Task, Workload
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


FULL = Effort(step_seconds=20.0, least_seconds=0.5, repeats=5, fewest_repeats=2, most_seconds=20.0)
QUICK = Effort(step_seconds=0.4, least_seconds=0.05, repeats=3, fewest_repeats=1, most_seconds=0.4)

# A first step that takes this many times as long as it may is slow by itself.
_MOST_START = 16

# For an estimate of the time that all takes.
_PRODUCT_WIDTH = 1024
_SHARE_OF_PRODUCTS = 0.35
_SHORTEST_STEP_SECONDS = 0.01
_BUILD_SECONDS = 0.5


def time_workload(
    workload: Workload, devices: Sequence[Device], *, effort: Effort, announce: Announce
) -> list[Row]:
    """Return a row for each device and phase, with the devices in turn within each repeat."""
    rows = _time_in_turn(
        [_Trial(workload, device, effort, announce) for device in devices],
        phases=workload.phases,
        repeats=effort.repeats,
    )
    gc.collect()
    for device in devices:
        device.memory.release()
    return rows


def _time_in_turn(
    trials: Sequence["_Trial"], *, phases: Sequence[Phase], repeats: int
) -> list[Row]:
    rows = []
    for phase in phases:
        for trial in trials:
            trial.begin(phase)
        for _ in range(repeats):
            for trial in trials:
                trial.repeat()
        rows += [trial.row() for trial in trials]
    return rows


class _Trial:
    """A workload on one device: what was timed so far, or why it failed."""

    def __init__(
        self, workload: Workload, device: Device, effort: Effort, announce: Announce
    ) -> None:
        self.device = device
        self._workload, self._effort, self._announce = workload, effort, announce
        self._task: Task | None = None

    def begin(self, phase: Phase) -> None:
        """Warm up with as many rows as the workload wants, or as time and memory allow."""
        self._phase, self._rows, self._calls = phase, 0, 1
        self._seconds: list[float] = []
        self._note = ""
        self._announce(self.device.name)
        with self._noting_failure():
            torch.manual_seed(SEED)
            self._task = self._task or self._workload.build(self.device)
            seconds = self._grow()
            if seconds < self._effort.least_seconds:
                # The first step also paid for new memory and kernels.
                seconds = self._time(calls=1)
            self._calls = max(1, math.ceil(self._effort.least_seconds / seconds))

    def repeat(self) -> None:
        """Time once more, unless that has taken long enough, or failed."""
        is_enough = sum(self._seconds) * self._calls >= self._effort.most_seconds
        if not self._rows or (is_enough and len(self._seconds) >= self._effort.fewest_repeats):
            return
        with self._noting_failure():
            self._seconds.append(self._time(calls=self._calls) / self._calls)

    def row(self) -> Row:
        """Return what was measured; a later failure leaves nothing of it."""
        return Row(
            group=self._workload.group,
            workload=self._workload.name,
            phase=self._phase,
            device=self.device.name,
            rows=self._workload.rows,
            timed_rows=self._rows,
            seconds=tuple(self._seconds) if self._rows else (),
            note=self._note,
        )

    def _grow(self) -> float:
        """Take steps of more and more rows until all do, or time or memory end; return the last's.

        The seconds are those of a first step of its shape.
        """
        wanted, rows = self._workload.rows, self._workload.least_rows
        limit = self._effort.step_seconds
        seconds = self._step(rows)
        if rows < wanted and limit < 2 * seconds < _MOST_START * limit:
            # Most of it may have been the start of the device.
            seconds = self._step(rows)
        while rows < wanted:
            if 2 * seconds > limit:
                self._note = f"{wanted:,} rows a step would take too long"
                break
            larger = min(wanted, rows * (4 if 4 * seconds <= limit else 2))
            try:
                seconds = self._step(larger)
                rows = larger
                continue
            except (RuntimeError, MemoryError) as error:
                if not self.device.memory.is_out_of_memory(error):
                    raise
            # Only here: while the error is handled, its traceback keeps the tensors alive.
            self._note = f"out of memory with {larger:,} rows a step"
            wanted = max(rows, larger // 2)
            self.device.memory.release()
            if wanted == rows:
                seconds = self._step(rows)
        self._rows = rows
        return seconds

    def _step(self, rows: int) -> float:
        assert self._task
        self._task.load(rows)
        return self._time(calls=1)

    def _time(self, *, calls: int) -> float:
        self._announce(self.device.name)
        assert self._task
        work = self._task.step if self._phase == "training" else self._task.evaluate
        return self.device.time_calls(work, calls=calls)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        # Of every kind that PyTorch, a model or a device can raise.
        except Exception as error:
            self._rows, self._note = 0, _explain(error, self.device)


def _explain(error: Exception, device: Device) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, NotImplementedError):
        return f"{device.name} lacks an operation: {first_line}"
    if device.memory.is_out_of_memory(error):
        return f"out of memory: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"


def estimate_seconds(workload: Workload, *, gigaflops_a_second: float, effort: Effort) -> float:
    """Return about how long a workload takes on a device, by its products alone.

    Args:
        workload: To be timed.
        gigaflops_a_second: What the device reaches in a large product.
        effort: How long is timed.
    """
    total = 0.0
    for phase in workload.phases:
        gigaflops = workload.gigaflops * workload.rows * (3 if phase == "training" else 1)
        step = gigaflops / (_SHARE_OF_PRODUCTS * gigaflops_a_second)
        if workload.least_rows < workload.rows:
            step = min(step, effort.step_seconds)
        timing = max(step, _SHORTEST_STEP_SECONDS, effort.least_seconds)
        most_seconds = max(effort.most_seconds, effort.fewest_repeats * timing)
        total += 2 * step + min(effort.repeats * timing, most_seconds)
    return total + _BUILD_SECONDS


def measure_products(device: Device) -> float:
    """Return the gigaflops a second of a product of large matrices."""
    factor = torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, device=device.torch_device)
    seconds = min(device.time_calls(lambda: factor @ factor, calls=1) for _ in range(3))
    return 2e-9 * _PRODUCT_WIDTH**3 / seconds
