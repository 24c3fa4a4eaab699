"""Timings on simulated devices, which have a speed, a memory limit and faults, but do no work."""

from collections.abc import Callable

import pytest

from finetune.bench.results import Row
from finetune.bench.workloads import (
    MAX_REPEATS,
    Limits,
    MakeSteps,
    Steps,
    Workload,
    measure,
    time_workload,
)
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice

LIMITS = Limits(step_seconds=10.0, repeat_seconds=0.3, total_seconds=60.0)


class SimulatedDevice(CpuDevice):
    """A device with seconds per row and a maximum number of rows.

    Each of the first ``cold_steps`` steps takes twice as long as the step after it.
    """

    def __init__(
        self, name: str = "cpu", *, row_seconds: float = 1.0, holds: int = 1000,
        fault: Exception | None = None, cold_steps: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.row_seconds, self.holds, self.fault = name, row_seconds, holds, fault
        self.rows = 0
        self.memory.set_memory_limit = lambda _: None  # a limit would stay set for later tests
        self.cold_steps = cold_steps

    def time_calls(self, work: Callable[[], object], *, calls: int) -> float:
        slowdown = 2**self.cold_steps
        work()
        return calls * self.rows * self.row_seconds * slowdown


def _build(device: Device) -> MakeSteps:
    assert isinstance(device, SimulatedDevice)

    def take_step() -> None:
        device.cold_steps = max(0, device.cold_steps - 1)
        if device.fault:
            raise device.fault
        if device.rows > device.holds:
            raise MemoryError

    def make_steps(rows: int) -> Steps:
        device.rows = rows
        return {"training": take_step}

    return make_steps


def a_workload(*, name: str = "small", rows: int = 8, min_rows: int = 1) -> Workload:
    return Workload("mlp", name, _build, rows, min_rows=min_rows, phases=("training",))


def timed(workload: Workload, device: SimulatedDevice, *, before: Row | None = None) -> Row:
    rows = [before or workload.row("training", device.name)]
    [row] = time_workload(workload, device, LIMITS, rows=rows)
    return row


def test_warmup_steps_are_not_timed() -> None:
    device = SimulatedDevice(row_seconds=0.5, cold_steps=1)
    row = timed(a_workload(rows=8, min_rows=8), device)
    assert (row.seconds, row.rows_per_second) == ([4.0], 2.0)


@pytest.mark.parametrize(
    ("device", "timed_rows", "note"),
    [
        (SimulatedDevice(), 10, "100 rows per step would take too long"),
        (SimulatedDevice(row_seconds=0.01, holds=60), 50, "out of memory with 100 rows per step"),
    ],
)
def test_slow_or_oversized_steps_get_fewer_rows_and_a_note(
    device: SimulatedDevice, timed_rows: int, note: str
) -> None:
    row = timed(a_workload(rows=100), device)
    assert (row.rows, row.timed_rows, row.note) == (100, timed_rows, note)
    assert row.seconds == [timed_rows * device.row_seconds]


def test_failing_device_keeps_earlier_timings_and_adds_a_note() -> None:
    device = SimulatedDevice()
    first = timed(a_workload(), device)
    device.fault = NotImplementedError("aten::odd is not there\nmore")
    row = timed(a_workload(), device, before=first)
    assert (row.seconds, row.note) == (first.seconds, "NotImplementedError: aten::odd is not there")
    device.fault = MemoryError()
    row = timed(a_workload(), device)
    assert (row.timed_rows, row.rows_per_second, row.note) == (0, None, "MemoryError")


def test_all_workloads_are_timed_once_and_then_in_turn_until_time_is_up() -> None:
    workloads = [a_workload(name=name, min_rows=8) for name in ("a", "b")]
    fault = SimulatedDevice("odd", row_seconds=0.5, fault=MemoryError())
    devices = [SimulatedDevice(row_seconds=0.5), fault]
    counts = [[len(row.seconds) for row in rows] for rows in measure(workloads, devices, LIMITS)]
    assert counts[:5] == [[1], [1, 0], [1, 0, 1], [1, 0, 1, 0], [2, 0, 1, 0]]
    assert counts[-1] == [MAX_REPEATS, 0, MAX_REPEATS, 0]
