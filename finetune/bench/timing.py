"""Times workloads in a child process, and goes on in another where a device ends it.

``measure`` is the parent's end, ``main`` the child's. A request names a workload by its number in a
selection, a device, and the rows so far; the reply is the rows with more timings.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product

import torch

from finetune.batch_finder.child import Child, ChildEnded, connect_to_parent
from finetune.bench.results import Row
from finetune.bench.workloads import SEED, MakeSteps, Selection, Workload, list_workloads
from finetune.devices.base import Device
from finetune.devices.select import select_device
from finetune.events import Emit, Info, ignore
from finetune.tasks.tables import duration

MAX_REPEATS = 4
"""Of a workload. Where they differ by chance alone, the ranges of four repeats in each of two
benches do not meet in 3 of 100 cases, those of two repeats in 33."""
FULL_SECONDS, QUICK_SECONDS = 420.0, 45.0
"""Once they are over, no workload is repeated."""


@dataclass(frozen=True)
class Limits:
    """How long a step and a repeat may take; a step that takes longer has fewer rows."""

    step_seconds: float
    repeat_seconds: float


FULL = Limits(step_seconds=7.0, repeat_seconds=1.5)
QUICK = Limits(step_seconds=0.3, repeat_seconds=0.3)


def measure(
    child: Child,
    selection: Selection,
    workloads: Sequence[Workload],
    devices: Sequence[str],
    *,
    until: float,
    emit: Emit,
) -> Iterator[list[Row]]:
    """Yield all rows so far after each workload on each device; repeat while time is left.

    Other work comes and goes, so the timings are spread out instead of taken back to back.
    """
    pairs, begun = list(product(range(len(workloads)), devices)), time.time()
    rows: dict[tuple[int, str], list[Row]] = {}
    seconds = dict.fromkeys(pairs, 0.0)
    try:
        for repeat, pair in product(range(MAX_REPEATS), pairs):
            number, device = pair
            workload = workloads[number]
            timed = rows.get(pair) or [workload.row(phase, device) for phase in workload.phases]
            is_over = time.time() + seconds[pair] > until or not all(row.seconds for row in timed)
            if repeat and is_over:
                continue
            done, now = pairs.index(pair), time.time()
            place = "again, while time is left:" if repeat else f"{number + 1}/{len(workloads)}"
            left = ""
            if done and not repeat:
                estimate = max((now - begun) / done * (len(pairs) - done), until - now)
                left = f", about {duration(estimate)} left"
            emit(Info(f"{place} {workload.group}: {workload.name}, {device}{left}"))
            started = time.time()
            child.send((selection, number, device, timed))
            try:
                rows[pair] = child.receive()
                seconds[pair] = time.time() - started
            except ChildEnded:
                rows[pair] = [row.with_note(child.describe_end()) for row in timed]
                seconds[pair] = math.inf
                child.kill()
                child = Child(child.module)
            yield list(chain.from_iterable(rows.values()))
    finally:
        child.kill()


def main() -> None:
    """Time what the parent asks for."""
    receive, reply = connect_to_parent()

    @cache
    def device_of(name: str) -> Device:
        device = select_device(name, emit=ignore)
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
        return device

    while True:
        selection, number, name, rows = receive()
        workload = list_workloads(selection)[number]
        limits = QUICK if selection.is_quick else FULL
        reply(time_workload(workload, device_of(name), limits, rows=rows))


def time_workload(
    workload: Workload, device: Device, limits: Limits, *, rows: Sequence[Row]
) -> list[Row]:
    """Return the rows, one of each phase, with more timings; or with a note of what has failed."""
    timed: list[Row] = []
    make_steps: MakeSteps | None = None
    for row in rows:
        try:
            torch.manual_seed(SEED)
            make_steps = make_steps or workload.build(device)
            timed.append(_time_steps(row, device, make_steps, limits, min_rows=workload.min_rows))
        # Of every kind that PyTorch, a model or a device can raise.
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
    """Return the row with more timings, of as many rows a step as before, or as fit."""
    row, step = _warm_up(row, device, make_steps, limits, min_rows=min_rows)
    seconds = device.time_calls(step, calls=1)
    calls = math.ceil(limits.repeat_seconds / 3 / seconds)
    timings = [device.time_calls(step, calls=calls) / calls for _ in range(3 if calls > 1 else 0)]
    return replace(row, seconds=[*row.seconds, *(timings or [seconds])])


def _warm_up(
    row: Row, device: Device, make_steps: MakeSteps, limits: Limits, *, min_rows: int
) -> tuple[Row, Callable[[], object]]:
    """Take a step of all rows, or of as many as time and memory allow; return it with their number.

    The first step also pays for new memory and kernels.
    """
    rows = row.timed_rows or row.rows
    if not row.timed_rows and min_rows < rows:
        step = make_steps(min_rows)[row.phase]
        step()
        fitting = int(min_rows * limits.step_seconds / device.time_calls(step, calls=1))
        if fitting < rows:
            row = row.with_note(f"{rows:,} rows a step would take too long")
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
        # Outside of the handler, which keeps the failed step's tensors.
        device.memory.release()
        row = row.with_note(f"out of memory with {rows:,} rows a step")
        rows = max(min_rows, rows // 2)


if __name__ == "__main__":
    main()
