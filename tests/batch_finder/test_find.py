"""What an earlier search found is confirmed by one probe, or searched on from."""

import dataclasses
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_finder.simulated_machines import (
    GIB,
    SimulatedMachine,
    SimulatedProber,
    did_not_fit,
    prober,
)
from tiny_models import tiny_case

from finetune.batch_finder import find
from finetune.batch_finder.case import Case
from finetune.batch_finder.find import Bounds, Finder
from finetune.batch_finder.search import Found
from finetune.config.mode import Mode
from finetune.devices.cpu import CpuDevice
from finetune.errors import ProbeFailed

__all__ = ["prober"]
CASE = tiny_case()
BOUNDS = Bounds(limit=1000, first=None, memory_limit_bytes=None, time_limit_seconds=60.0)


class OtherCpu(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.description = "another CPU"


def find_in(
    cache: Path | None,
    *,
    case: Case = CASE,
    bounds: Bounds = BOUNDS,
    device: CpuDevice | None = None,
) -> tuple[Found, list[int]]:
    """Search; return what was found and the sizes that were probed."""
    finder = Finder(device or CpuDevice(), bounds, cache, emit=lambda _: None)
    found = finder.find(case)
    return found, [probe.outcome.batch_size for probe in finder.probes]


@pytest.fixture
def cache(prober: SimulatedProber, tmp_path: Path) -> Path:
    """A folder that holds the result of one search with 8 GiB, which memory ended."""
    folder = tmp_path / "batches"
    found, sizes = find_in(folder)
    assert len(sizes) == len(found.probes) > 1
    assert (found.max_verified, found.first_failed) == (125, 126)
    return folder


def only_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def found_in(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_second_search_is_one_probe_and_the_same_answer(cache: Path) -> None:
    first = found_in(only_file(cache))
    found, sizes = find_in(cache)
    assert sizes == [first["recommended"]]
    assert json.loads(json.dumps(dataclasses.asdict(found))) == first
    assert found.budget_bytes == 8 * GIB
    assert found.peak_bytes == SimulatedMachine().peak_bytes(125)


@pytest.mark.parametrize(
    "changed",
    [
        {"case": dataclasses.replace(CASE, mode=Mode("head"))},
        {"case": dataclasses.replace(CASE, padded_length=24)},
        {"case": dataclasses.replace(CASE, precision="bf16")},
        {"case": dataclasses.replace(CASE, part="trainable")},
        {"case": dataclasses.replace(CASE, architecture={"hidden_size": 64})},
        {"bounds": dataclasses.replace(BOUNDS, limit=999)},
        {"bounds": dataclasses.replace(BOUNDS, memory_limit_bytes=2**33)},
        {"device": OtherCpu()},
    ],
    ids=["mode", "length", "precision", "part", "model", "limit", "memory limit", "device"],
)
def test_another_case_device_or_limit_is_searched_anew(
    changed: dict[str, Any], cache: Path
) -> None:
    _, sizes = find_in(cache, **changed)
    assert len(sizes) > 1
    assert len(list(cache.iterdir())) == 2


def test_another_version_of_a_package_is_searched_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "version", lambda name: version(name) + "+newer")
    _, sizes = find_in(cache)
    assert len(sizes) > 1


@pytest.mark.parametrize(("before_gib", "now_gib"), [(4, 8), (8, 24)])
def test_with_more_memory_the_search_begins_where_the_earlier_one_ended(
    before_gib: int, now_gib: int, prober: SimulatedProber, tmp_path: Path
) -> None:
    prober.machine = SimulatedMachine(budget_bytes=before_gib * GIB)
    before, _ = find_in(tmp_path)
    prober.machine = SimulatedMachine(budget_bytes=now_gib * GIB)
    now, sizes = find_in(tmp_path)
    assert sizes[0] == before.max_verified < now.max_verified
    assert now.max_verified >= 0.98 * prober.machine.largest_fitting()
    # That is what is cached now, with its budget.
    again, sizes = find_in(tmp_path)
    assert (again, sizes) == (now, [now.recommended])


def test_memory_that_varies_a_little_is_no_reason_to_search(
    cache: Path, prober: SimulatedProber
) -> None:
    prober.machine = SimulatedMachine(budget_bytes=int(1.05 * 8 * GIB))
    assert len(find_in(cache)[1]) == 1
    prober.machine = SimulatedMachine(budget_bytes=int(1.06 * 8 * GIB))
    assert len(find_in(cache)[1]) > 1


def test_with_less_memory_the_size_is_confirmed_where_it_still_fits(
    cache: Path, prober: SimulatedProber
) -> None:
    prober.machine = SimulatedMachine(budget_bytes=7 * GIB)
    found, sizes = find_in(cache)
    assert sizes == [found.recommended]
    assert found.budget_bytes == 7 * GIB
    prober.machine = SimulatedMachine(budget_bytes=4 * GIB)
    found, sizes = find_in(cache)
    assert found.max_verified <= prober.machine.largest_fitting()


def test_more_memory_changes_nothing_where_it_did_not_end_the_search(
    prober: SimulatedProber, tmp_path: Path
) -> None:
    bounds = dataclasses.replace(BOUNDS, limit=50)
    before, _ = find_in(tmp_path, bounds=bounds)
    assert (before.max_verified, before.first_failed) == (50, None)
    prober.machine = SimulatedMachine(budget_bytes=80 * GIB)
    found, sizes = find_in(tmp_path, bounds=bounds)
    assert sizes == [found.recommended]


def test_more_memory_counts_where_the_fastest_size_left_no_room(
    prober: SimulatedProber, tmp_path: Path
) -> None:
    bounds = dataclasses.replace(BOUNDS, limit=37, first=37)
    prober.machine = SimulatedMachine(budget_bytes=4 * GIB, strain_share=0.7)
    before, _ = find_in(tmp_path, bounds=bounds)
    assert (before.first_failed, before.fastest) == (None, 37)
    assert before.recommended < 37
    prober.machine = SimulatedMachine(budget_bytes=8 * GIB)
    now, sizes = find_in(tmp_path, bounds=bounds)
    assert (sizes[0], now.recommended) == (37, 37)


def cut_off(text: str) -> str:
    return text[: len(text) // 2]


def without_probes(text: str) -> str:
    fields = json.loads(text)
    del fields["probes"]
    return json.dumps(fields)


def with_a_text_for_the_budget(text: str) -> str:
    return json.dumps(json.loads(text) | {"budget_bytes": "8 GiB"})


def without_budget(text: str) -> str:
    fields = json.loads(text)
    del fields["budget_bytes"]
    return json.dumps(fields)


@pytest.mark.parametrize(
    "damage",
    [cut_off, without_probes, without_budget, with_a_text_for_the_budget, lambda _: "",
     lambda _: "[]", lambda _: "null"],
)  # fmt: skip
def test_a_damaged_file_is_replaced_by_a_new_search(
    damage: Callable[[str], str], cache: Path
) -> None:
    file = only_file(cache)
    whole = file.read_text()
    file.write_text(damage(whole))
    _, sizes = find_in(cache)
    assert len(sizes) > 1
    assert found_in(file) == json.loads(whole)


def test_what_was_found_is_not_lost_where_it_can_not_be_kept(
    prober: SimulatedProber, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    found, _ = find_in(tmp_path / "file" / "batches")
    assert found.max_verified == 125


@pytest.mark.parametrize("trouble", ["too_big", "strained"])
def test_a_cached_size_that_no_longer_fits_is_searched_anew(
    trouble: str, cache: Path, prober: SimulatedProber
) -> None:
    before = found_in(only_file(cache))
    shares = {"strain_share": 0.5} if trouble == "strained" else {"capacity_share": 0.5}
    prober.machine = SimulatedMachine(**shares)
    found, sizes = find_in(cache)
    assert len(sizes) == 1 + len(found.probes)
    assert sizes[0] == before["recommended"] > found.recommended
    assert found_in(only_file(cache))["recommended"] == found.recommended


def test_without_a_folder_nothing_is_cached(
    prober: SimulatedProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        _, sizes = find_in(None)
        assert len(sizes) > 1
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_fails_is_not_cached(
    prober: SimulatedProber, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "probe", lambda size: did_not_fit(size, "failed"))
    with pytest.raises(ProbeFailed):
        find_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_start_of_the_first_process_counts_as_time_of_the_search(
    prober: SimulatedProber, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 59.0])
    monkeypatch.setattr(find, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found, _ = find_in(None)
    # One second is left to search in, too little for the largest size.
    assert found.max_verified < 125


@pytest.mark.parametrize(
    ("first", "most", "expected"),
    [(None, None, (100, None)), (None, 30, (30, None)), (64, 30, (30, 30)), (64, 80, (80, 64)),
     (64, 200, (100, 64))],
)  # fmt: skip
def test_bounds_are_clamped_to_what_the_device_computes_right(
    first: int | None, most: int | None, expected: tuple[int, int | None]
) -> None:
    clamped = dataclasses.replace(BOUNDS, limit=100, first=first).clamp(most)
    assert (clamped.limit, clamped.first) == expected


@pytest.mark.parametrize(("allowed_bytes", "expected"), [(None, 8 * GIB), (4 * GIB, 4 * GIB)])
def test_processes_of_one_host_divide_its_memory(
    prober: SimulatedProber,
    monkeypatch: pytest.MonkeyPatch,
    allowed_bytes: int | None,
    expected: int,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(find, "spare_bytes", lambda: 16 * GIB)
    find_in(None, bounds=dataclasses.replace(BOUNDS, memory_limit_bytes=allowed_bytes))
    assert prober.limit_bytes == expected
