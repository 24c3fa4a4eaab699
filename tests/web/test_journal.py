"""The files of ``finetune label``: nothing is lost, and no foreign file is overwritten."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.errors import DataError, FinetuneError, UsageError
from finetune.web.journal import Action, LabelJournal, Labels, LabelSource

TEXTS = [[f"text {number}" for number in range(12)]]


def open_journal(
    path: Path, *, digest: str = "d", multi: bool = False, **labels: Any
) -> LabelJournal:
    return LabelJournal(path, LabelSource(TEXTS, Labels(**labels), multi, digest))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "texts.csv"


def label(row: int, *names: str, how: Any = "uncertain") -> Action:
    return Action("label", row, names, how)


ACTIONS = [
    label(0, "a"),
    label(1, "b"),
    Action("add", classes=("c",)),
    Action("skip", 2, how="random"),
    Action("rename", classes=("b",), new_name="B"),
    label(3, "B"),
    Action("rename", classes=("a",), new_name="B"),
]


@pytest.mark.parametrize("undone", range(len(ACTIONS) + 1))
def test_undo_and_a_new_start_lead_to_the_same_labels(undone: int, path: Path) -> None:
    initial = {"classes": ["z", "a", "b"], "rows": {9: ("z",)}, "how": {9: "file"}}
    journal = open_journal(path, **initial)
    for action in ACTIONS[: len(ACTIONS) - undone]:
        journal.record(action)
    expected = deepcopy(journal.labels)
    for action in ACTIONS[len(ACTIONS) - undone :]:
        journal.record(action)
    for _ in range(undone):
        journal.record(Action("undo"))
    assert journal.labels == expected
    table = journal.table_path.read_text()
    journal.close()
    again = open_journal(path, **initial)  # a renamed class does not come back
    assert again.labels == expected
    assert again.table_path.read_text() == table
    again.close()


def test_a_line_that_a_kill_has_cut_was_never_answered(path: Path) -> None:
    journal = open_journal(path)
    for row in range(3):
        journal.record(label(row, "a"))
    journal.close()
    content = journal.path.read_bytes()
    for end in range(content.index(b"\n") + 1, len(content) + 1):
        journal.path.write_bytes(content[:end])
        again = open_journal(path)
        assert len(again.labels.rows) == content[:end].count(b"\n") - 1
        again.record(label(7, "b"))
        again.close()
        lines = [json.loads(line) for line in again.path.read_text().splitlines()]
        assert lines[-1] == {"kind": "label", "row": 7, "classes": ["b"], "how": "uncertain"}


@pytest.mark.parametrize(
    ("name", "content", "options", "error", "words"),
    [
        ("texts.labels.csv", "text,label\n", {}, DataError, "not written by finetune label"),
        ("texts.labels.jsonl", "{}\n", {}, DataError, "not written by finetune label"),
        ("texts.labels.jsonl", "hello", {}, DataError, "not written by finetune label"),
        (None, None, {"digest": "other"}, DataError, "has labels of other texts"),
        (None, None, {"multi": True}, DataError, "of another kind"),
    ],
)
def test_files_of_others_are_rejected_and_kept(
    name: str | None,
    content: str,
    options: dict[str, Any],
    error: type[FinetuneError],
    words: str,
    path: Path,
) -> None:
    if name is None:
        open_journal(path).close()
    else:
        path.with_name(name).write_text(content)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(error, match=words):
        open_journal(path, **options)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_two_servers_do_not_share_a_file(path: Path) -> None:
    journal = open_journal(path)
    with pytest.raises(UsageError, match="being labeled by another"):
        open_journal(path)
    journal.close()
    open_journal(path).close()
    with pytest.raises(UsageError, match="has labels already"):
        open_journal(journal.table_path)


def single() -> Iterator[Action]:
    for row in range(6):
        yield label(row, "ab"[row % 2])
    yield from (label(6, "a", how="random"), label(7, "b", how="random"))
    yield label(8, "rare", how="random")  # no training row has this class


def multi() -> Iterator[Action]:
    yield from (label(row, *["a", "b"][: row % 3]) for row in range(6))
    yield from (label(6, "a", how="random"), label(7, "a", "rare", how="random"))
    yield label(8, how="random")


@pytest.mark.parametrize("kind", [single, multi])
def test_run_reads_the_table_with_the_random_texts_as_test_split(kind: Any, path: Path) -> None:
    journal = open_journal(path, multi=kind is multi)
    numbers = []
    for action in kind():
        journal.record(action)
        numbers.append(action.row)
        if len(numbers) == 6:
            assert "split" not in journal.table_path.read_text().splitlines()[0]
    journal.close()
    loaded = load_data(DataConfig(data=str(journal.table_path)))
    assert loaded.task.name == ("multi" if kind is multi else "single")
    assert sorted(loaded.task.class_names) == ["a", "b", "rare"]
    test = set(loaded.splits["test"]["text"])
    assert test == ({"text 6", "text 8"} if kind is multi else {"text 6", "text 7"})
    assert len(loaded.splits["train"]) == 7
