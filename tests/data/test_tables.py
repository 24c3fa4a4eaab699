"""Tables become splits: labels of other splits, rows left out, columns of splits, class names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from data_files import load, write
from datasets import ClassLabel, Dataset, Features, List, Value

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.load import load_rows
from finetune.data.read import join_tables, read_file
from finetune.errors import DataError, DataNotFoundError, UsageError

TRAIN = "text,label\na,x\nb,y\n"


def test_splits_in_files_of_their_own_share_the_classes_of_the_training_file(
    tmp_path: Path,
) -> None:
    outcome = load(
        write(tmp_path / "train.csv", TRAIN),
        validation_file=str(write(tmp_path / "validation.tsv", "label\ttext\ny\tc\n")),
        test_file=str(write(tmp_path / "test.jsonl", '{"text": "d", "label": "x"}\n')),
    )
    train = [("a", "x"), ("b", "y")]
    assert outcome.rows == {"train": train, "validation": [("c", "y")], "test": [("d", "x")]}
    splits = outcome.loaded.splits
    assert splits["test"].features == splits["train"].features


@pytest.mark.parametrize("split", ["validation", "test"])
def test_labels_that_training_lacks_are_named_or_skipped(tmp_path: Path, split: str) -> None:
    train = write(tmp_path / "train.csv", TRAIN)
    other = write(tmp_path / "other.csv", "text,label\nc,x\n,\nd,z\ne,w\nf,z\n")
    files: dict[str, Any] = {f"{split}_file": str(other)}
    with pytest.raises(DataError, match=rf"of the {split} split: 'z' \(2\), 'w' \(1\)") as raised:
        load(train, **files)
    assert "'z' in line 4 of" in raised.value.message
    assert "--skip-unknown-labels" in raised.value.remedy
    outcome = load(train, skip_unknown_labels=True, **files)
    assert outcome.rows[split] == [("c", "x")]
    skipped = f"3 rows of the {split} split skipped: no training row has 'z' (2), 'w' (1)"
    assert skipped in outcome.warnings
    write(other, "text,label\nc,z\n")
    with pytest.raises(DataError, match=r"'z' \(1\)"):
        load(train, skip_unknown_labels=True, **files)


LISTS = [["x"], ["x", "w"], [], ["w", "z"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "names.parquet", "a.csv", "flags.csv"])
def test_several_labels_a_row_are_read_from_lists_words_and_flags(
    tmp_path: Path, name: str
) -> None:
    path, texts = tmp_path / name, list("abcd")
    if name == "names.parquet":
        features = Features({"text": Value("string"), "label": List(ClassLabel(names=[*"xwz"]))})
        numbers = [["xwz".index(label) for label in labels] for labels in LISTS]
        table = Dataset.from_dict({"text": texts, "label": numbers}, features=features)
        table.to_parquet(path)
    elif name == "flags.csv":
        flags = {label: [int(label in labels) for labels in LISTS] for label in "xwz"}
        pandas.DataFrame({"text": texts, **flags}).to_csv(path, index=False)
    else:
        cells = ["|".join(labels) or "[]" for labels in LISTS] if name == "a.csv" else LISTS
        frame = pandas.DataFrame({"text": texts, "label": cells})
        if path.suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            getattr(frame, f"to_{path.suffix[1:]}")(path)
    outcome = load(path)
    assert ("a column for each class" in outcome.said) == (name == "flags.csv")
    read = [(text, sorted(labels)) for text, labels in outcome.rows["train"]]
    assert read == [*zip(texts, map(sorted, LISTS), strict=True)]
    assert sorted(outcome.loaded.task.class_names) == sorted("xwz")


def test_rows_without_text_or_label_are_left_out_and_counted(tmp_path: Path) -> None:
    content = 'text,label\na,x\n"over\ntwo lines",y\n" ",x\nc,\nd,y\n'
    outcome = load(write(tmp_path / "rows.csv", content))
    assert outcome.rows["train"] == [("a", "x"), ("over\ntwo lines", "y"), ("d", "y")]
    [message] = outcome.warnings
    assert message.startswith("2 of 5 rows skipped")
    assert f"line 5 of {tmp_path / 'rows.csv'}" in message


ROWS = "text,split,label\na 1,train,x\nb 2,Dev,y\nc 3,test,x\nd 4,train,y\n"


def test_a_column_of_splits_is_found_named_or_ignored(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", ROWS)
    outcome = load(table)
    assert {split: [text for text, _ in rows] for split, rows in outcome.rows.items()} == {
        **{"train": ["a 1", "d 4"], "validation": ["b 2"], "test": ["c 3"]}
    }
    assert "'split'" in outcome.said
    whole = load(table, split_column="none").loaded
    assert whole.splits["train"].num_rows == 4
    assert load_rows(OtherData(str(table)), task=whole.task).num_rows == 4
    other = write(tmp_path / "other.csv", ROWS.replace("split", "use").replace("test", "Testing"))
    assert len(load(other, split_column="use").rows) == 3
    odd = write(tmp_path / "odd.csv", ROWS.replace("Dev", "b"))
    with pytest.raises(UsageError, match=r"'split' of .*: 'b', 'test', 'train'"):
        load(odd)
    with pytest.raises(DataError, match=r"'label' of .* does not have a split"):
        load(table, split_column="label")
    with pytest.raises(DataNotFoundError, match="no column 'use'"):
        load(table, split_column="use")
    with pytest.raises(UsageError, match="one file"):
        load(table, split_column="split", test_file=str(other))


def test_the_files_of_a_split_are_one_table_that_knows_the_place_of_each_row(
    tmp_path: Path,
) -> None:
    files = [
        write(tmp_path / "1.csv", "text,label,id\na,x,1\nb,y,2\n"),
        write(tmp_path / "2.csv", "text,label\nc,x\nd,y\n"),
    ]
    table = join_tables([read_file(path, DataConfig()) for path in files])
    assert table.columns.to_pydict() == {"text": ["a", "b", "c", "d"], "label": ["x", "y"] * 2}
    assert table.place(1) == f"line 3 of {files[0]}"
    assert table.place(2) == f"line 2 of {files[1]}"


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ("0 2 1", "a b  c", ["a", "c", "b"]),
        ("1 3 2", "a b  c", ["a", "c", "b"]),
        ("0.0 1 -1", "a b  c", ["a", "b"]),
        ("0 3", "a b", "are not the names .* such as '3'"),
        ("0 x", "a b", "such as 'x'"),
        ("0 1", "a a", "the 2 lines of"),
    ],
)
def test_numbers_have_the_names_of_their_lines(
    labels: str, names: str, expected: list[str] | str, tmp_path: Path
) -> None:
    file = write(tmp_path / "names.txt", names.replace(" ", "\n"))
    rows = "".join(f"a text {label},{label}\n" for label in labels.split())
    table = write(tmp_path / "rows.csv", "text,label\n" + rows)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            load(table, label_names=str(file))
    else:
        outcome = load(table, label_names=str(file))
        assert outcome.loaded.task.class_names == names.split()
        assert [label for _, label in outcome.rows["train"]] == expected


@pytest.mark.parametrize("header", [True, None])
def test_a_header_that_is_repeated_is_no_row(tmp_path: Path, header: bool | None) -> None:
    rows = "".join(f"film {number} was long,{'ab'[number % 2]}\n" for number in range(9))
    table = write(tmp_path / "a.csv", f"said,mood\n{rows}said,mood\n{rows}")
    outcome = load(table, header=header)
    assert len(outcome.rows["train"]) == 18
    assert outcome.loaded.task.class_names == ["a", "b"]
    assert (
        f"1 rows that repeat the header are skipped, the first in line 11 of {table}"
        in outcome.said
    )


@pytest.mark.parametrize(
    ("labels", "warned"),
    [(("yes", "no", "?"), "'?'"), (("a", "Unknown", "-"), "'-', 'Unknown'"),
     (("0", "1", "2", "-1"), "'-1'"), (("-1", "0", "1"), None)],
)  # fmt: skip
def test_labels_that_may_be_missing_are_pointed_out(
    tmp_path: Path, labels: Sequence[str], warned: str | None
) -> None:
    rows = "".join(f"film {row},{labels[row % len(labels)]}\n" for row in range(12))
    outcome = load(write(tmp_path / "a.csv", f"text,label\n{rows}"))
    expected = f"class names that usually mean a missing label: {warned}"
    assert outcome.warnings == ([expected] if warned else [])
