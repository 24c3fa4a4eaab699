"""The files of ``finetune label`` keep all labels, and other files are not overwritten."""

import errno
import json
from collections.abc import Callable, Iterator, Sequence
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
    path: Path, *, texts: Sequence[str] = TEXTS[0], multi: bool = False, **labels: Any
) -> LabelJournal:
    return LabelJournal(path, LabelSource([[*texts]], Labels(**labels), multi))


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
    label(4, "c"),
    Action("rename", classes=("c",), new_name=""),
]


@pytest.mark.parametrize("undone", range(len(ACTIONS) + 1))
def test_undo_and_restart_lead_to_the_same_labels(undone: int, path: Path) -> None:
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
    again = open_journal(path, **initial)  # a renamed class isn't restored
    assert again.labels == expected
    assert again.table_path.read_text() == table
    again.close()


def test_incomplete_line_after_a_kill_is_ignored(path: Path) -> None:
    journal = open_journal(path)
    for row in range(3):
        journal.record(label(row, "a"))
    journal.close()
    content = journal.path.read_bytes()
    for end in range(content.index(b"\n") + 1, len(content) + 1):
        journal.path.write_bytes(content[:end])
        journal.table_path.unlink()
        again = open_journal(path)
        assert len(again.labels.rows) == content[:end].count(b"\n") - 1
        again.record(label(7, "b"))
        again.close()
        lines = [json.loads(line) for line in again.path.read_text().splitlines()]
        assert lines[-1].pop("table")
        assert lines[-1].pop("digest")
        assert lines[-1] == {
            **{"kind": "label", "row": 7, "classes": ["b"], "how": "uncertain"},
            "texts": ["text 7"],
        }


@pytest.mark.parametrize(
    ("name", "content", "options", "error", "words"),
    [
        ("texts.labels.csv", "text,label\n", {}, DataError, "not as finetune label writes it"),
        ("texts.labels.jsonl", "{}\n", {}, DataError, "damaged, or not from finetune label"),
        ("texts.labels.jsonl", "hello", {}, DataError, "damaged, or not from finetune label"),
        (None, None, {"texts": ["another", "text"]}, DataError, "has labels of other texts"),
        (None, None, {"multi": True}, DataError, "of another kind"),
    ],
)
def test_foreign_files_are_rejected_and_kept(
    name: str | None,
    content: str,
    options: dict[str, Any],
    error: type[FinetuneError],
    words: str,
    path: Path,
) -> None:
    if name is None:
        journal = open_journal(path)
        journal.record(label(0, "a"))
        journal.close()
    else:
        path.with_name(name).write_text(content)
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(error, match=words):
        open_journal(path, **options)
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("tickets.2024.csv", "tickets.2024"),
        ("tickets.2025.csv.gz", "tickets.2025"),
        ("tickets.2024", "tickets.2024"),
        ("notes.md", "notes.md"),
        ("v1.2.txt", "v1.2"),
        ("a b.JSONL", "a b"),
        (".hidden.csv", ".hidden"),
    ],
)
def test_each_input_file_has_its_own_journal(name: str, stem: str, tmp_path: Path) -> None:
    journal = open_journal(tmp_path / name)
    assert journal.path.name == f"{stem}.labels.jsonl"
    assert journal.table_path.name == f"{stem}.labels.csv"
    journal.close()


@pytest.mark.parametrize(
    ("texts", "rows"),
    [
        ([*TEXTS[0], "more", "texts"], [0, 1, 2]),
        (["new", *TEXTS[0]], [1, 2, 3]),
        (TEXTS[0][::-1], [11, 10, 9]),
        (["text 1", "text  0 ", "text 2"], [1, 0, 2]),
        (["text 1", "text 5"], [0, 2, 3]),
    ],
)
def test_labels_follow_their_texts_if_the_file_changes(
    texts: list[str], rows: list[int], path: Path
) -> None:
    journal = open_journal(path)
    for row in range(3):
        journal.record(label(row, "abc"[row], how="random"))
    journal.close()
    for _ in range(2):
        again = open_journal(path, texts=texts)
        assert {*again.labels.rows} == {*rows}
        names = {again.source.texts[0][row].split()[1]: n for row, n in again.labels.rows.items()}
        assert names == {"0": ("a",), "1": ("b",), "2": ("c",)}
        again.close()
    written = again.table_path.read_text().splitlines()[1:]
    numbers = [line.split(",")[2] for line in written]
    assert numbers == [str(row + 1) if row < len(texts) else "" for row in again.labels.rows]


def test_random_order_is_stable_if_rows_are_added(path: Path) -> None:
    texts = [f"text {number}" for number in range(100)]
    journal = open_journal(path, texts=texts)
    before = journal.order.tolist()
    journal.close()
    longer = [*texts, *(f"other {number}" for number in range(100))]
    journal = open_journal(path, texts=longer)
    assert [row for row in journal.order.tolist() if row < 100] == before
    assert sorted(journal.order) == [*range(200)]
    journal.close()
    assert open_journal(path.with_name("b.csv"), texts=texts[::-1]).order.tolist() != before


def excel(table: str) -> bytes:
    return table.replace(",", ";").encode("utf-8-sig")


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("save", [str.encode, excel, lambda table: table.encode("cp1252")])
def test_edits_to_the_table_are_read(
    save: Callable[[str], bytes], is_running: bool, path: Path
) -> None:
    journal = open_journal(path, texts=["one", "two", "thr\u00e9e", "four", "five"])
    for row in range(3):
        journal.record(label(row, "a", how="random"))
    table = journal.table_path.read_bytes().decode()
    edited = table.replace("two,a,2", "two,b,2").replace("one,a,1,random,train\r\n", "")
    edited += "four,a,4,,\r\nby hand,c,,,\r\n"
    if not is_running:
        journal.close()
    journal.table_path.write_bytes(save(edited))
    if not is_running:
        journal = open_journal(path, texts=["one", "two", "thr\u00e9e", "four", "five"])
    journal.take_edits()
    journal.record(label(4, "b"))
    assert journal.labels.rows == {1: ("b",), 2: ("a",), 3: ("a",), 5: ("c",), 4: ("b",)}
    assert journal.labels.how[1] == "random"
    assert journal.labels.skipped == {0}
    assert "by hand,c,,chosen" in journal.table_path.read_text("utf-8")
    assert len(journal.actions) == 3 + 4 + 1
    journal.close()
    again = open_journal(path, texts=["one", "two", "thr\u00e9e", "four", "five"])
    assert again.labels == journal.labels


def test_unsupported_edits_are_rejected(path: Path) -> None:
    journal = open_journal(path)
    journal.record(label(0, "a"))
    lines = journal.table_path.read_text().splitlines()
    edited = f"{lines[0]},comment\r\n{lines[1]},mine\r\n"
    journal.table_path.write_text(edited)
    with pytest.raises(DataError, match="not as finetune label writes it"):
        journal.take_edits()
    journal.close()
    with pytest.raises(DataError, match="not as finetune label writes it"):
        open_journal(path)
    assert "mine" in journal.table_path.read_text()


@pytest.mark.parametrize("name", ["append_jsonl", "write_text_atomically"])
def test_full_disk_keeps_labels_and_files_unchanged(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(path)
    journal.record(label(0, "a"))
    files = [journal.path.read_bytes(), journal.table_path.read_bytes()]

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(journal.path))

    with monkeypatch.context() as patch:
        patch.setattr(f"finetune.web.journal.{name}", fail)
        for action in (label(1, "b"), Action("undo"), Action("add", classes=("c",))):
            with pytest.raises(OSError, match="No space"):
                journal.record(action)
    assert [journal.path.read_bytes(), journal.table_path.read_bytes()] == files
    assert journal.labels.rows == {0: ("a",)}
    journal.record(label(2, "c"))
    journal.close()
    assert open_journal(path).labels.rows == {0: ("a",), 2: ("c",)}


def test_second_server_on_the_same_file_is_rejected(path: Path) -> None:
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
def test_run_uses_random_texts_of_the_table_as_test_split(kind: Any, path: Path) -> None:
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
    test = set(loaded.splits["test"]["text"].to_pylist())
    assert test == ({"text 6", "text 8"} if kind is multi else {"text 6", "text 7"})
    assert len(loaded.splits["train"]) == 7
