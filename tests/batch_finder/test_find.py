"""What an earlier search found is confirmed by one probe; the children are ``odd_worker``'s."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import odd_worker
import psutil
import pytest
from tiny_models import tiny_config

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.find import Answer, Bounds, find_batch
from finetune.devices.cpu import CpuDevice
from finetune.errors import ProbeFailed
from finetune.model.mode import Mode

TINY = Case("cpu", architecture_of(tiny_config("bert").to_dict()), 6, Mode("full"), 16, "fp32")
BOUNDS = Bounds(limit=100, first=None, memory_limit_bytes=None, time_limit_seconds=60.0)


class OtherCpu(CpuDevice):
    """A processor with another memory."""

    def __init__(self) -> None:
        super().__init__()
        self.description = "another processor"


def find(
    memory: Path | None,
    *,
    case: Case = TINY,
    bounds: Bounds = BOUNDS,
    device: CpuDevice | None = None,
) -> tuple[Answer, int]:
    """Search with a worker that only pretends to train; return the answer and its probes."""
    emitted: list[Any] = []
    answer = find_batch(
        case, device=device or CpuDevice(), bounds=bounds, memory=memory, on_probe=emitted.append,
        worker="odd_worker",
    )  # fmt: skip
    return answer, len(emitted)


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert psutil.Process().children(recursive=True) == []


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder that remembers one search."""
    folder = tmp_path / "batches"
    answer, probes = find(folder)
    assert probes == len(answer.found.probes) > 1
    return folder


def only_file(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_the_second_search_is_one_probe_and_the_same_answer(memory: Path) -> None:
    first = json.loads(only_file(memory).read_text())
    answer, probes = find(memory)
    assert (probes, answer.is_remembered) == (1, True)
    assert json.loads(json.dumps(dataclasses.asdict(answer.found))) == first
    assert answer.budget_bytes == odd_worker.BUDGET_BYTES
    assert answer.peak_bytes == 100_000
    assert 0 < answer.seconds < answer.found.seconds + 10


@pytest.mark.parametrize(
    "changed",
    [
        {"case": dataclasses.replace(TINY, mode=Mode("head"))},
        {"case": dataclasses.replace(TINY, padded_length=24)},
        {"case": dataclasses.replace(TINY, precision="bf16")},
        {"case": dataclasses.replace(TINY, part="suffix")},
        {"case": dataclasses.replace(TINY, architecture=TINY.architecture | {"hidden_size": 64})},
        {"bounds": dataclasses.replace(BOUNDS, limit=99)},
        {"bounds": dataclasses.replace(BOUNDS, memory_limit_bytes=2**30)},
        {"device": OtherCpu()},
    ],
    ids=["mode", "length", "precision", "part", "model", "limit", "memory limit", "device"],
)
def test_another_case_machine_or_limit_is_searched_anew(
    changed: dict[str, Any], memory: Path
) -> None:
    answer, probes = find(memory, **changed)
    assert not answer.is_remembered
    assert probes > 1
    assert len(list(memory.iterdir())) == 2


def cut_off(text: str) -> str:
    return text[: len(text) // 2]


def without_its_probes(text: str) -> str:
    fields = json.loads(text)
    del fields["probes"]
    return json.dumps(fields)


def with_an_unknown_field(text: str) -> str:
    return json.dumps(json.loads(text) | {"unknown": 1})


@pytest.mark.parametrize(
    "damage",
    [cut_off, without_its_probes, with_an_unknown_field, lambda _: "", lambda _: "[]",
     lambda _: "3", lambda _: "null"],
)  # fmt: skip
def test_a_damaged_memory_is_replaced_by_a_new_search(
    damage: Callable[[str], str], memory: Path
) -> None:
    file = only_file(memory)
    whole = file.read_text()
    file.write_text(damage(whole))
    answer, probes = find(memory)
    assert not answer.is_remembered
    assert probes > 1
    assert json.loads(file.read_text())["max_verified"] == json.loads(whole)["max_verified"]


@pytest.mark.parametrize("size", [odd_worker.NO_MEMORY, odd_worker.STRAINED])
def test_a_remembered_size_that_no_longer_fits_is_searched_anew(size: int, memory: Path) -> None:
    file = only_file(memory)
    whole = file.read_text()
    recommended = json.loads(whole)["recommended"]
    file.write_text(json.dumps(json.loads(whole) | {"recommended": size}))
    answer, probes = find(memory)
    assert not answer.is_remembered
    assert answer.found.recommended == recommended
    assert probes == 1 + len(answer.found.probes)
    assert json.loads(file.read_text())["recommended"] == recommended


def test_without_a_folder_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        answer, probes = find(None)
        assert not answer.is_remembered
        assert probes > 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "error"), [(odd_worker.FAILS, ProbeFailed), (odd_worker.SEGFAULT, ProbeFailed)]
)
def test_a_search_that_fails_is_not_remembered(
    size: int, error: type[Exception], tmp_path: Path
) -> None:
    bounds = dataclasses.replace(BOUNDS, limit=200, first=size)
    with pytest.raises(error):
        find(tmp_path, bounds=bounds)
    assert list(tmp_path.iterdir()) == []


def test_the_start_of_the_first_process_counts_as_time_of_the_search() -> None:
    answer, _ = find(None)
    assert answer.seconds > answer.found.seconds
