"""Folders, archives and files with several tables, and class folders with text files."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Mapping
from csv import DictReader
from pathlib import Path
from typing import Any

import data_files
import pyarrow
import pytest
from data_files import load, write_folder, write_zip
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.folders import digest_folder
from finetune.data.load import load_rows
from finetune.data.read import read_file
from finetune.data.stream import read_texts
from finetune.errors import DataError, DataUnreadableError, SeveralTablesError
from finetune.tasks.single import Single

TRAIN = [("the film", "good"), ("no end", "bad"), ("so long", "bad")]
TEST = [("a start", "good")]


def csv(rows: list[tuple[str, str]], header: str = "text,label") -> str:
    return "\n".join([header, *map(",".join, rows), ""])


def write_workbook(path: Path, files: Mapping[str, str]) -> Path:
    rows = {name: [line.split(",") for line in files[name].splitlines()] for name in files}
    return data_files.write_workbook(path, rows)


def write_json(path: Path, files: Mapping[str, str]) -> Path:
    tables = {
        Path(name).stem: [*DictReader(content.splitlines())] for name, content in files.items()
    }
    path.with_suffix(".json").write_text(json.dumps(tables))
    return path.with_suffix(".json")


@pytest.mark.parametrize("write", [write_folder, write_zip, write_workbook, write_json])
def test_tables_with_split_names_become_splits(write: Any, tmp_path: Path) -> None:
    files = {"train.csv": csv(TRAIN), "my_test.csv": csv(TEST), "sample.csv": "id,label\n1,0\n"}
    path = write(tmp_path / "d", files)
    outcome = load(path)
    assert outcome.rows == {"train": TRAIN, "test": TEST}
    assert "--table reads only one" in outcome.messages
    assert [warning.rpartition(": ")[2].split(".")[0] for warning in outcome.warnings] == ["sample"]
    chosen = load(path, table="train")
    assert chosen.rows == {"train": TRAIN}
    with pytest.raises(SeveralTablesError, match="holds 3 tables"):
        load_rows(OtherData(str(path)), task=chosen.loaded.task)
    rows = load_rows(OtherData(str(path), table="my_test"), task=chosen.loaded.task)
    assert rows["text"].to_pylist() == ["a start"]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("d/train-00000-of-2.csv d/train-00001-of-2.csv d/dev.csv", {"train", "validation"}),
        ("twitter_training.csv twitter_validation.csv", {"train", "validation"}),
        ("train.csv oos_train.csv test.csv", {"train", "test"}),
        ("Train.csv README.csv", {"train"}),
        ("part-00.csv part-01.csv", {"train"}),
    ],
)
def test_split_names_in_file_names_are_recognized(
    names: str, splits: set[str], tmp_path: Path
) -> None:
    rows = load(write_zip(tmp_path / "d", dict.fromkeys(names.split(), csv(TRAIN)))).rows
    assert set(rows) == splits
    assert len(rows["train"]) == (6 if "0" in names else 3)


@pytest.mark.parametrize("write", [write_folder, write_zip])
@pytest.mark.parametrize(
    "files",
    [
        {"x/train/good/1.txt": "the film", "x/train/bad/1": "no end", "x/train/urls.txt": "about"},
        {"good/train/1.txt": "the film", "bad/train/2.txt": "no end"},
        {"20news-train/good/3": "the film", "20news-train/bad/4": "no end"},
        {"./train/good/3.txt": "the film", "./train/bad/4.txt": "no end"},
    ],
)
def test_texts_are_read_from_class_folders(
    write: Any, files: Mapping[str, str], tmp_path: Path
) -> None:
    assert sorted(load(write(tmp_path / "d", files)).rows["train"]) == sorted(TRAIN[:2])
    both = {**files, **{name.replace("train", "test"): text for name, text in files.items()}}
    rows = load(write(tmp_path / "e", both)).rows
    assert sorted(rows["test"]) == sorted(rows["train"]) == sorted(TRAIN[:2])


@pytest.mark.parametrize("write", [write_folder, write_zip])
@pytest.mark.parametrize(
    ("files", "ignored"),
    [
        ("old/train.csv train.csv test.csv", "old/train.csv"),
        ("a/x.csv b/y.csv table.csv", "a/x.csv, b/y.csv"),
        ("train.csv dev.csv holdout.csv oos_train.csv README.csv", "holdout.csv, oos_train.csv"),
        ("pos/1.txt neg/2.txt index.csv", "index.csv"),
    ],
)
def test_ignored_tables_are_listed(write: Any, files: str, ignored: str, tmp_path: Path) -> None:
    other = csv([("other", "x"), ("text", "y")])
    unread = ignored.split(", ")
    contents = {name: other if name in unread else csv(TRAIN) for name in files.split()}
    path = write(tmp_path / "d", contents)
    outcome = load(path)
    assert outcome.warnings == [f"these tables of {path} are ignored: {ignored}"]
    assert "other" not in str(outcome.rows)


def test_other_files_are_not_classes(tmp_path: Path) -> None:
    texts = {"train/neg/1_1.txt": "dull", "train/pos/0_9.txt": "great\nfun", "train/unsup/1": "?"}
    others = {"test/pos/7.txt": "schön", "test/neg/.hidden": "x", "train/neg/note.html": "<p>"}
    root = write_folder(tmp_path, {**texts, **others, "README": "about", "train/urls.txt": "x"})
    outcome = load(root)
    train = [("dull", "neg"), ("great\nfun", "pos")]
    assert outcome.rows == {"train": train, "test": [("schön", "pos")]}
    assert "2 texts in 2 folders, encoding" in outcome.messages
    assert load(root / "train").rows == {"train": train}
    with pytest.raises(DataError, match="several splits: test, train"):
        load_rows(OtherData(str(root)), task=Single(["neg", "pos"]))


def test_file_in_a_different_encoding_is_reported(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a/1": "schön", "b/1": "schön\ngrün"})
    (root / "b/2").write_bytes("one\nschön".encode("cp1252"))
    with pytest.raises(DataUnreadableError, match=r"line 2 of .*b/2 is not UTF-8"):
        load(root)


def test_changed_file_changes_the_folder_digest(tmp_path: Path) -> None:
    for name, files in {"t": {"a.csv": csv(TRAIN)}, "c": {"a/1": "x", "b/1": "y"}}.items():
        folder = write_folder(tmp_path / name, files)
        before = digest_folder(folder)
        (folder / next(iter(files))).write_text("other")
        assert digest_folder(folder) != before


def test_tab_separated_txt_files_are_not_class_folders(tmp_path: Path) -> None:
    tabs = csv(TRAIN).replace(",", "\t")
    path = write_folder(tmp_path / "b", {"amazon.txt": tabs, "yelp.txt": tabs})
    with pytest.raises(DataError, match=r"no tables, and no \.txt files in folders") as raised:
        load(path)
    assert "--table" in raised.value.remedy
    assert load(path, table="yelp.txt").rows == {"train": TRAIN}


def test_dataset_saved_to_disk_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    train = Dataset.from_dict({"text": ["one", "two"], "label": ["a", "b"]})
    DatasetDict(train=train, test=train).save_to_disk(tmp_path / "saved")
    for saved in (tmp_path / "saved", tmp_path / "saved/train"):
        with pytest.raises(DataUnreadableError, match="the datasets library saved") as raised:
            load(saved)
        assert f"datasets.load_from_disk('{saved.name}')" in raised.value.remedy


@pytest.mark.parametrize(
    ("content", "complaint", "remedy"),
    [
        ("a start,good\nan end,bad\n", "no column 'label'.*'a start', 'good'", "first row"),
        ("review,stars\na start,good\n", "no column 'label'.*'review', 'stars'", "same columns"),
        ("text\na start\nan end\n", "no column 'label'.*but 'text'", "finetune predict"),
        ("text,label\na start,\nan end,\n", "has no labels: label is empty", "finetune predict"),
    ],
)
def test_test_file_without_labels_is_rejected(
    content: str, complaint: str, remedy: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, {"a.csv": csv(TRAIN), "b.csv": content})
    with pytest.raises(DataError, match=rf"the test table .*b.csv.* {complaint}") as raised:
        load(tmp_path / "a.csv", test_file=str(tmp_path / "b.csv"))
    assert remedy in raised.value.remedy
    (tmp_path / "a.csv").rename(tmp_path / "train.csv")
    (tmp_path / "b.csv").rename(tmp_path / "test.csv")
    if "empty" in complaint:  # published without labels
        assert load(tmp_path).rows == {"train": TRAIN}


CSV = b"text,label\nthe film,good\nthe end,bad\n"
COLUMNS = {"text": ["the film", "the end"], "label": ["good", "bad"]}
LINES = b'{"text": "the film", "label": "good"}\n{"text": "the end", "label": "bad"}\n'


def read(path: Path) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = read_file(path, DataConfig(str(path))).columns.to_pydict()
    return columns


def test_compressed_table_equals_the_original(tmp_path: Path) -> None:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(COLUMNS), file)
    for name, content in {"a.csv": CSV, "a.jsonl": LINES, "a.parquet": file.getvalue()}.items():
        for suffix, module in {"gz": gzip, "bz2": bz2, "xz": lzma}.items():
            path = tmp_path / f"{name}.{suffix}"
            path.write_bytes(module.compress(content))
            assert read(path) == COLUMNS
    path = write_zip(tmp_path / "a", {"data/rows.csv": CSV, "a.md": "#", "__MACOSX/rows.csv": b""})
    assert read(path) == COLUMNS
    assert read_file(path, DataConfig()).place(3) == f"line 3 of {path}/data/rows.csv"
    assert read(write_zip(tmp_path / "b", {"./rows.csv": CSV})) == COLUMNS
    assert read(write_zip(tmp_path / "sms", {"SMSCollection": CSV, "readme": b"x"})) == COLUMNS
    [texts] = read_texts(path, DataConfig(str(path)), as_lines=False)
    assert texts[:].texts == COLUMNS["text"]
    assert [row["label"] for row in texts.records()] == COLUMNS["label"]


def test_damaged_archive_is_rejected(tmp_path: Path) -> None:
    two = write_zip(tmp_path / "two", {"a.csv": CSV, "b.csv": CSV}).read_bytes()
    for start in (gzip.compress(CSV)[:-9], gzip.compress(CSV)[:3], two[:-30]):
        (tmp_path / "cut.csv").write_bytes(start)
        with pytest.raises(DataUnreadableError, match="can't be unpacked"):
            read(tmp_path / "cut.csv")
