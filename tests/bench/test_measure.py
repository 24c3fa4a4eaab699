"""In which order workloads are timed, and what becomes of a bench whose process dies."""

import time
from collections.abc import Iterator

import psutil
import pytest
from bench.simulated_devices import a_workload

from finetune.batch_finder.child import Child, starting
from finetune.bench.measure import MAX_REPEATS, measure
from finetune.bench.results import Row
from finetune.bench.workloads import Selection
from finetune.errors import FinetuneError
from finetune.events import ignore

WORKER = "odd_bench_worker"


def measure_two(
    children: list[Child], devices: list[str], *, model: str | None = None, seconds: float = 0.0
) -> Iterator[list[Row]]:
    selection = Selection(groups=[], model=model, lengths=[3], is_quick=True)
    workloads = [a_workload(name="a"), a_workload(name="b")]
    until = time.time() + seconds
    return measure(children, selection, workloads, devices, until=until, emit=ignore, module=WORKER)


def time_both(devices: list[str], *, model: str | None = None, seconds: float = 0.0) -> list[Row]:
    with starting(WORKER) as children:
        return [row for [row] in measure_two(children, devices, model=model, seconds=seconds)]


def test_a_device_that_ends_the_process_has_rows_that_say_so_and_the_rest_goes_on() -> None:
    note = "the process was killed by SIGABRT"
    assert [
        (row.workload, row.device, row.seconds, row.note) for row in time_both(["fragile", "cpu"])
    ] == [
        *(("a", "fragile", (), note), ("a", "cpu", (1.0,), "")),
        *(("b", "fragile", (), note), ("b", "cpu", (1.0,), "")),
    ]


def test_all_are_timed_once_and_then_in_turn_while_time_is_left() -> None:
    rows = time_both(["cpu"], seconds=60.0)
    assert [(row.workload, len(row.seconds)) for row in rows] == [
        (name, repeat) for repeat in range(1, MAX_REPEATS + 1) for name in "ab"
    ]


def test_a_process_that_can_not_begin_is_an_error_with_its_last_line() -> None:
    with pytest.raises(FinetuneError, match="no such luck"):
        time_both(["cpu"], model="unable")


def test_no_process_is_left_where_a_bench_is_stopped() -> None:
    with starting(WORKER) as children:
        next(measure_two(children, ["cpu"]))
    assert not [one for one in psutil.Process().children() if WORKER in str(one.cmdline())]
