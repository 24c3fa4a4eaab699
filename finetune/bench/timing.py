"""The child process that times workloads: only it ends by a device that dies.

It reads one line of JSON, a request; it replies with the device that ``begins`` before each piece
of work, and with the ``rows`` of each workload, some of them again once all were timed.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch

from finetune.batch_finder.child import connect_to_parent
from finetune.bench.results import Row
from finetune.bench.workloads import SEED, Load, Selection, Workload, list_workloads
from finetune.devices.base import Device
from finetune.devices.select import select_device

MAX_REPEATS = 4
"""Of a workload. Where they differ by chance alone, the ranges of four repeats in each of two
benches do not meet in 3 of 100 cases, those of two repeats in 33."""
# A step that takes this many times as long as the next one also paid for new memory and kernels.
_COLD = 1.25


@dataclass(frozen=True)
class Limits:
    """How long is timed: one step, one timing of as many steps as it takes, one repeat, all.

    A step that takes longer has fewer rows; workloads are repeated until the total is over.
    """

    step_seconds: float
    timing_seconds: float
    repeat_seconds: float
    total_seconds: float


FULL = Limits(step_seconds=7.0, timing_seconds=0.5, repeat_seconds=1.5, total_seconds=420.0)
QUICK = Limits(step_seconds=0.3, timing_seconds=0.05, repeat_seconds=0.3, total_seconds=45.0)


def main() -> None:
    """Time the workloads of the parent's request."""
    requests, reply = connect_to_parent()
    request = requests.get()
    selection = Selection(**request["selection"])
    devices = [select_device(name, emit=lambda _: None) for name in request["devices"]]
    for device in devices:
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    first, *rest = list_workloads(selection)[request["first"] :]
    pairs = [(first, [one for one in devices if one.name not in request["skipped"]])]
    pairs += [(one, devices) for one in rest]
    limits = QUICK if selection.is_quick else FULL
    for rows in time_workloads(
        pairs, limits, begin=lambda name: reply({"begins": name}), until=request["until"]
    ):
        reply({"rows": [asdict(row) for row in rows]})


def time_workloads(
    workloads: Sequence[tuple[Workload, Sequence[Device]]],
    limits: Limits,
    *,
    begin: Callable[[str], None],
    until: float,
) -> Iterator[list[Row]]:
    """Yield the rows of each workload in order; then again, with more timings, while time is left.

    Other load comes and goes, so the timings are spread out instead of taken back to back.
    ``begin`` is given the name of each device before it computes, which may end the process.
    """
    rows: list[list[Row]] = [[] for _ in workloads]
    seconds = [0.0] * len(workloads)
    repeats = [0] * len(workloads)
    due = list(range(len(workloads)))
    while due:
        # All once in order, then those that were timed the least, the quickest first.
        number = min(due, key=lambda one: (repeats[one], seconds[one]))
        started = time.time()
        rows[number] = time_workload(*workloads[number], limits, begin=begin, before=rows[number])
        seconds[number] = time.time() - started
        repeats[number] += 1
        yield rows[number]
        due = [one for one in range(len(workloads)) if not repeats[one]] or [
            one
            for one in range(len(workloads))
            if repeats[one] < MAX_REPEATS
            and any(row.seconds for row in rows[one])
            and time.time() + seconds[one] < until
        ]


def time_workload(
    workload: Workload,
    devices: Sequence[Device],
    limits: Limits,
    *,
    begin: Callable[[str], None],
    before: Sequence[Row] = (),
) -> list[Row]:
    """Return a row for each phase and device; timings are added to those of the rows before."""
    earlier = {(row.phase, row.device): row for row in before}
    devices = [one for one in devices if workload.device in (None, one.name)]
    loads: dict[str, Load] = {}
    rows = []
    for phase, device in product(workload.phases, devices):
        row = earlier.get((phase, device.name)) or workload.row(phase, device.name)
        # What failed before is not tried again.
        if row.seconds or not before:
            begin(device.name)
            try:
                torch.manual_seed(SEED)
                if device.name not in loads:
                    loads[device.name] = workload.build(device)
                load = loads[device.name]
                row = _time_steps(row, device, load, limits, min_rows=workload.min_rows)
            # Of every kind that PyTorch, a model or a device can raise.
            except Exception as error:
                row = _with_note(row, _explain(error, device))
        rows.append(row)
    loads.clear()
    gc.collect()
    for device in devices:
        device.memory.release()
    return rows


def _time_steps(row: Row, device: Device, load: Load, limits: Limits, *, min_rows: int) -> Row:
    """Return the row with more timings, of as many rows a step as before, or as fit."""

    def take_first_step(rows: int) -> tuple[Callable[[], object], list[float]]:
        step = load(rows)[row.phase]
        return step, [device.time_calls(step, calls=1)]

    rows = row.timed_rows or min_rows
    step, taken = take_first_step(rows)
    wanted = row.timed_rows or row.rows
    if wanted > rows * limits.step_seconds / taken[-1]:
        # The first step also pays for new memory and kernels.
        taken.append(device.time_calls(step, calls=1))
    if wanted > (fitting := max(rows, int(rows * limits.step_seconds / min(taken)))):
        row = _with_note(row, f"{wanted:,} rows a step would take too long")
        wanted = fitting
    while rows < wanted:
        try:
            step, taken = take_first_step(wanted)
            rows = wanted
        except (RuntimeError, MemoryError) as error:
            if not device.memory.is_out_of_memory(error):
                raise
        if rows < wanted:
            # Outside of the handler, which keeps the failed step's tensors.
            device.memory.release()
            row = _with_note(row, f"out of memory with {wanted:,} rows a step")
            wanted //= 2
    while len(taken) < 2 or (
        taken[-2] > _COLD * taken[-1]
        and (len(taken) == 2 or sum(taken[1:]) < limits.repeat_seconds)
    ):
        taken.append(device.time_calls(step, calls=1))
    calls = max(1, math.ceil(limits.timing_seconds / taken[-1]))
    timings = taken[-2:] if calls == 1 else []
    while not timings or calls * sum(timings) < limits.repeat_seconds:
        timings.append(device.time_calls(step, calls=calls) / calls)
    return replace(row, timed_rows=rows, seconds=(*row.seconds, *timings))


def _with_note(row: Row, note: str) -> Row:
    return replace(row, note="; ".join(filter(None, [row.note, note])))


def _explain(error: Exception, device: Device) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, NotImplementedError):
        return f"{device.name} lacks an operation: {first_line}"
    if device.memory.is_out_of_memory(error):
        return f"out of memory: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"


if __name__ == "__main__":
    main()
