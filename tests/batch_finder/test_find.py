"""The cases that a search covers, and its cache."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from batch_finder.simulated_machines import (
    GIB,
    SimulatedMachine,
    SimulatedRunner,
    rising_from,
    runner,
)
from tiny_models import tiny_case

from finetune.batch_finder.results import Result
from finetune.batch_finder.search import find, find_parts
from finetune.batch_finder.trials import TrialServer
from finetune.config.modes import Mode
from finetune.config.schema import SearchConfig
from finetune.devices.base import BatchShapes
from finetune.devices.cpu import CpuDevice
from finetune.errors import BatchDoesNotFitError
from finetune.events import Event, Info, Trial, sent_to

__all__ = ["runner"]
CASE = tiny_case()
SEARCH = {
    "device": CpuDevice(),
    "options": SearchConfig(time_limit=60.0),
    "server": TrialServer(),
    "limit": 1000,
}


def device_with(**changes: Any) -> CpuDevice:
    device = CpuDevice()
    for name, value in changes.items():
        setattr(device, name, value)
    return device


def find_in(cache: Path | None, **changes: Any) -> tuple[Result, list[int]]:
    """Search, and return the result and the sizes tried."""
    emitted: list[Event] = []
    with sent_to(emitted.append):
        result = find(**{"case": CASE, "cache": cache, **SEARCH, **changes})
    return result, [event.batch_size for event in emitted if isinstance(event, Trial)]


@pytest.fixture
def cache(runner: SimulatedRunner, tmp_path: Path) -> Path:
    """A folder with the result of a search that 8 GiB of memory limited."""
    result, sizes = find_in(tmp_path / "batches")
    assert len(sizes) == len(result.trials) > 1
    assert (result.largest, result.first_failed) == (124, 126)
    return tmp_path / "batches"


def cached_in(cache: Path) -> dict[str, Any]:
    [file] = cache.iterdir()
    cached: dict[str, Any] = json.loads(file.read_text())
    return cached


@pytest.mark.parametrize(
    "changed",
    [
        {"case": replace(CASE, mode=Mode("head"))},
        {"case": replace(CASE, precision="bf16")},
        {"case": replace(CASE, part="trainable")},
        {"limit": 999},
        {"options": SearchConfig(time_limit=60.0, memory="9GiB")},
        {"device": device_with(description="another CPU")},
    ],
    ids=["mode", "precision", "part", "limit", "memory limit", "device"],
)
def test_changed_case_device_or_limit_starts_a_new_search(
    changed: dict[str, Any], cache: Path
) -> None:
    _, sizes = find_in(cache, **changed)
    assert len(sizes) > 1
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("budget_gib", "capacity", "first_size"),
    [(8, 1, None), (8.4, 1, None), (7, 1, None), (8.5, 1, 124), (24, 1, 124), (8, 0.5, 94)],
)
def test_cached_result_is_confirmed_by_one_trial_if_memory_is_the_same(
    budget_gib: float, capacity: float, first_size: int | None, cache: Path, runner: SimulatedRunner
) -> None:
    before = cached_in(cache)
    budget_bytes = int(budget_gib * GIB)
    runner.machine = SimulatedMachine(budget_bytes=budget_bytes, capacity_share=capacity)
    result, sizes = find_in(cache)
    assert result.budget_bytes == budget_bytes
    if first_size is None:
        assert sizes == [before["recommended"]] == [result.recommended]
    else:
        assert sizes[0] == first_size
        assert result.largest >= 0.95 * runner.machine.largest_fitting()
        assert cached_in(cache)["largest"] == result.largest
        assert find_in(cache)[1] == [result.recommended]


@pytest.mark.parametrize(
    ("free_gib", "memory", "remedy", "others"),
    [
        (6, None, "close it", "18.0 GiB"),
        (20, None, "lower", "single example"),
        (6, "2GiB", "lower", "single example"),
    ],
)
def test_out_of_memory_error_reports_memory_of_other_processes(
    free_gib: int, memory: str | None, remedy: str, others: str, runner: SimulatedRunner
) -> None:
    runner.machine = SimulatedMachine(capacity_share=0.0)
    device = CpuDevice()
    device.memory.total_bytes = lambda: 24 * GIB
    device.memory.budget_bytes = lambda _: free_gib * GIB
    with pytest.raises(BatchDoesNotFitError, match=others) as caught:
        find_in(None, device=device, options=SearchConfig(memory=memory))
    assert caught.value.remedy.startswith(remedy)
    assert ("another process" in caught.value.message) == (remedy == "close it")


@pytest.mark.parametrize("first", [None, 80])
def test_sizes_that_the_device_computes_incorrectly_are_skipped(
    first: int | None, runner: SimulatedRunner
) -> None:
    device = device_with(shapes=BatchShapes(max_tokens=16 * 50 + 15))
    result, sizes = find_in(None, device=device, first=first)
    assert (result.largest, result.first_failed, max(sizes)) == (50, None, 50)


def test_feature_extraction_has_its_own_batch_size(runner: SimulatedRunner) -> None:
    small = rising_from(floor=100, base=90, row=30)
    runner.machines["trainable"] = SimulatedMachine(peak_bytes=small)
    emitted: list[Event] = []
    with sent_to(emitted.append):
        result = find_parts(
            tiny_case(mode=Mode("head")),
            partial(find, **SEARCH),
            stores_features=True,
            action="searching on cpu",
        )
    assert [event.message for event in emitted if isinstance(event, Info)] == [
        "searching on cpu: head, feature extraction, 16 tokens",
        "searching on cpu: head, trainable layers, 16 tokens",
    ]
    assert result.stores_features
    assert (result.features_batch_size or 0) <= 125 < result.largest
    assert {trial.part for trial in result.trials} == {"features", "trainable"}
    fitting = [trial.peak_bytes or 0 for trial in result.trials if trial.status == "fits"]
    assert result.peak_bytes == max(fitting)


def test_model_that_cannot_be_split_is_searched_as_a_whole(runner: SimulatedRunner) -> None:
    runner.can_split = False
    result = find_parts(
        tiny_case(mode=Mode("head")), partial(find, **SEARCH), stores_features=True, action="-"
    )
    assert (result.stores_features, result.features_batch_size) == (False, None)
    assert {trial.part for trial in result.trials} == {"whole"}
