"""The child process that times workloads: only it ends by a device that dies.

Its first request is a selection; it replies ``{}`` when it is ready. Each further request names a
workload by its number, a device, and the rows so far; the reply is the rows with more timings.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from finetune.batch_finder.child import connect_to_parent
from finetune.bench.results import Row
from finetune.bench.workloads import SEED, Load, Selection, Workload, list_workloads
from finetune.devices.base import Device
from finetune.devices.select import select_device

# A step that takes this many times as long as the next one also paid for new memory and kernels.
_COLD = 1.25


@dataclass(frozen=True)
class Limits:
    """How long is timed: one step, one timing of as many steps as it takes, one repeat.

    A step that takes longer has fewer rows.
    """

    step_seconds: float
    timing_seconds: float
    repeat_seconds: float


FULL = Limits(step_seconds=7.0, timing_seconds=0.5, repeat_seconds=1.5)
QUICK = Limits(step_seconds=0.3, timing_seconds=0.05, repeat_seconds=0.3)


def main() -> None:
    """Time what the parent asks for."""
    requests, reply = connect_to_parent()
    first = requests.get()
    selection = Selection(**first["selection"])
    workloads = list_workloads(selection)
    devices = {name: select_device(name, emit=lambda _: None) for name in first["devices"]}
    for device in devices.values():
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    limits = QUICK if selection.is_quick else FULL
    reply({})
    while request := requests.get():
        rows = time_workload(
            workloads[request["workload"]],
            devices[request["device"]],
            limits,
            rows=[Row.from_json(row) for row in request["rows"]],
        )
        reply([asdict(row) for row in rows])


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
            timed.append(row.with_note(_explain(error, device)))
    load = None
    gc.collect()
    device.memory.release()
    return timed


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
        row = row.with_note(f"{wanted:,} rows a step would take too long")
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
            row = row.with_note(f"out of memory with {wanted:,} rows a step")
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


def _explain(error: Exception, device: Device) -> str:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, NotImplementedError):
        return f"{device.name} lacks an operation: {first_line}"
    if device.memory.is_out_of_memory(error):
        return f"out of memory: {first_line}"
    return f"failed: {type(error).__name__}: {first_line}"


if __name__ == "__main__":
    main()
