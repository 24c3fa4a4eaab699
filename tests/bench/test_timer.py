"""Timings on simulated devices."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from bench.simulated_devices import EFFORT, SimulatedDevice, a_workload

from finetune.bench.results import Row
from finetune.bench.timer import time_workload
from finetune.bench.workload import Workload


def timed(workload: Workload, devices: Sequence[SimulatedDevice]) -> list[Row]:
    return time_workload(workload, devices, effort=EFFORT, announce=lambda name: None)


def test_devices_are_timed_in_turn_within_each_repeat() -> None:
    one, other = SimulatedDevice("one"), SimulatedDevice("other", row_seconds=0.5)
    one.timed = other.timed
    rows = timed(a_workload(), [one, other])
    assert one.timed[-6:] == [("one", 8), ("other", 8)] * 3
    assert [(row.seconds, row.rows_per_second) for row in rows] == [
        ((8.0, 8.0, 8.0), 1.0),
        ((4.0, 4.0, 4.0), 2.0),
    ]


def test_a_step_that_takes_too_long_is_taken_with_fewer_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=128), [SimulatedDevice()])
    assert (row.rows, row.timed_rows) == (128, 8)
    assert row.note == "128 rows a step would take too long"


def test_what_does_not_fit_is_tried_with_half_the_rows_and_the_row_says_so() -> None:
    [row] = timed(a_workload(rows=64), [SimulatedDevice(row_seconds=0.01, holds=40)])
    assert (row.timed_rows, row.note) == (32, "out of memory with 64 rows a step")
    assert row.seconds == (0.32, 0.32, 0.32)


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
    assert (len(sound.seconds), sound.note) == (3, "")


def test_a_device_that_fails_while_it_is_timed_has_no_timing() -> None:
    device = SimulatedDevice(holds=8)
    workload = a_workload()
    announced: list[str] = []

    def announce(name: str) -> None:
        announced.append(name)
        if len(announced) == 6:
            device.fault = RuntimeError("lost")

    [row] = time_workload(workload, [device], effort=EFFORT, announce=announce)
    assert (row.seconds, row.note) == ((), "failed: RuntimeError: lost")


def test_a_batch_size_that_is_the_subject_is_not_halved() -> None:
    [row] = timed(a_workload(rows=16, least_rows=16), [SimulatedDevice(holds=8)])
    assert (row.timed_rows, row.note.startswith("out of memory")) == (0, True)


def test_a_warm_step_of_the_fewest_rows_counts_where_no_larger_one_is_taken() -> None:
    device = SimulatedDevice(row_seconds=6.0)
    effort = replace(EFFORT, fewest_repeats=1, most_seconds=5.0)
    [row] = time_workload(a_workload(), [device], effort=effort, announce=lambda name: None)
    assert (row.timed_rows, row.seconds) == (1, (6.0,))
    assert len(device.timed) == 2
