"""Times workloads in a child process, and goes on with another where a device ends it.

``measure`` is the parent's end, ``main`` the child's. The first request is a selection; the child
replies when it is ready. Each further request names a workload by its number, a device, and the
rows so far; the reply is the rows with more timings.
"""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import torch

from finetune.batch_finder.child import Child, ChildEnded, connect_to_parent
from finetune.bench.results import Row
from finetune.bench.workloads import SEED, Load, Selection, Workload, list_workloads
from finetune.devices.base import Device
from finetune.devices.select import select_device
from finetune.errors import FinetuneError
from finetune.events import Emit, Info, ignore

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

    Other load comes and goes, so the timings are spread out instead of taken back to back.
    """
    first = (selection, devices)
    pairs = list(product(range(len(workloads)), devices))
    rows: dict[tuple[int, str], list[Row]] = {}
    seconds = dict.fromkeys(pairs, 0.0)
    try:
        _begin(child, first)
        for repeat, pair in product(range(MAX_REPEATS), pairs):
            number, device = pair
            workload = workloads[number]
            if repeat == 0:
                timed = [workload.row(phase, device) for phase in workload.phases]
                place = f"{number + 1}/{len(workloads)}"
            else:
                timed = rows[pair]
                place = "again, while time is left:"
                if time.time() + seconds[pair] > until or not all(row.seconds for row in timed):
                    continue
            emit(Info(f"{place} {workload.group}: {workload.name}, {device}"))
            started = time.time()
            try:
                child.send((number, device, timed))
                rows[pair] = _receive(child)
            except ChildEnded:
                note = f"the process {child.exit_status()}"
                rows[pair] = [row.with_note(note) for row in timed]
                seconds[pair] = math.inf
                child.kill()
                child = Child(child.module)
                _begin(child, first)
            else:
                seconds[pair] = time.time() - started
            yield list(chain.from_iterable(rows.values()))
    finally:
        child.kill()


def _begin(child: Child, first: object) -> None:
    """Send the first request and wait until the child is ready."""
    child.send(first)
    try:
        _receive(child)
    except ChildEnded:
        remedy = "see what finetune doctor says of the machine"
        raise FinetuneError(child.describe_end(), remedy=remedy) from None


def _receive(child: Child) -> Any:
    while (reply := child.receive(seconds=1.0)) is None:
        pass
    return reply


def main() -> None:
    """Time what the parent asks for."""
    receive, reply = connect_to_parent()
    selection, names = receive()
    workloads = list_workloads(selection)
    devices = {name: select_device(name, emit=ignore) for name in names}
    for device in devices.values():
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    limits = QUICK if selection.is_quick else FULL
    reply("ready")
    while True:
        number, name, rows = receive()
        reply(time_workload(workloads[number], devices[name], limits, rows=rows))


def time_workload(
    workload: Workload, device: Device, limits: Limits, *, rows: Sequence[Row]
) -> list[Row]:
    """Return the rows, one of each phase, with more timings; or with a note of what has failed."""
    timed: list[Row] = []
    load: Load | None = None
    for row in rows:
        try:
            torch.manual_seed(SEED)
            load = load or workload.build(device)
            timed.append(_time_steps(row, device, load, limits, min_rows=workload.min_rows))
        # Of every kind that PyTorch, a model or a device can raise.
        except Exception as error:
            reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            timed.append(row.with_note(reason))
    load = None
    gc.collect()
    device.memory.release()
    return timed


def _time_steps(row: Row, device: Device, load: Load, limits: Limits, *, min_rows: int) -> Row:
    """Return the row with more timings, of as many rows a step as before, or as fit."""
    rows, wanted = row.timed_rows or min_rows, row.timed_rows or row.rows
    step = load(rows)[row.phase]
    taken = [device.time_calls(step, calls=1)]
    if wanted > rows * limits.step_seconds / taken[-1]:
        # The first step also pays for new memory and kernels.
        taken.append(device.time_calls(step, calls=1))
    fitting = max(rows, int(rows * limits.step_seconds / taken[-1]))
    if wanted > fitting:
        row = row.with_note(f"{wanted:,} rows a step would take too long")
        wanted = fitting
    while rows < wanted:
        try:
            larger_step = load(wanted)[row.phase]
            taken = [device.time_calls(larger_step, calls=1)]
            rows, step = wanted, larger_step
        except (RuntimeError, MemoryError) as error:
            if not device.memory.is_out_of_memory(error):
                raise
        if rows < wanted:
            # Outside of the handler, which keeps the failed step's tensors.
            device.memory.release()
            row = row.with_note(f"out of memory with {wanted:,} rows a step")
            wanted //= 2
    while sum(taken) < limits.repeat_seconds / 3:
        taken.append(device.time_calls(step, calls=1))
    calls = math.ceil(limits.repeat_seconds / 3 / taken[-1])
    # The second of two slow steps is a timing: a third one would take too long.
    timings = taken[1:][-1:] if calls == 1 else []
    while calls * sum(timings) < limits.repeat_seconds:
        timings.append(device.time_calls(step, calls=calls) / calls)
    return replace(row, timed_rows=rows, seconds=[*row.seconds, *timings])


if __name__ == "__main__":
    main()
