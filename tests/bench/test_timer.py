"""Timings on simulated devices."""

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from bench.simulated_devices import EFFORT, SimulatedDevice, a_workload

from finetune.bench.results import Row
from finetune.bench.timer import VISITS, time_in_rounds, time_workload
from finetune.bench.workload import Workload


def timed(
    workload: Workload,
    devices: Sequence[SimulatedDevice],
    *,
    before: Sequence[Row] = (),
    visit_seconds: float = EFFORT.visit_seconds,
) -> list[Row]:
    effort = replace(EFFORT, visit_seconds=visit_seconds)
    return time_workload(
        workload, devices, effort=effort, announce=lambda name: None, before=before
    )


def test_devices_are_timed_in_turn_for_as_long_as_each_other() -> None:
    one, other = SimulatedDevice("one"), SimulatedDevice("other", row_seconds=0.5)
    one.timed = other.timed
    rows = timed(a_workload(), [one, other], visit_seconds=24.0)
    assert one.timed[-5:] == [("one", 8), *[("other", 8)] * 4]
    assert [(row.seconds, row.rows_per_second) for row in rows] == [
        ((8.0,) * 3, 1.0),
        ((4.0,) * 6, 2.0),
    ]


@pytest.mark.parametrize("cold_steps", [1, 4])
def test_steps_that_pay_for_new_kernels_are_not_timed(cold_steps: int) -> None:
    device = SimulatedDevice(row_seconds=0.002, cold_steps=cold_steps)
    [row] = timed(a_workload(rows=8, least_rows=8), [device])
    assert row.seconds == pytest.approx([0.016] * 9)


def test_a_later_visit_adds_timings_of_as_many_rows() -> None:
    device = SimulatedDevice(row_seconds=6.0)
    first = timed(a_workload(), [device])
    device.row_seconds = 7.0
    [row] = timed(a_workload(), [device], before=first)
    assert (row.timed_rows, row.seconds) == (1, (6.0, 6.0, 7.0, 7.0))
    assert row.note == "8 rows a step would take too long"


def test_a_visit_that_fails_takes_nothing_from_those_before_and_is_not_tried_again() -> None:
    device = SimulatedDevice()
    first = timed(a_workload(), [device])
    device.fault = RuntimeError("lost")
    [row] = timed(a_workload(), [device], before=first)
    assert (row.seconds, row.note) == (first[0].seconds, "failed: RuntimeError: lost")
    failed = timed(a_workload(), [device])
    device.fault = None
    assert timed(a_workload(), [device], before=failed) == failed


@pytest.mark.parametrize(("left_seconds", "visits"), [(60.0, VISITS), (0.0, 1)])
def test_all_are_timed_once_and_then_in_turn_while_time_is_left(
    left_seconds: float, visits: int
) -> None:
    pairs = [(replace(a_workload(), name=name), [SimulatedDevice()]) for name in "ab"]
    broken = replace(a_workload(), name="broken"), [SimulatedDevice(fault=ValueError())]
    names = [
        rows[0].workload
        for rows in time_in_rounds(
            [*pairs, broken],
            effort=EFFORT,
            announce=lambda name: None,
            until=time.time() + left_seconds,
        )
    ]
    assert names[:3] == ["a", "b", "broken"]
    rounds = [set(names[start : start + 2]) for start in range(3, len(names), 2)]
    assert rounds == [{"a", "b"}] * (visits - 1)


def test_a_step_that_takes_too_long_is_taken_with_fewer_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=128), [SimulatedDevice()])
    assert (row.rows, row.timed_rows) == (128, 8)
    assert row.note == "128 rows a step would take too long"


def test_what_does_not_fit_is_tried_with_half_the_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=64), [SimulatedDevice(row_seconds=0.01, holds=40)])
    assert (row.timed_rows, row.note) == (32, "out of memory with 64 rows a step")
    assert row.seconds == (0.32,) * 4


@pytest.mark.parametrize("holds", [17, 31])
def test_rows_that_fitted_before_are_loaded_again(holds: int) -> None:
    device = SimulatedDevice(row_seconds=0.01, holds=holds)
    [row] = timed(a_workload(rows=20), [device])
    assert row.timed_rows == device.rows == (16 if holds == 17 else 20)


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


def test_a_device_that_fails_while_it_is_timed_has_no_timing() -> None:
    device = SimulatedDevice(holds=8)
    workload = a_workload()
    announced: list[str] = []

    def announce(name: str) -> None:
        announced.append(name)
        if len(announced) == 6:
            device.fault = RuntimeError("lost")

    effort = replace(EFFORT, visit_seconds=20.0)
    [row] = time_workload(workload, [device], effort=effort, announce=announce)
    assert (row.seconds, row.note) == ((), "failed: RuntimeError: lost")


def test_a_batch_size_that_is_the_subject_is_not_halved() -> None:
    [row] = timed(a_workload(rows=16, least_rows=16), [SimulatedDevice(holds=8)])
    assert (row.timed_rows, row.note.startswith("out of memory")) == (0, True)


@pytest.mark.parametrize("cold_steps", [0, 1])
def test_two_steps_that_agree_are_enough_where_they_take_long(cold_steps: int) -> None:
    device = SimulatedDevice(row_seconds=6.0, cold_steps=cold_steps)
    [row] = timed(a_workload(), [device])
    assert (row.timed_rows, row.seconds) == (1, (6.0, 6.0))
    assert len(device.timed) == 2 + cold_steps
