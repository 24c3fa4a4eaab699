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

# If workloads differ by chance only, the ranges of four repeats in each of two benches do not meet
# in 3 of 100 cases, the ranges of two repeats in 33.
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
        # So that a step that does not fit fails instead of making the machine swap.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    pairs, started = list(product(range(len(workloads)), devices)), time.time()
    rows: dict[tuple[int, Device], list[Row]] = {}
    seconds = dict.fromkeys(pairs, 0.0)
    for repeat, pair in product(range(MAX_REPEATS), pairs):
        number, device = pair
        workload = workloads[number]
        timed = rows.get(pair) or [workload.row(phase, device.name) for phase in workload.phases]
        is_over = time.time() + seconds[pair] > until or not all(row.seconds for row in timed)
        if repeat and is_over:
            continue
        done, now = pairs.index(pair), time.time()
        place = "again, while time is left:" if repeat else f"{number + 1}/{len(workloads)}"
        left = ""
        if done and not repeat:
            estimate = max((now - started) / done * (len(pairs) - done), until - now)
            left = f", about {duration(estimate)} left"
        emit(Info(f"{place} {workload.group}: {workload.name}, {device.name}{left}"))
        rows[pair] = time_workload(workload, device, limits, rows=timed)
        seconds[pair] = time.time() - now
        yield list(chain.from_iterable(rows.values()))


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
        # PyTorch, a model or a device can raise any kind.
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
    """Return the row with more timings, with the rows per step used before or that fit."""
    row, step = _warm_up(row, device, make_steps, limits, min_rows=min_rows)
    seconds = device.time_calls(step, calls=1)
    calls = math.ceil(limits.repeat_seconds / 3 / seconds)
    timings = [device.time_calls(step, calls=calls) / calls for _ in range(3 if calls > 1 else 0)]
    return replace(row, seconds=[*row.seconds, *(timings or [seconds])])


def _warm_up(
    row: Row, device: Device, make_steps: MakeSteps, limits: Limits, *, min_rows: int
) -> tuple[Row, Callable[[], object]]:
    """Take a step on all rows, or on fewer if time or memory requires it; return the step."""
    rows = row.timed_rows or row.rows
    if not row.timed_rows and min_rows < rows:
        step = make_steps(min_rows)[row.phase]
        step()
        fitting = int(min_rows * limits.step_seconds / device.time_calls(step, calls=1))
        if fitting < rows:
            row = row.with_note(f"{rows:,} rows per step would take too long")
        if fitting <= min_rows:
            return replace(row, timed_rows=min_rows), step
        rows = min(rows, fitting)
    while True:
        try:
            step = make_steps(rows)[row.phase]
            step()
            return replace(row, timed_rows=rows), step
        except (RuntimeError, MemoryError) as error:
            if row.timed_rows or rows <= min_rows or not device.memory.is_out_of_memory(error):
                raise
        # Outside of the handler, which keeps the tensors of the failed step.
        device.memory.release()
        row = row.with_note(f"out of memory with {rows:,} rows per step")
        rows = max(min_rows, rows // 2)
