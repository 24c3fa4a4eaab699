"""Tables in the shapes in which people publish them: the same rows come out of all."""

import gzip
import io
import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import pandas
import pytest

from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.data.read import RawTable, read_file
from finetune.errors import DataError

ROWS = [("the film", "good"), ("no end", "bad"), ("it said \"no\", and 'yes'", "good")]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]
FRAME = pandas.DataFrame(OBJECTS)
BY_LABEL = {"good": ["the film", "it said \"no\", and 'yes'"], "bad": ["no end"]}
FASTTEXT = "".join(f"__label__{label} {text}\n" for text, label in ROWS)


def read(path: Path, **options: Any) -> RawTable:
    return read_file(path, DataConfig(str(path), **options))


def rows_of(table: RawTable) -> list[tuple[str, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns.columns), strict=True))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("array.json", json.dumps(OBJECTS)),
        ("array.jsonl", json.dumps(OBJECTS)),
        ("array.txt", json.dumps(OBJECTS, indent=1)),
        ("lines.json", "\n".join(map(json.dumps, OBJECTS))),
        ("pretty.jsonl", "\n".join(json.dumps(one, indent=2) for one in OBJECTS)),
        ("one line.json", " ".join(map(json.dumps, OBJECTS))),
        ("one line.jsonl", "".join(map(json.dumps, OBJECTS))),
        ("commas.jsonl", ",\n".join(map(json.dumps, OBJECTS))),
        ("mark.jsonl", "\ufeff" + "\n".join(map(json.dumps, OBJECTS))),
        ("lines of arrays.jsonl", "\n".join(map(json.dumps, [["text", "label"], *ROWS]))),
        ("values.json", FRAME.to_json(orient="values")),
        ("records.json", FRAME.to_json(orient="records")),
        ("commas.json", ",\n".join(map(json.dumps, OBJECTS))),
        ("arrays.json", json.dumps([["text", "label"], *ROWS])),
        ("under a key.json", json.dumps({"version": 1, "title": "x", "data": OBJECTS})),
        ("arrays under a key.json", json.dumps({"rows": [["text", "label"], *ROWS], "n": [1]})),
        ("columns.json", FRAME.to_json(orient="columns")),
        ("index.json", FRAME.to_json(orient="index")),
        ("split.json", FRAME.to_json(orient="split")),
        ("table.json", FRAME.to_json(orient="table", index=False)),
        ("lists.json", json.dumps(FRAME.to_dict(orient="list"))),
        ("labels.json", json.dumps(BY_LABEL)),
        ("train.txt", FASTTEXT),
        ("behind.txt", "".join(f"{text} __LABEL__{label}\n" for text, label in ROWS)),
        ("lines.csv", "\n".join(map(json.dumps, OBJECTS))),
        ("array.csv", json.dumps(OBJECTS)),
        ("behind.ft", "".join(f"{text} __label__{label}\n" for text, label in ROWS)),
    ],
)
def test_every_shape_gives_the_rows(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    table = read(tmp_path / name)
    found = {frozenset(row) for row in rows_of(table)}
    assert found == {frozenset(row) for row in ROWS}
    assert len(table.columns) == len(ROWS)
    assert str(tmp_path / name) in table.place(1)


def test_several_labels_of_a_line_are_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("__label__a, __label__b one __label__\n\n__label__a two\n")
    assert rows_of(read(tmp_path / "a.txt")) == [("one __label__", '["a", "b"]'), ("two", '["a"]')]


def packed(**members: str) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(ZipInfo(name.replace("__", ".")), content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "complaint", "remedy"),
    [
        ("a.csv", b"\n<!DOCTYPE html><html>", "an HTML page", "download"),
        ("a.csv", b"<?xml version='1.0'?><Error>", "XML", "download"),
        ("a.csv", b"<!-- saved -->\n<html>", "an HTML page", "download"),
        ("a.jsonl", b'{"error": "Invalid"}', "server's error message", "download"),
        ("a.csv", b"404: Not Found", "server's error message", "download"),
        ("a.csv", b'{"error": "Repository not found"}', "server's error message", "download"),
        ("a.json", b'{"message": "No", "status": 404}', "server's error message", "download"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS", "git lfs pull"),
        ("a.csv", b"| text | label |\n|:---|---:|\n| a | b |\n", "in Markdown", "save the table"),
        ("a.md", b"# Data\n\ntext | label\n--- | ---\na | b\n", "in Markdown", "save the table"),
        ("a.csv", b"+---+---+\n| a | b |\n+---+---+\n", "bars and", "save the table"),
        ("a.txt", b"A film, dull\nWell\nNo, and no, and no\n" * 9, "one text per line", "labels"),
        ("a.txt", b"A film\nWell\nNo end\n" * 9, "one text per line", "finetune predict"),
        ("a.csv", b"text\nA film\nWell\nNo end\n", "has one column, 'text'", "finetune predict"),
        ("a.jsonl", b'{"text": "A film", "x": {}}\n' * 9, "has one column, 'text'", "objects"),
        ("a.jsonl", b'{"x": {"y": 1}}\n' * 9, "has no columns of text", "objects"),
        ("a.json", b'["A film", "Well", "No end"]', "has one column, 'text'", "finetune predict"),
        ("a.csv", b"Access Denied\n", "server's error message", "download"),
        ("a.yml", b"a: [b]", "is YAML", "JSON Lines"),
        ("a.arff", b"% x\n@RELATION a\n", "ARFF file of Weka", "as .csv"),
        ("a.png", b"\x89PNG\r\n", "a picture", "save the table"),
        ("a.csv", b"a.csv".ljust(257, b"\0") + b"ustar\0", "tar archive", "unpack it"),
        ("a.pdf", b"%PDF-1.4", "a PDF", "save the table"),
        ("a.csv", b"", "is empty", "download"),
        ("a.zip", packed(), "holds no files", "pack it again"),
        ("a.zip", packed(a__csv="x,y\n")[:40], "can't be unpacked", "download it again"),
        ("a.csv.gz", gzip.compress(b"", mtime=0), "is empty", "again"),
        ("a.zip", packed(a__csv="x,y\n", b__csv="x,y\n"), "2 tables: a.csv, b.csv", "--table"),
        ("a.json", b'{"a": [{"x": "1"}], "b": [{"x": "1"}]}', "2 tables: a, b", "--table"),
        ("a.json", b'{"a": {"b": 1}}', "holds no rows", "list of objects"),
        ("a.json", b'[{"text": "a"},\n{"text": }]', "Expecting value: line 2 column 10", "correct"),
        ("a.json", b'[["a", "b"], ["c"]]', "several lengths", "list of objects"),
        ("a.json", b"[" * 100_000, "can't be read", "correct"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_named_for_what_it_is(
    name: str, content: bytes, complaint: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint) as raised:
        load_data(DataConfig(str(tmp_path / name)))
    assert remedy in raised.value.remedy
    assert name.partition(".")[0] in raised.value.message


def test_a_member_is_chosen_by_its_name(tmp_path: Path) -> None:
    table = "text,label\nthe film,good\n"
    (tmp_path / "a.zip").write_bytes(packed(**{"in/x__csv": table, "in/y__csv": "a,b\nc,d\n"}))
    for member in ("in/x.csv", "x.csv", "x"):
        assert rows_of(read(tmp_path / "a.zip", table=member)) == ROWS[:1]
    (tmp_path / "a.json").write_text(json.dumps({"a": OBJECTS, "b": {"c": OBJECTS[:1]}}))
    assert rows_of(read(tmp_path / "a.json", table="b.c")) == ROWS[:1]
    (tmp_path / "a.csv").write_text(table)
    for name in ("a.zip", "a.json", "a.csv"):
        with pytest.raises(DataError) as raised:
            read(tmp_path / name, table="z")
        assert "--table" in raised.value.remedy
