"""Folders and files that hold several tables, and texts and labels in files of their own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import openpyxl
import pytest

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import LoadedData
from finetune.data.folders import digest_folder
from finetune.data.load import load_data, load_rows
from finetune.errors import DataError, SeveralTablesError
from finetune.events import Event, Info, WarningMessage, sent_to

TRAIN = [("the film", "good"), ("no end", "bad"), ("so long", "bad")]
TEST = [("a start", "good")]


def csv(rows: list[tuple[str, str]], header: str = "text,label") -> str:
    return "\n".join([header, *map(",".join, rows), ""])


def write_folder(path: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content)
    return path


def write_zip(path: Path, files: Mapping[str, str]) -> Path:
    with ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.with_suffix(".zip")


def write_workbook(path: Path, files: Mapping[str, str]) -> Path:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, content in files.items():
        sheet = book.create_sheet(Path(name).stem)
        for line in content.splitlines():
            sheet.append(line.split(","))
    book.save(path.with_suffix(".xlsx"))
    return path.with_suffix(".xlsx")


def write_json(path: Path, files: Mapping[str, str]) -> Path:
    tables = {Path(name).stem: list(map(str.split, ())) for name in files}
    for name, content in files.items():
        tables[Path(name).stem] = [line.split(",") for line in content.splitlines()]
    path.with_suffix(".json").write_text(json.dumps(tables))
    return path.with_suffix(".json")


def load(path: Path, emitted: list[Event] | None = None, **options: Any) -> LoadedData:
    with sent_to(([] if emitted is None else emitted).append):
        return load_data(DataConfig(str(path), **options))


def rows_of(loaded: LoadedData) -> dict[str, list[tuple[str, str]]]:
    names = loaded.task.class_names
    return {
        split: [(row["text"], names[row["label"]]) for row in rows]
        for split, rows in loaded.splits.items()
    }


@pytest.mark.parametrize("write", [write_folder, write_zip, write_workbook, write_json])
def test_tables_named_as_splits_are_the_splits(write: Any, tmp_path: Path) -> None:
    files = {"train.csv": csv(TRAIN), "my_test.csv": csv(TEST), "sample.csv": "id,label\n1,0\n"}
    path, emitted = write(tmp_path / "d", files), list[Event]()
    assert rows_of(load(path, emitted)) == {"train": TRAIN, "test": TEST}
    said = " ".join(event.message for event in emitted if isinstance(event, Info))
    assert "--table reads only one" in said
    loaded = load(path, table="train")
    assert rows_of(loaded) == {"train": TRAIN}
    with pytest.raises(SeveralTablesError, match="holds 3 tables"):
        load_rows(OtherData(str(path)), task=loaded.task)
    rows = load_rows(OtherData(str(path), table="my_test"), task=loaded.task)
    assert rows["text"][:] == ["a start"]


@pytest.mark.parametrize("write", [write_folder, write_zip, write_workbook, write_json])
def test_tables_of_other_names_are_asked_for(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "d", {"a.csv": csv(TRAIN), "b.csv": csv(TEST)})
    with pytest.raises(SeveralTablesError, match=r"holds 2 tables: a.*b") as raised:
        load(path)
    assert "--table" in raised.value.remedy


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("d/train-00000-of-2.csv d/train-00001-of-2.csv d/dev.csv", ["train", "validation"]),
        ("twitter_training.csv twitter_validation.csv", ["train", "validation"]),
        ("train.csv oos_train.csv test.csv", ["train", "test"]),
        ("Train.csv README.csv", ["train"]),
        ("train_a.csv train_b.csv", None),
    ],
)  # fmt: skip
def test_the_names_of_splits_are_found(
    names: str, splits: list[str] | None, tmp_path: Path
) -> None:
    path = write_zip(tmp_path / "d", dict.fromkeys(names.split(), csv(TRAIN)))
    if splits is None:
        with pytest.raises(SeveralTablesError):
            load(path)
    else:
        loaded = rows_of(load(path))
        assert set(loaded) == set(splits)
        assert len(loaded["train"]) == 3 * names.count("train-0") or 3


def test_a_test_table_without_labels_is_left_out(tmp_path: Path) -> None:
    path = write_folder(tmp_path, {"train.csv": csv(TRAIN), "test.csv": "id,text\n1,x\n2,y\n"})
    emitted = list[Event]()
    assert rows_of(load(path, emitted)) == {"train": TRAIN}
    [warning] = [event for event in emitted if isinstance(event, WarningMessage)]
    assert "no labels" in warning.message


@pytest.mark.parametrize("write", [write_folder, write_zip])
@pytest.mark.parametrize(
    "files",
    [
        {"x/train/good/1.txt": "the film", "x/train/bad/1": "no end", "x/train/urls.txt": "about"},
        {"good/train/1.txt": "the film", "bad/train/2.txt": "no end"},
        {"part-00.csv": csv(TRAIN[:1]), "part-01.csv": csv(TRAIN[1:2])},
    ],
)
def test_files_of_texts_are_read_from_folders_and_archives(
    write: Any, files: Mapping[str, str], tmp_path: Path
) -> None:
    path = write(tmp_path / "d", files)
    assert sorted(rows_of(load(path))["train"]) == sorted(TRAIN[:2])
    beside = {name.replace("train", "test"): content for name, content in files.items()}
    if not files.keys() & beside.keys() - {"README.md"}:
        rows = rows_of(load(write(tmp_path / "e", {**files, **beside})))
        assert {split: sorted(own) for split, own in rows.items()} == {
            "train": sorted(TRAIN[:2]),
            "test": sorted(TRAIN[:2]),
        }


def test_a_folder_with_one_table_is_this_table(tmp_path: Path) -> None:
    files = {"a.csv": csv(TRAIN), ".git/config": "x", "docs/notes.txt": "x", "LICENSE": "x"}
    path = write_folder(tmp_path, files)
    assert rows_of(load(path)) == {"train": TRAIN}
    before = digest_folder(path)
    (path / "a.csv").write_text(csv(TRAIN[:2]))
    assert digest_folder(path) != before


def test_tables_below_a_folder_and_tables_of_tabs_are_no_classes(tmp_path: Path) -> None:
    files = {"data/train-0.csv": csv(TRAIN), "data/test-0.csv": csv(TEST), "README.md": "x"}
    assert rows_of(load(write_folder(tmp_path / "a", files))) == {"train": TRAIN, "test": TEST}
    tabs = csv(TRAIN).replace(",", "\t")
    path = write_folder(tmp_path / "b", {"amazon.txt": tabs, "yelp.txt": tabs})
    with pytest.raises(DataError, match="no tables") as raised:
        load(path)
    assert "--table" in raised.value.remedy
    assert rows_of(load(path, table="yelp.txt")) == {"train": TRAIN}


def test_fasttext_files_named_as_splits_are_splits(tmp_path: Path) -> None:
    lines = "__label__good the film\n__label__bad no end\n"
    path = write_folder(tmp_path, {"train.txt": lines, "test.txt": lines})
    assert rows_of(load(path)) == {"train": TRAIN[:2], "test": TRAIN[:2]}


@pytest.mark.parametrize(
    ("content", "complaint", "remedy"),
    [
        (
            "a start,good\nan end,bad\n",
            "no column 'label'.*'a start', 'good'",
            "names in the first",
        ),
        ("review,stars\na start,good\n", "no column 'label'.*'review', 'stars'", "same columns"),
        ("text\na start\nan end\n", "no column 'label'.*but 'text'", "finetune predict"),
        ("text,label\na start,\nan end,\n", "has no labels: label is empty", "finetune predict"),
    ],
)
def test_what_a_test_file_lacks_is_said(
    content: str, complaint: str, remedy: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, {"a.csv": csv(TRAIN), "b.csv": content})
    with pytest.raises(DataError, match=rf"the test table .*b.csv.* {complaint}") as raised:
        load(tmp_path / "a.csv", test_file=str(tmp_path / "b.csv"))
    assert remedy in raised.value.remedy
