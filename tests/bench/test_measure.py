"""In which order workloads are timed, and what becomes of a bench whose process dies."""

import time
from collections.abc import Iterator

import psutil
import pytest
from bench.simulated_devices import a_workload

from finetune.batch_finder.child import Child
from finetune.bench.results import Row
from finetune.bench.timing import MAX_REPEATS, measure
from finetune.bench.workloads import Selection
from finetune.events import ignore

WORKER = "odd_bench_worker"


def measure_two(devices: list[str], *, seconds: float = 0.0) -> Iterator[list[Row]]:
    selection = Selection(groups=[], model=None, lengths=[3], is_quick=True)
    workloads = [a_workload(name="a"), a_workload(name="b")]
    until = time.time() + seconds
    return measure(Child(WORKER), selection, workloads, devices, until=until, emit=ignore)


@pytest.mark.slow
def test_a_device_that_ends_the_process_has_rows_that_say_so_and_the_rest_goes_on() -> None:
    note = "the process was killed by SIGABRT: it wrote no error"
    assert [
        (row.workload, row.device, [*row.seconds], row.note)
        for row in [*measure_two(["fragile", "cpu"])][-1]
    ] == [
        *(("a", "fragile", [], note), ("a", "cpu", [1.0], "")),
        *(("b", "fragile", [], note), ("b", "cpu", [1.0], "")),
    ]


@pytest.mark.slow
def test_all_are_timed_once_and_then_in_turn_while_time_is_left() -> None:
    counts = [[len(row.seconds) for row in rows] for rows in measure_two(["cpu"], seconds=60.0)]
    assert counts[:4] == [[1], [1, 1], [2, 1], [2, 2]]
    assert counts[-1] == [MAX_REPEATS, MAX_REPEATS]


@pytest.mark.slow
def test_no_process_is_left_where_a_bench_is_stopped() -> None:
    timings = measure_two(["cpu"])
    next(timings)
    del timings
    assert not [one for one in psutil.Process().children() if WORKER in str(one.cmdline())]
