"""Timings on simulated devices."""

from bench.simulated_devices import LIMITS, SimulatedDevice, a_workload

from finetune.bench.results import Row
from finetune.bench.workloads import MAX_REPEATS, Workload, measure, time_workload


def timed(workload: Workload, device: SimulatedDevice, *, before: Row | None = None) -> Row:
    rows = [before or workload.row("training", device.name)]
    [row] = time_workload(workload, device, LIMITS, rows=rows)
    return row


def test_steps_that_pay_for_new_kernels_are_not_timed() -> None:
    device = SimulatedDevice(row_seconds=0.5, cold_steps=1)
    row = timed(a_workload(rows=8, min_rows=8), device)
    assert (row.seconds, row.rows_per_second) == ([4.0], 2.0)


def test_a_step_that_takes_too_long_is_taken_with_fewer_rows_and_the_row_says_so() -> None:
    row = timed(a_workload(rows=128), SimulatedDevice())
    assert (row.rows, row.timed_rows) == (128, 10)
    assert row.note == "128 rows per step would take too long"


def test_what_does_not_fit_is_tried_with_half_the_rows_and_the_row_says_so() -> None:
    row = timed(a_workload(rows=64), SimulatedDevice(row_seconds=0.01, holds=40))
    assert (row.timed_rows, row.note) == (32, "out of memory with 64 rows per step")
    assert row.seconds == [0.32]


def test_a_device_that_fails_leaves_a_row_that_says_so_and_its_earlier_timings() -> None:
    device = SimulatedDevice()
    first = timed(a_workload(), device)
    device.fault = NotImplementedError("aten::odd is not there\nmore")
    row = timed(a_workload(), device, before=first)
    assert (row.seconds, row.note) == (first.seconds, "NotImplementedError: aten::odd is not there")
    device.fault = MemoryError()
    row = timed(a_workload(), device)
    assert (row.timed_rows, row.rows_per_second, row.note) == (0, None, "MemoryError")


def test_all_are_timed_once_and_then_in_turn_while_time_is_left() -> None:
    workloads = [a_workload(name=name, min_rows=8) for name in ("a", "b")]
    fault = SimulatedDevice("odd", row_seconds=0.5, fault=MemoryError())
    devices = [SimulatedDevice(row_seconds=0.5), fault]
    counts = [[len(row.seconds) for row in rows] for rows in measure(workloads, devices, LIMITS)]
    assert counts[:5] == [[1], [1, 0], [1, 0, 1], [1, 0, 1, 0], [2, 0, 1, 0]]
    assert counts[-1] == [MAX_REPEATS, 0, MAX_REPEATS, 0]
