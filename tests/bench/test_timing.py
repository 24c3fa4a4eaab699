"""Timings on simulated devices."""

import pytest
from bench.simulated_devices import LIMITS, SimulatedDevice, a_workload

from finetune.bench.results import Row
from finetune.bench.timing import time_workload
from finetune.bench.workloads import Workload


def timed(workload: Workload, device: SimulatedDevice, *, before: Row | None = None) -> Row:
    rows = [before or workload.row("training", device.name)]
    [row] = time_workload(workload, device, LIMITS, rows=rows)
    return row


def test_a_row_has_the_seconds_of_each_timing() -> None:
    row = timed(a_workload(), SimulatedDevice(row_seconds=0.5))
    assert (row.seconds, row.rows_per_second) == ((4.0, 4.0), 2.0)


@pytest.mark.parametrize("cold_steps", [1, 4])
def test_steps_that_pay_for_new_kernels_are_not_timed(cold_steps: int) -> None:
    device = SimulatedDevice(row_seconds=0.002, cold_steps=cold_steps)
    row = timed(a_workload(rows=8, min_rows=8), device)
    assert row.seconds == pytest.approx([0.016] * 9)


def test_a_repeat_adds_timings_of_as_many_rows() -> None:
    device = SimulatedDevice(row_seconds=6.0)
    first = timed(a_workload(), device)
    device.row_seconds = 7.0
    row = timed(a_workload(), device, before=first)
    assert (row.timed_rows, row.seconds) == (1, (6.0, 6.0, 7.0, 7.0))
    assert row.note == "8 rows a step would take too long"


def test_a_repeat_that_fails_takes_nothing_from_those_before() -> None:
    device = SimulatedDevice()
    first = timed(a_workload(), device)
    device.fault = RuntimeError("lost")
    row = timed(a_workload(), device, before=first)
    assert (row.seconds, row.note) == (first.seconds, "failed: RuntimeError: lost")


def test_a_step_that_takes_too_long_is_taken_with_fewer_rows_and_the_row_says_so() -> None:
    row = timed(a_workload(rows=128), SimulatedDevice())
    assert (row.rows, row.timed_rows) == (128, 10)
    assert row.note == "128 rows a step would take too long"


def test_what_does_not_fit_is_tried_with_half_the_rows_and_the_row_says_so() -> None:
    row = timed(a_workload(rows=64), SimulatedDevice(row_seconds=0.01, holds=40))
    assert (row.timed_rows, row.note) == (32, "out of memory with 64 rows a step")
    assert row.seconds == (0.32,) * 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (NotImplementedError("aten::odd is not there\nmore"), "lacks an operation: aten::odd is"),
        (RuntimeError("the device was lost"), "failed: RuntimeError: the device was lost"),
        (MemoryError(), "out of memory"),
        (ValueError(), "failed: ValueError: ValueError"),
    ],
)
def test_a_device_that_fails_leaves_a_row_that_says_so(fault: Exception, words: str) -> None:
    row = timed(a_workload(), SimulatedDevice("odd", fault=fault))
    assert (row.seconds, row.timed_rows, row.rows_per_second) == ((), 0, None)
    assert words in row.note
