"""What becomes of a bench whose process dies."""

from collections.abc import Iterator

import psutil
import pytest
from bench.simulated_devices import a_workload

from finetune.batch_finder.child import Child, starting
from finetune.bench.measure import measure
from finetune.bench.results import Row
from finetune.bench.workloads import Selection
from finetune.errors import FinetuneError

WORKER = "odd_bench_worker"


def measure_two(
    children: list[Child], devices: list[str], *, model: str | None = None
) -> Iterator[list[Row]]:
    selection = Selection(groups=[], model=model, lengths=[3], is_quick=True)
    workloads = [a_workload(), a_workload()]
    return measure(children, selection, workloads, devices, until=0.0, module=WORKER)


def time_both(devices: list[str], *, model: str | None = None) -> list[list[Row]]:
    with starting(WORKER) as children:
        return list(measure_two(children, devices, model=model))


def test_a_device_that_ends_the_process_has_rows_that_say_so_and_the_rest_goes_on() -> None:
    for rows in time_both(["cpu", "fragile", "other"]):
        lost, *others = rows
        assert (lost.device, lost.seconds) == ("fragile", ())
        assert lost.note == "the process was killed by SIGABRT"
        assert [(row.device, row.seconds) for row in others] == [("cpu", (1.0,)), ("other", (1.0,))]


def test_a_process_that_can_not_begin_is_an_error_with_its_last_line() -> None:
    with pytest.raises(FinetuneError, match="no such luck"):
        time_both(["cpu"], model="unable")


def test_no_process_is_left_where_a_bench_is_stopped() -> None:
    with starting(WORKER) as children:
        next(measure_two(children, ["cpu"]))
    assert not [one for one in psutil.Process().children() if WORKER in str(one.cmdline())]
