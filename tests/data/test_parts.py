"""A column of splits, and the names of numbered classes in a file."""

from pathlib import Path

import pytest

from finetune.data.load import load_data, load_rows
from finetune.data.source import DataOptions, LoadedData
from finetune.data.tables import read_tables
from finetune.errors import DataError, DataNotFound, UsageError
from finetune.events import Event, Info, WarningMessage, ignore

ROWS = "text,split,label\na 1,train,x\nb 2,Dev,y\nc 3,test,x\nd 4,train,y\n"


def load(path: Path, emitted: list[Event] | None = None, **options: str) -> LoadedData:
    given = DataOptions(str(path), "label-coarse", **options)  # type: ignore[arg-type]
    return load_data(given, emit=([] if emitted is None else emitted).append)


def write(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


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
    options = DataOptions(str(table), "label-coarse")
    assert load_rows(options, task=whole.task, emit=ignore).num_rows == 4
    other = write(tmp_path / "other.csv", ROWS.replace("split", "use").replace("test", "Testing"))
    assert len(load(other, split_column="use").splits) == 3
    odd = write(tmp_path / "odd.csv", ROWS.replace("Dev", "b"))
    assert len(load(odd, emitted).splits) == 1
    [warning] = [one.message for one in emitted if isinstance(one, WarningMessage)]
    assert "column 'split' of" in warning
    assert "'b', 'test', 'train'" in warning


def test_each_file_of_a_split_is_divided(tmp_path: Path) -> None:
    parts = [
        write(tmp_path / f"{n}.csv", ROWS.replace("a 1", f"a {n}").replace("Dev", word))
        for n, word in enumerate(("train", "dev"))
    ]
    found = read_tables({"train": parts}, DataOptions("", ""), emit=ignore).splits
    assert found["train"]["text"][:] == ["a 0", "b 2", "d 4", "a 1", "d 4"]
    assert found["validation"]["text"][:] == ["b 2"]
    assert found["test"].num_rows == 2


def test_a_column_that_says_no_splits_is_refused(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", ROWS)
    with pytest.raises(DataError, match=r"'label' of .* does not name the split"):
        load(table, split_column="label")
    with pytest.raises(DataNotFound, match="no column 'use'"):
        load(table, split_column="use")
    with pytest.raises(UsageError, match="one file"):
        load(table, split_column="split", test_file=str(write(tmp_path / "test.csv", ROWS)))


def test_the_place_of_a_row_is_its_line_in_the_file(tmp_path: Path) -> None:
    table = write(tmp_path / "rows.csv", ROWS.replace("b 2,Dev,y", "b 2,Dev,z"))
    with pytest.raises(DataError, match="line 3 of"):
        load(table)


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
    [("0 3", "a b", "'3' is no"), ("0 x", "a b", "'x' is no"), ("0 1", "a a", "twice")],
)
def test_numbers_without_a_name_are_refused(
    labels: str, names: str, complaint: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "names.txt", names.replace(" ", "\n"))
    rows = "".join(f"a text {label},{label}\n" for label in labels.split())
    with pytest.raises(DataError, match=complaint):
        load(write(tmp_path / "rows.csv", "text,label\n" + rows), label_names=str(file))
