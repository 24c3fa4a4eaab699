"""Files of rows as tables of texts and classes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import LoadedData
from finetune.data.load import load_data, load_rows
from finetune.data.read import join_tables, read_file
from finetune.data.tables import read_tables
from finetune.errors import DataError, DataNotFoundError, UsageError
from finetune.events import Event, Info, WarningMessage, sent_to


def write(path: Path, content: str) -> Path:
    path.write_text(content, encoding="utf-8")
    return path


def read(
    train: Path,
    *,
    emitted: list[Event] | None = None,
    label: str | None = None,
    data: str = "",
    skip_unknown_labels: bool = False,
    **others: Path,
) -> DatasetDict:
    files = {split: [path] for split, path in {"train": train, **others}.items()}
    options = DataConfig(data, label_column=label, skip_unknown_labels=skip_unknown_labels)
    with sent_to(([] if emitted is None else emitted).append):
        return read_tables(files, options).splits


def rows_of(table: Dataset) -> list[tuple[str, str]]:
    names = table.features["label"].names
    return [(row["text"], names[row["label"]]) for row in table]


def warnings_in(emitted: list[Event]) -> list[str]:
    return [event.message for event in emitted if isinstance(event, WarningMessage)]


def test_splits_in_files_of_their_own_share_the_classes_of_the_training_file(
    tmp_path: Path,
) -> None:
    table = read(
        write(tmp_path / "train.csv", "text,label\na,x\nb,y\n"),
        validation=write(tmp_path / "validation.tsv", "label\ttext\ny\tc\n"),
        test=write(tmp_path / "test.jsonl", '{"text": "d", "label": "x"}\n'),
    )
    assert {split: rows_of(rows) for split, rows in table.items()} == {
        "train": [("a", "x"), ("b", "y")],
        "validation": [("c", "y")],
        "test": [("d", "x")],
    }
    assert table["test"].features == table["train"].features


@pytest.mark.parametrize("split", ["validation", "test"])
def test_labels_that_training_lacks_are_named_or_skipped(tmp_path: Path, split: str) -> None:
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    other = write(tmp_path / "other.csv", "text,label\nc,x\n,\nd,z\ne,w\nf,z\n")
    files: dict[str, Any] = {split: other}
    with pytest.raises(DataError, match=rf"of the {split} split: 'z' \(2\), 'w' \(1\)") as raised:
        read(train, **files)
    assert "'z' in line 4 of" in raised.value.message
    assert "--skip-unknown-labels" in raised.value.remedy
    none_known: dict[str, Any] = {split: write(tmp_path / "none.csv", "text,label\nc,z\n")}
    with pytest.raises(DataError, match=r"'z' \(1\)"):
        read(train, skip_unknown_labels=True, **none_known)

    emitted: list[Event] = []
    table = read(train, emitted=emitted, skip_unknown_labels=True, **files)
    assert rows_of(table[split]) == [("c", "x")]
    assert f"3 rows of the {split} split skipped: no training row has 'z' (2), 'w' (1)" in (
        warnings_in(emitted)
    )


LISTS = [["x"], ["x", "w"], [], ["w", "z"]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "names.parquet", "a.csv", "flags.csv"])
def test_several_labels_a_row_are_read_from_lists_words_and_flags(
    tmp_path: Path, name: str
) -> None:
    path, texts = tmp_path / name, list("abcd")
    if name == "names.parquet":
        features = Features({"text": Value("string"), "label": List(ClassLabel(names=[*"xwz"]))})
        content = {"text": texts, "label": [["xwz".index(one) for one in own] for own in LISTS]}
        Dataset.from_dict(content, features=features).to_parquet(path)
    elif name == "flags.csv":
        rows = [
            (text, *(int(one in own) for one in "xwz"))
            for text, own in zip(texts, LISTS, strict=True)
        ]
        pandas.DataFrame(rows, columns=["text", "x", "w", "z"]).to_csv(path, index=False)
    else:
        lists = ["|".join(own) or "[]" for own in LISTS] if name == "a.csv" else LISTS
        frame = pandas.DataFrame({"text": texts, "label": lists})
        if path.suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            getattr(frame, f"to_{path.suffix[1:]}")(path)
    emitted: list[Event] = []
    rows = read(path, emitted=emitted)["train"]
    messages = " ".join(event.message for event in emitted if isinstance(event, Info))
    assert ("a column for each class" in messages) == (name == "flags.csv")
    names = rows.features["label"].feature.names
    assert [[names[one] for one in own] for own in rows["label"]] == LISTS
    assert sorted(names) == sorted("xwz")


def test_rows_without_text_or_label_are_left_out_and_counted(tmp_path: Path) -> None:
    emitted: list[Event] = []
    content = 'text,label\na,x\n"over\ntwo lines",y\n" ",x\nc,\nd,y\n'
    table = read(write(tmp_path / "rows.csv", content), emitted=emitted)
    assert rows_of(table["train"]) == [("a", "x"), ("over\ntwo lines", "y"), ("d", "y")]
    [message] = warnings_in(emitted)
    assert message.startswith("2 of 5 rows skipped")
    assert f"line 5 of {tmp_path / 'rows.csv'}" in message


@pytest.mark.parametrize("content", ["text\nc\n", "text,label\nc,\n"])
def test_a_split_without_labels_is_left_out_only_where_that_is_allowed(
    tmp_path: Path, content: str
) -> None:
    train = write(tmp_path / "train.csv", "text,label\na,x\nb,y\n")
    test = write(tmp_path / "test.csv", content)
    emitted: list[Event] = []
    assert list(read(train, test=test, data="hub:acme/rows", emitted=emitted)) == ["train"]
    assert "test split has no labels" in warnings_in(emitted)[0]
    with pytest.raises(DataError, match=r"test\.csv"):
        read(train, test=test)


ROWS = "text,split,label\na 1,train,x\nb 2,Dev,y\nc 3,test,x\nd 4,train,y\n"


def load(path: Path, emitted: list[Event] | None = None, **options: str) -> LoadedData:
    given = DataConfig(str(path), **options)  # type: ignore[arg-type]
    with sent_to(([] if emitted is None else emitted).append):
        return load_data(given)


def test_a_column_of_splits_is_found_named_or_ignored(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", ROWS)
    emitted: list[Event] = []
    found = load(table, emitted).splits
    assert {split: rows["text"][:] for split, rows in found.items()} == {
        "train": ["a 1", "d 4"], "validation": ["b 2"], "test": ["c 3"],
    }  # fmt: skip
    assert any("'split'" in one.message for one in emitted if isinstance(one, Info))
    whole = load(table, split_column="none")
    assert whole.splits["train"].num_rows == 4
    options = OtherData(str(table))
    assert load_rows(options, task=whole.task).num_rows == 4
    other = write(tmp_path / "other.csv", ROWS.replace("split", "use").replace("test", "Testing"))
    assert len(load(other, split_column="use").splits) == 3
    odd = write(tmp_path / "odd.csv", ROWS.replace("Dev", "b"))
    with pytest.raises(UsageError, match=r"'split' of .*: 'b', 'test', 'train'"):
        load(odd)


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


def test_a_column_that_says_no_splits_is_refused(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", ROWS)
    with pytest.raises(DataError, match=r"'label' of .* does not name the split"):
        load(table, split_column="label")
    with pytest.raises(DataNotFoundError, match="no column 'use'"):
        load(table, split_column="use")
    with pytest.raises(UsageError, match="one file"):
        load(table, split_column="split", test_file=str(write(tmp_path / "test.csv", ROWS)))


@pytest.mark.parametrize(
    ("labels", "named"),
    [(["0", "2", "1"], "a c b"), (["1", "3", "2"], "a c b"), (["0.0", "1", "-1"], "a b")],
)
def test_numbers_have_the_names_of_their_lines(
    labels: list[str], named: str, tmp_path: Path
) -> None:
    names = write(tmp_path / "names.txt", "a\nb\n\nc\n")
    rows = "".join(f"a text {number},{label}\n" for number, label in enumerate(labels))
    loaded = load(write(tmp_path / "rows.csv", "text,label\n" + rows), label_names=str(names))
    assert loaded.task.class_names == ["a", "b", "c"]
    found = [loaded.task.class_names[row["label"]] for row in loaded.splits["train"]]
    assert found == named.split()


@pytest.mark.parametrize(
    ("labels", "names", "complaint"),
    [
        ("0 3", "a b", "'3' is not the number"),
        ("0 x", "a b", "'x' is not"),
        ("0 1", "a a", "twice"),
    ],
)
def test_numbers_without_a_name_are_refused(
    labels: str, names: str, complaint: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "names.txt", names.replace(" ", "\n"))
    rows = "".join(f"a text {label},{label}\n" for label in labels.split())
    with pytest.raises(DataError, match=complaint):
        load(write(tmp_path / "rows.csv", "text,label\n" + rows), label_names=str(file))


@pytest.mark.parametrize("named", [True, False])
def test_a_header_that_is_repeated_is_no_row(tmp_path: Path, named: bool) -> None:
    rows = "".join(f"film {number} was long,{'ab'[number % 2]}\n" for number in range(9))
    table = write(tmp_path / "a.csv", f"said,mood\n{rows}said,mood\n{rows}")
    emitted: list[Event] = []
    options = DataConfig("", header=True if named else None)
    with sent_to(emitted.append):
        splits = read_tables({"train": [table]}, options).splits
    assert len(splits["train"]) == 18
    assert splits["train"].features["label"].names == ["a", "b"]
    notes = [event.message for event in emitted if isinstance(event, Info)]
    assert f"1 rows left out that repeat the header, the first in line 11 of {table}" in notes


@pytest.mark.parametrize(
    ("labels", "warned"),
    [(("yes", "no", "?"), "'?'"), (("a", "Unknown", "-"), "'-', 'Unknown'"),
     (("0", "1", "2", "-1"), "'-1'"), (("-1", "0", "1"), None)],
)  # fmt: skip
def test_labels_that_may_be_missing_are_pointed_out(
    tmp_path: Path, labels: Sequence[str], warned: str | None
) -> None:
    rows = "".join(f"film {row},{labels[row % len(labels)]}\n" for row in range(12))
    emitted: list[Event] = []
    read(write(tmp_path / "a.csv", f"text,label\n{rows}"), emitted=emitted)
    found = f"classes named as a missing label: {warned}"
    assert warnings_in(emitted) == ([found] if warned else [])
