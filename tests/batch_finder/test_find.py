"""What is searched, and what an earlier search found, which one trial confirms."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
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

from finetune.batch_finder import find as find_module
from finetune.batch_finder.case import Case
from finetune.batch_finder.find import Search, find, find_parts
from finetune.batch_finder.results import BatchResult
from finetune.batch_finder.search import SearchResult
from finetune.config.mode import Mode
from finetune.config.schema import SearchConfig
from finetune.devices.base import BatchShapes
from finetune.devices.cpu import CpuDevice
from finetune.errors import BatchDoesNotFit
from finetune.events import Event, Info, Trial, WarningMessage, ignore
from finetune.files import WRITTEN_BY

__all__ = ["runner"]
CASE = tiny_case()
SEARCH = Search(
    CpuDevice(), SearchConfig(time_limit=60.0), limit=1000, first=None, cache=None, emit=ignore
)


def other_cpu() -> CpuDevice:
    device = CpuDevice()
    device.description = "another CPU"
    return device


def find_in(
    cache: Path | None, *, case: Case = CASE, **changes: Any
) -> tuple[SearchResult, list[int]]:
    """Search; return what was found and the sizes that were tried."""
    emitted: list[Event] = []
    found = find(case, replace(SEARCH, cache=cache, emit=emitted.append, **changes))
    return found, [one.batch_size for one in emitted if isinstance(one, Trial)]


@pytest.fixture
def cache(runner: SimulatedRunner, tmp_path: Path) -> Path:
    """A folder that holds the result of one search with 8 GiB, which memory ended."""
    folder = tmp_path / "batches"
    found, sizes = find_in(folder)
    assert len(sizes) == len(found.trials) > 1
    assert (found.max_verified, found.first_failed) == (124, 126)
    return folder


def found_in(cache: Path) -> dict[str, Any]:
    [file] = cache.iterdir()
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_second_search_is_one_trial_with_the_same_result(cache: Path) -> None:
    first = found_in(cache)
    found, sizes = find_in(cache)
    assert sizes == [first["recommended"]]
    assert json.loads(json.dumps(dataclasses.asdict(found) | WRITTEN_BY)) == first
    assert found.budget_bytes == 8 * GIB
    assert found.peak_bytes == SimulatedMachine().peak_bytes(124)


@pytest.mark.parametrize(
    "changed",
    [
        {"case": replace(CASE, mode=Mode("head"))},
        {"case": replace(CASE, precision="bf16")},
        {"case": replace(CASE, part="trainable")},
        {"limit": 999},
        {"options": SearchConfig(time_limit=60.0, memory="9GiB")},
        {"device": other_cpu()},
    ],
    ids=["mode", "precision", "part", "limit", "memory limit", "device"],
)
def test_another_case_device_or_limit_is_searched_anew(
    changed: dict[str, Any], cache: Path
) -> None:
    _, sizes = find_in(cache, **changed)
    assert len(sizes) > 1
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(("before_gib", "now_gib"), [(4, 8), (8, 24)])
def test_with_more_memory_the_search_begins_where_the_earlier_one_ended(
    before_gib: int, now_gib: int, runner: SimulatedRunner, tmp_path: Path
) -> None:
    runner.machine = SimulatedMachine(budget_bytes=before_gib * GIB)
    before, _ = find_in(tmp_path)
    runner.machine = SimulatedMachine(budget_bytes=now_gib * GIB)
    now, sizes = find_in(tmp_path)
    assert sizes[0] == before.max_verified < now.max_verified
    assert now.max_verified >= 0.98 * runner.machine.largest_fitting()
    # That is what is cached now, with its budget.
    assert find_in(tmp_path) == (now, [now.recommended])


@pytest.mark.parametrize(("budget_gib", "is_searched"), [(8.4, False), (8.5, True), (7, False)])
def test_a_size_is_only_confirmed_unless_there_is_much_more_memory(
    budget_gib: float, is_searched: bool, cache: Path, runner: SimulatedRunner
) -> None:
    runner.machine = SimulatedMachine(budget_bytes=int(budget_gib * GIB))
    found, sizes = find_in(cache)
    assert (len(sizes) > 1) == is_searched
    assert found.budget_bytes == int(budget_gib * GIB)


def test_more_memory_changes_nothing_where_it_did_not_end_the_search(
    runner: SimulatedRunner, tmp_path: Path
) -> None:
    before, _ = find_in(tmp_path, limit=50)
    assert (before.max_verified, before.first_failed) == (50, None)
    runner.machine = SimulatedMachine(budget_bytes=80 * GIB)
    found, sizes = find_in(tmp_path, limit=50)
    assert sizes == [found.recommended]


@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda _: "[]"], ids=["cut off", "a list"]
)
def test_a_damaged_file_is_replaced_by_a_new_search(
    damage: Callable[[str], str], cache: Path
) -> None:
    [file] = cache.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert len(find_in(cache)[1]) > 1
    assert found_in(cache) == json.loads(whole)


def test_a_cached_size_that_no_longer_fits_is_searched_anew(
    cache: Path, runner: SimulatedRunner
) -> None:
    before = found_in(cache)
    runner.machine = SimulatedMachine(capacity_share=0.5)
    found, sizes = find_in(cache)
    assert len(sizes) == 1 + len(found.trials)
    assert sizes[0] == before["recommended"] > found.recommended
    assert found_in(cache)["recommended"] == found.recommended


def test_a_fresh_search_is_kept_and_one_among_other_processes_is_not(
    cache: Path, runner: SimulatedRunner
) -> None:
    runner.machine = SimulatedMachine(capacity_share=0.5)
    found, sizes = find_in(cache, is_fresh=True)
    assert len(sizes) == len(found.trials) > 1
    assert found_in(cache)["max_verified"] == found.max_verified
    runner.machine, runner.is_crowded = SimulatedMachine(capacity_share=0.4), True
    assert find_in(cache, is_fresh=True)[0].max_verified < found.max_verified
    assert found_in(cache)["max_verified"] == found.max_verified


def test_where_nothing_fits_for_others_that_is_said(
    runner: SimulatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.machine = SimulatedMachine(capacity_share=0.0)
    device = CpuDevice()
    monkeypatch.setattr(device.memory, "total_bytes", lambda: 24 * GIB)
    for free_gib, remedy in ((6, "close it and run again"), (20, "lower --max-length")):
        monkeypatch.setattr(find_module, "free_bytes_of", lambda _, free=free_gib: free * GIB)
        with pytest.raises(BatchDoesNotFit) as caught:
            find_in(None, device=device)
        assert caught.value.remedy.startswith(remedy)
        assert ("another process holds 18.0 GiB" in caught.value.message) == (free_gib == 6)


@pytest.mark.parametrize("first", [None, 80])
def test_no_size_is_tried_that_the_device_computes_wrongly(
    first: int | None, runner: SimulatedRunner
) -> None:
    device = CpuDevice()
    device.shapes = BatchShapes(max_tokens=16 * 50 + 15)
    found, sizes = find_in(None, device=device, first=first)
    assert (found.max_verified, found.first_failed, max(sizes)) == (50, None, 50)


@pytest.mark.parametrize(("allowed", "expected"), [(None, 8 * GIB), ("4GiB", 4 * GIB)])
def test_processes_of_one_host_divide_its_memory(
    runner: SimulatedRunner, monkeypatch: pytest.MonkeyPatch, allowed: str | None, expected: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(find_module, "spare_bytes", lambda: 16 * GIB)
    find_in(None, options=SearchConfig(time_limit=60.0, memory=allowed))
    assert runner.limit_bytes == expected


def search_parts(
    emitted: list[Event] | None = None, *, stores_features: bool = True
) -> BatchResult:
    emit = (emitted if emitted is not None else []).append
    case = tiny_case(mode=Mode("head"))
    return find_parts(case, replace(SEARCH, emit=emit), stores_features=stores_features)


def messages(emitted: list[Event]) -> list[str]:
    return [one.message for one in emitted if isinstance(one, Info | WarningMessage)]


def test_a_whole_model_has_one_search(runner: SimulatedRunner) -> None:
    emitted: list[Event] = []
    result = search_parts(emitted, stores_features=False)
    assert [case.part for case in runner.cases] == ["whole"]
    assert messages(emitted) == ["searching on cpu: head, 16 tokens"]
    assert (result.max_verified, result.first_failed, result.stores_features) == (124, 126, False)
    assert (result.features_batch, result.budget_bytes) == (None, 8 * GIB)
    assert result.peak_bytes == SimulatedMachine().peak_bytes(124)
    assert (result.device, result.mode, result.padded_length) == ("cpu", "head", 16)


def test_where_features_are_stored_their_extraction_has_its_own_batch_size(
    runner: SimulatedRunner,
) -> None:
    runner.machines["trainable"] = SimulatedMachine(
        peak_bytes=rising_from(floor=100, base=90, row=30)
    )
    emitted: list[Event] = []
    result = search_parts(emitted)
    assert [one for one in messages(emitted) if "searching" in one] == [
        "searching on cpu: head, feature extraction, 16 tokens",
        "searching on cpu: head, trainable layers, 16 tokens",
    ]
    assert result.stores_features
    assert result.features_batch is not None
    assert result.features_batch <= 125 < result.max_verified
    assert {one.part for one in result.trials} == {"features", "trainable"}
    trials = list(result.trials)
    assert [one for one in emitted if isinstance(one, Trial)] == trials
    # The larger of both peaks; that of the extraction is not the last.
    assert result.peak_bytes == max(one.peak_bytes or 0 for one in trials if one.status == "fits")


@pytest.mark.parametrize("too_large", ["features", "trainable"])
def test_where_one_part_does_not_fit_nothing_does(too_large: str, runner: SimulatedRunner) -> None:
    runner.machines[too_large] = SimulatedMachine(capacity_share=0.001)
    emitted: list[Event] = []
    result = search_parts(emitted)
    assert (result.max_verified, result.recommended, result.fastest) == (0, 0, 0)
    assert (result.first_failed, result.peak_bytes) == (1, None)
    assert (result.features_batch is None) == (too_large == "features")
    assert any("not even a batch of one example fits" in one for one in messages(emitted))


def test_a_model_that_can_not_be_split_is_searched_as_a_whole(runner: SimulatedRunner) -> None:
    runner.can_split = False
    emitted: list[Event] = []
    result = search_parts(emitted)
    assert [case.part for case in runner.cases] == ["features", "whole"]
    assert (result.max_verified, result.stores_features) == (124, False)
    [warning] = [one for one in emitted if isinstance(one, WarningMessage)]
    assert "can't be split off: the whole model runs at every step" in warning.message
