"""Time workloads on devices, again and again while time is left."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import torch

from finetune.bench.results import Row
from finetune.bench.workloads import SEED, MakeSteps, Workload
from finetune.devices.base import Device
from finetune.events import Info, emit
from finetune.tasks.tables import duration

# If two benches differ only by chance, their ranges of four repeats are disjoint in 3% of cases,
# and their ranges of two repeats in 33%.
MAX_REPEATS = 4
# After this time, no workload is repeated.
FULL_SECONDS, QUICK_SECONDS = 420.0, 45.0


@dataclass(frozen=True)
class Limits:
    """How long a step and a repeat may take. A step that takes longer gets fewer rows."""

    step_seconds: float
    repeat_seconds: float


FULL = Limits(step_seconds=7.0, repeat_seconds=1.5)
QUICK = Limits(step_seconds=0.3, repeat_seconds=0.3)


def measure(
    workloads: Sequence[Workload], devices: Sequence[Device], limits: Limits, *, until: float
) -> Iterator[list[Row]]:
    """Yield all rows so far after each workload on each device, and repeat while time is left."""
    for device in devices:
        # A step that does not fit fails instead of making the machine swap.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    pairs, started = list(product(workloads, devices)), time.time()
    timed: list[list[Row]] = []
    seconds = [0.0] * len(pairs)
    for repeat, (number, (workload, device)) in product(range(MAX_REPEATS), enumerate(pairs)):
        now = time.time()
        if not repeat:
            timed.append([workload.row(phase, device.name) for phase in workload.phases])
            left = max((now - started) / max(1, number) * (len(pairs) - number), until - now)
            progress = f"{number + 1}/{len(pairs)}, about {duration(left)} left:"
        elif now + seconds[number] > until or not all(row.seconds for row in timed[number]):
            continue
        else:
            progress = "again, while time is left:"
        emit(Info(f"{progress} {workload.group}: {workload.name}, {device.name}"))
        timed[number] = time_workload(workload, device, limits, rows=timed[number])
        seconds[number] = time.time() - now
        yield list(chain.from_iterable(timed))


def time_workload(
    workload: Workload, device: Device, limits: Limits, *, rows: Sequence[Row]
) -> list[Row]:
    """Return the rows, one for each phase, with more timings or with a note of what failed."""
    timed: list[Row] = []
    make_steps: MakeSteps | None = None
    for row in rows:
        try:
            torch.manual_seed(SEED)
            make_steps = make_steps or workload.build(device)
            timed.append(_time_steps(row, device, make_steps, limits, min_rows=workload.min_rows))
        # PyTorch, a model or a device can raise any exception.
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            timed.append(row.with_note(reason))
    make_steps = None
    gc.collect()
    device.memory.release()
    return timed


def _time_steps(
    row: Row, device: Device, make_steps: MakeSteps, limits: Limits, *, min_rows: int
) -> Row:
    """Return the row with more timings."""
    row, step = _warm_up(row, device, make_steps, limits, min_rows=min_rows)
    seconds = device.time_calls(step, calls=1)
    calls = math.ceil(limits.repeat_seconds / 3 / seconds)
    timings = [device.time_calls(step, calls=calls) / calls for _ in range(3 if calls > 1 else 0)]
    return replace(row, seconds=[*row.seconds, *(timings or [seconds])])


def _warm_up(
    row: Row, device: Device, make_steps: MakeSteps, limits: Limits, *, min_rows: int
) -> tuple[Row, Callable[[], object]]:
    """Take a step on as many rows as before, or as time and memory allow; return the step."""
    rows = row.timed_rows or row.rows
    if not row.timed_rows and min_rows < rows:
        step = make_steps(min_rows)[row.phase]
        step()
        fitting = int(min_rows * limits.step_seconds / device.time_calls(step, calls=1))
        if fitting < rows:
            row = row.with_note(f"{rows:,} rows per step would take too long")
        rows = max(min_rows, min(rows, fitting))
    while True:
        try:
            step = make_steps(rows)[row.phase]
            step()
            return replace(row, timed_rows=rows), step
        except (RuntimeError, MemoryError) as error:
            if row.timed_rows or rows <= min_rows or not device.memory.is_out_of_memory(error):
                raise
        # Not in the except block, which keeps the tensors of the failed step alive.
        device.memory.release()
        row = row.with_note(f"out of memory with {rows:,} rows per step")
        rows = max(min_rows, rows // 2)
