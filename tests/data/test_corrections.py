"""Label corrections: decisions on suspects, and class-name maps."""

from pathlib import Path

import pytest
from data_files import load, write

from finetune.data.columns import OtherData
from finetune.data.load import load_rows
from finetune.errors import DataError
from finetune.events import Event, sent_to
from finetune.tasks.single import Single


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.csv", "text,label\nfirst,a\n,a\nsecond,b\nthird,b\nfourth,a\n")


def test_decisions_change_and_drop_rows_by_row_number(table: Path) -> None:
    decisions = "decision,row,text\na,4,second\ndrop,5,third\nkeep,2,first\n,6,fourth\n"
    outcome = load(table, corrections=str(write(table.with_name("c.csv"), decisions)))
    assert outcome.rows["train"] == [("first", "a"), ("second", "a"), ("fourth", "a")]
    assert outcome.loaded.splits["train"]["row"].to_pylist() == [2, 4, 6]
    assert "1 rows changed, 1 rows dropped" in outcome.messages
    assert len(outcome.loaded.sources) == 2


def test_regression_and_multi_label_rows_can_be_corrected(tmp_path: Path) -> None:
    rows = "".join(f"text {number},{number / 7:.3f}\n" for number in range(30))
    table = write(tmp_path / "a.csv", "text,score\n" + rows)
    file = write(tmp_path / "c.csv", "decision,row,text\n9.5,4,text 2\ndrop,5,text 3\n")
    train = load(table, corrections=str(file), task="regression").rows["train"]
    assert [score for _, score in train[:4]] == pytest.approx([0, 1 / 7, 9.5, 4 / 7], abs=1e-3)
    rows = "".join(f"text {number},{('a', 'a|b', 'b')[number % 3]}\n" for number in range(30))
    write(table, "text,label\n" + rows)
    write(file, 'decision,row,text\n"[""a"",""b""]",4,text 2\ndrop,5,text 3\n')
    names = write(tmp_path / "map.csv", "a,z\n")
    train = load(table, corrections=str(file), label_map=str(names)).rows["train"]
    labels = [sorted(classes) for _, classes in train[:4]]
    assert labels == [["z"], ["b", "z"], ["b", "z"], ["b", "z"]]


@pytest.mark.parametrize(
    ("decision", "error", "complaint"),
    [
        (
            "a,4,another,b,train",
            DataError,
            r"row 4 of train \('another'\).*but the data has no row",
        ),
        ("a,3,second,a,train", DataError, "row 3 of train .* but the data has no row"),
        ("bb,4,second,b,train", DataError, "'bb' is not a class"),
    ],
)
def test_decision_that_does_not_match_the_data_is_rejected(
    decision: str, error: type[DataError], complaint: str, table: Path
) -> None:
    file = write(table.with_name("c.csv"), f"decision,row,text,label,split\n{decision}\n")
    with pytest.raises(error, match=complaint):
        load(table, corrections=str(file))


@pytest.mark.parametrize(
    ("content", "names"), [("label,into\nb,c\n", ["a", "c"]), ("b,a\n", ["a"])]
)
def test_label_map_renames_and_merges_classes(content: str, names: list[str], table: Path) -> None:
    file = write(table.with_name("map.csv"), content)
    assert load(table, label_map=str(file)).loaded.task.class_names == names


@pytest.mark.parametrize("decision", ["Keep", " KEEP ", "keep"])
def test_decisions_are_case_insensitive(decision: str, table: Path) -> None:
    rows = f"decision,row,text\n{decision},4,second\nDrop,5,third\nB,2,first\n"
    outcome = load(table, corrections=str(write(table.with_name("c.csv"), rows)))
    assert outcome.rows["train"] == [("first", "b"), ("second", "b"), ("fourth", "a")]


def test_class_can_have_the_name_of_a_decision(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", "text,label\none,Keep\ntwo,Drop\nthree,Keep\n")
    rows = "decision,row,text\nKeep,3,two\nkeep,2,one\n"
    outcome = load(table, corrections=str(write(tmp_path / "c.csv", rows)))
    assert [label for _, label in outcome.rows["train"]] == ["Keep"] * 3


@pytest.mark.parametrize("separator", [",", ";"])
def test_decision_applies_to_the_row_with_its_text_and_label(
    separator: str, tmp_path: Path
) -> None:
    before = "text,label\nfirst one,a\nsecond,b\nthird,b\nsecond,a\n"
    rows = "decision,split,row,text,label\na,test,3,Second ,b\ndrop,train,5,second,a\n"
    file = write(tmp_path / "c.csv", rows.replace(",", separator))
    table = write(tmp_path / "a.csv", before)
    moved = "text,label\nnew,b\nsecond,a\n\nfirst one,a\nthird,b\nsecond,b\n"
    assert load(table, corrections=str(file)).rows["train"] == [
        ("first one", "a"), ("second", "a"), ("third", "b"),
    ]  # fmt: skip
    assert load(write(table, moved), corrections=str(file)).rows["train"] == [
        ("new", "b"), ("first one", "a"), ("third", "b"), ("second", "a"),
    ]  # fmt: skip


def test_classes_without_rows_are_removed(tmp_path: Path) -> None:
    lines = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(20))
    table = write(tmp_path / "rows.csv", f"text,label\nfirst,n/a\nsecond,n/a\n{lines}")
    file = write(tmp_path / "c.csv", "decision,row,text\na,2,first\ndrop,3,second\n")
    assert load(table, corrections=str(file)).loaded.task.class_names == ["a", "b"]
    file = write(tmp_path / "c.csv", "decision,row,text\na,2,first\n")
    assert load(table, corrections=str(file)).loaded.task.class_names == ["a", "b", "n/a"]


@pytest.mark.parametrize(
    "line", ["n/a;", "n/a,", "n/a,\nb,c", "label,new\nn/a,", "n/a;;", '"n/a",""']
)
def test_label_map_can_remove_labels(line: str, tmp_path: Path) -> None:
    lines = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(20))
    table = write(tmp_path / "rows.csv", f"text,label\nfirst,n/a\nsecond,n/a\n{lines}")
    outcome = load(table, label_map=str(write(tmp_path / "map.csv", f"{line}\n")))
    assert len(outcome.rows["train"]) == 20
    assert outcome.loaded.task.class_names == ["a", "c" if "c" in line else "b"]
    assert "lose the label n/a" in outcome.messages
    assert outcome.warnings == []
    table = write(tmp_path / "rows.csv", f"text,label\none,n/a\ntwo,a|n/a\nthree,[]\n{lines}")
    outcome = load(table, label_map=str(tmp_path / "map.csv"), task="multi")
    assert outcome.rows["train"][:2] == [("two", ["a"]), ("three", [])]


def test_decisions_are_applied_to_new_data(table: Path) -> None:
    file = write(table.with_name("c.csv"), "decision,row,text,label\nc,4,second,b\nb,9,no,a\n")
    other = write(table.with_name("other.csv"), "text,label\nsecond,b\nnew,a\nsecond,a\n")
    emitted: list[Event] = []
    with sent_to(emitted.append):
        rows = load_rows(OtherData(str(other), corrections=str(file)), task=Single(["a", "b", "c"]))
    assert rows["label"].to_pylist() == [2, 0, 0]
    assert "1 rows changed" in str(emitted)
    file.unlink()
    with sent_to(emitted.append):
        rows = load_rows(OtherData(str(other), corrections=str(file)), task=Single(["a", "b", "c"]))
    assert rows["label"].to_pylist() == [1, 0, 0]
    assert "c.csv is missing" in str(emitted)
