"""Timings on simulated devices."""

import time
from collections.abc import Sequence

import pytest
from bench.simulated_devices import LIMITS, SimulatedDevice, a_workload

from finetune.bench.results import Row
from finetune.bench.timing import MAX_REPEATS, time_workload, time_workloads
from finetune.bench.workloads import Workload


def timed(
    workload: Workload, devices: Sequence[SimulatedDevice], *, before: Sequence[Row] = ()
) -> list[Row]:
    return time_workload(workload, devices, LIMITS, begin=lambda name: None, before=before)


def test_each_device_has_a_row_with_its_timings() -> None:
    rows = timed(a_workload(), [SimulatedDevice("one"), SimulatedDevice("other", row_seconds=0.5)])
    assert [(row.device, row.seconds, row.rows_per_second) for row in rows] == [
        ("one", (8.0, 8.0), 1.0),
        ("other", (4.0, 4.0), 2.0),
    ]


@pytest.mark.parametrize("cold_steps", [1, 4])
def test_steps_that_pay_for_new_kernels_are_not_timed(cold_steps: int) -> None:
    device = SimulatedDevice(row_seconds=0.002, cold_steps=cold_steps)
    [row] = timed(a_workload(rows=8, min_rows=8), [device])
    assert row.seconds == pytest.approx([0.016] * 9)


def test_a_repeat_adds_timings_of_as_many_rows() -> None:
    device = SimulatedDevice(row_seconds=6.0)
    first = timed(a_workload(), [device])
    device.row_seconds = 7.0
    [row] = timed(a_workload(), [device], before=first)
    assert (row.timed_rows, row.seconds) == (1, (6.0, 6.0, 7.0, 7.0))
    assert row.note == "8 rows a step would take too long"


def test_a_repeat_that_fails_takes_nothing_from_those_before_and_is_not_tried_again() -> None:
    device = SimulatedDevice()
    first = timed(a_workload(), [device])
    device.fault = RuntimeError("lost")
    [row] = timed(a_workload(), [device], before=first)
    assert (row.seconds, row.note) == (first[0].seconds, "failed: RuntimeError: lost")
    failed = timed(a_workload(), [device])
    device.fault = None
    assert timed(a_workload(), [device], before=failed) == failed


@pytest.mark.parametrize(("left_seconds", "repeats"), [(60.0, MAX_REPEATS), (0.0, 1)])
def test_all_are_timed_once_and_then_in_turn_while_time_is_left(
    left_seconds: float, repeats: int
) -> None:
    pairs = [(a_workload(name=name), [SimulatedDevice()]) for name in "ab"]
    broken = a_workload(name="broken"), [SimulatedDevice(fault=ValueError())]
    until = time.time() + left_seconds
    names = [
        rows[0].workload
        for rows in time_workloads([*pairs, broken], LIMITS, begin=lambda name: None, until=until)
    ]
    assert names[:3] == ["a", "b", "broken"]
    turns = [set(names[start : start + 2]) for start in range(3, len(names), 2)]
    assert turns == [{"a", "b"}] * (repeats - 1)


def test_a_step_that_takes_too_long_is_taken_with_fewer_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=128), [SimulatedDevice()])
    assert (row.rows, row.timed_rows) == (128, 10)
    assert row.note == "128 rows a step would take too long"


def test_what_does_not_fit_is_tried_with_half_the_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=64), [SimulatedDevice(row_seconds=0.01, holds=40)])
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
def test_a_device_that_fails_leaves_a_row_that_says_so_and_the_others_go_on(
    fault: Exception, words: str
) -> None:
    broken, sound = timed(a_workload(), [SimulatedDevice("odd", fault=fault), SimulatedDevice()])
    assert (broken.seconds, broken.timed_rows, broken.rows_per_second) == ((), 0, None)
    assert words in broken.note
    assert (len(sound.seconds), sound.note) == (2, "")
