"""Decisions on labels, and new names of classes, applied as data is loaded."""

from pathlib import Path
from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.data.dataset import LoadedData
from finetune.data.load import load_data
from finetune.errors import DataError, DataMismatchError
from finetune.events import Event, Info, sent_to

ROWS = ["first,a", ",a", "second,b", "third,b", "fourth,a"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["text,label", *ROWS]))
    return path


def load(table: Path, emitted: list[Event] | None = None, **files: str) -> LoadedData:
    options: dict[str, Any] = {}
    for option, content in files.items():
        path = table.parent / f"{option}.csv"
        path.write_text(content)
        options[option] = str(path)
    emit = ([] if emitted is None else emitted).append
    with sent_to(emit):
        return load_data(DataConfig(data=str(table), **options))


def rows_of(loaded: LoadedData) -> list[tuple[str, str]]:
    train = loaded.splits["train"]
    labels = loaded.task.to_json(loaded.task.labels(train.data["label"]))
    return list(zip(train["text"], labels, strict=True))


def test_decisions_change_and_drop_rows_by_their_number_in_the_table(table: Path) -> None:
    emitted: list[Event] = []
    decisions = "decision,row,text\na,3,second\ndrop,4,third\nkeep,1,first\n,5,fourth\n"
    loaded = load(table, emitted, corrections=decisions)
    assert rows_of(loaded) == [("first", "a"), ("second", "a"), ("fourth", "a")]
    assert loaded.numbers_of("train").tolist() == [0, 2, 4]
    said = [one.message for one in emitted if isinstance(one, Info)]
    assert any("labels of 1 rows changed, 1 rows dropped" in one for one in said)
    assert len(loaded.sources) == 2


def test_a_row_whose_text_has_changed_is_refused_and_named(table: Path) -> None:
    with pytest.raises(DataMismatchError, match=r"row 3 of train \('another'\).*'second'"):
        load(table, corrections="decision,row,text\na,3,another\n")


def test_a_decision_that_is_no_class_is_refused(table: Path) -> None:
    with pytest.raises(DataError, match="'bb' is not a class"):
        load(table, corrections="decision,row,text\nbb,3,second\n")


def test_a_map_renames_and_merges_classes(table: Path) -> None:
    assert load(table, label_map="label,into\nb,c\n").task.class_names == ["a", "c"]
    assert load(table, label_map="b,a\n").task.class_names == ["a"]
