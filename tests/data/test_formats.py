"""All file formats and labeling-tool exports. Other files are rejected with their format."""

import gzip
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas
import pyarrow
import pytest
from data_files import load, messages, write_zip
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.in_memory import write_table
from finetune.data.labeling_tools import convert
from finetune.data.read import RawTable, read_file
from finetune.data.stream import read_texts
from finetune.data.values import as_text
from finetune.errors import DataError, DataUnreadableError
from finetune.tasks.labels import split_labels


def read(path: Path, **options: Any) -> RawTable:
    return read_file(path, DataConfig(str(path), **options))


def columns_of(table: RawTable) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = table.columns.to_pydict()
    return columns


def read_lines(folder: Path, *lines: object) -> RawTable:
    """Write lines, as JSON unless they are strings, and read them."""
    path = folder / "rows.jsonl"
    written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(written), encoding="utf-8")
    return read(path)


def test_json_lines_become_text_columns(tmp_path: Path) -> None:
    table = read_lines(
        tmp_path,
        {"text": "null", "label": 1, "tags": ["a"]},
        "",
        {"text": "line\nend\u2028😀", "label": 2.0, "more": True},
        {"text": None, "label": 2.5, "tags": []},
    )
    assert columns_of(table) == {
        "text": ["null", "line\nend\u2028😀", ""],
        "label": ["1", "2", "2.5"],
        "tags": ['["a"]', "", "[]"],
        "more": ["", "true", ""],
    }
    assert table.numbers.tolist() == [1, 3, 4]


def test_lone_surrogate_becomes_a_replacement_character(tmp_path: Path) -> None:
    table = read_lines(tmp_path, r'{"text": "cut \ud83d", "label": "\ud83d\ude00"}')
    assert columns_of(table)["text"] == ["cut �"]
    assert columns_of(table)["label"] == ["😀"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a", "label": }', "Expecting value: line 2 column 24"),
        ('["a", "b"]', "a list of objects"),
    ],
)
def test_json_line_that_is_not_an_object_is_rejected(
    tmp_path: Path, line: str, complaint: str
) -> None:
    with pytest.raises(DataUnreadableError, match=complaint) as raised:
        read_lines(tmp_path, {"text": "good", "label": "a"}, line)
    assert raised.value.remedy


def test_parquet_written_by_datasets_keeps_its_class_names(tmp_path: Path) -> None:
    features = Features(
        {
            "text": Value("large_string"),
            "label": ClassLabel(names=["zebra", "ant"]),
            "scores": Sequence(Value("float32")),
        }
    )
    path = tmp_path / "rows.parquet"
    content = {"text": ["a", "b", "c"], "label": [1, 0, -1], "scores": [[1.0], [], []]}
    Dataset.from_dict(content, features=features).to_parquet(path)
    table = read(path)
    assert columns_of(table) == {"text": ["a", "b", "c"], "label": ["ant", "zebra", ""]}
    assert table.class_names == {"label": ["zebra", "ant"]}
    assert table.place(3) == f"row 3 of {path}"


def test_lists_of_class_numbers_become_lists_of_names(tmp_path: Path) -> None:
    own = {"feature": {"_type": "ClassLabel", "names": ['"x"', "y"]}, "_type": "List"}
    names = {"info": {"features": {"label": own}}}
    table = pyarrow.table({"label": [[1, 0], None, [], [-1]]})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(names)}), tmp_path / "a.parquet"
    )
    assert columns_of(read(tmp_path / "a.parquet")) == {
        "label": ['["y", "\\"x\\""]', "", "[]", '[""]']
    }


@pytest.mark.parametrize(
    "metadata", ["{}", "[]", "3", "not JSON", '{"info": {"features": {"a": {"_type": "Unheard"}}}}']
)
def test_unrelated_metadata_is_ignored(tmp_path: Path, metadata: str) -> None:
    table = pyarrow.table({"label": [1, 0]}).replace_schema_metadata({"huggingface": metadata})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert columns_of(read(tmp_path / "a.parquet")) == {"label": ["1", "0"]}


def test_ignored_columns_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "tags": [0.5], "more": {"y": 1}}\n')
    parquet.write_table(pyarrow.table({"text": ["a"], "tags": [[0.5]]}), tmp_path / "b.parquet")
    with messages() as said:
        for name in ("a.jsonl", "b.parquet"):
            read_file(tmp_path / name, DataConfig())
    reports = [message for message in said if "ignoring columns" in message]
    assert len(reports) == 2
    assert all("'tags'" in report for report in reports)
    assert "'more'" in reports[0]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["2024-05-01", "2024-05-01T10:00:00", "1", "null", "true", "NaN", ""]
)
INTEGERS = st.integers(-(2**62), 2**62)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def three_of(*kinds: Any) -> Any:
    return st.lists(st.one_of(st.none(), *kinds), min_size=3, max_size=3)


VALUES = (
    three_of(TEXTS)
    | three_of(INTEGERS)
    | three_of(st.integers(), FLOATS)
    | three_of(st.lists(TEXTS, max_size=2))
    | three_of(st.lists(INTEGERS, max_size=2))
    | three_of(st.booleans(), TEXTS, st.integers())
)


@settings(max_examples=80)
@given(columns=st.dictionaries(st.sampled_from(["text", "label", "é"]), VALUES, min_size=1))
def test_columns_and_rows_are_converted_to_equal_values(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]]
) -> None:
    expected = {name: [as_text(value) for value in values] for name, values in columns.items()}
    path = tmp_path_factory.mktemp("tables") / "rows.jsonl"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert columns_of(read(path)) == expected
    with suppress(pyarrow.ArrowException, OverflowError):  # mixed types
        parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"))
        assert columns_of(read(path.with_suffix(".parquet"))) == expected


ROWS = [("the film", "good"), ("no end", "bad"), ("it said \"no\", and 'yes'", "good")]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]
FRAME = pandas.DataFrame(OBJECTS)
BY_LABEL = {"good": ["the film", "it said \"no\", and 'yes'"], "bad": ["no end"]}
FASTTEXT = "".join(f"__label__{label} {text}\n" for text, label in ROWS)


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
        ("records.json", FRAME.to_json(orient="records")),
        ("commas.json", ",\n".join(map(json.dumps, OBJECTS))),
        ("under a key.json", json.dumps({"version": 1, "title": "x", "data": OBJECTS})),
        ("lists.json", json.dumps(FRAME.to_dict(orient="list"))),
        ("labels.json", json.dumps(BY_LABEL)),
        ("train.txt", FASTTEXT),
        ("behind.txt", "".join(f"{text} __LABEL__{label}\n" for text, label in ROWS)),
        ("lines.csv", "\n".join(map(json.dumps, OBJECTS))),
        ("array.csv", json.dumps(OBJECTS)),
        ("behind.ft", "".join(f"{text} __label__{label}\n" for text, label in ROWS)),
    ],
)
def test_each_json_and_fasttext_layout_gives_the_same_rows(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    table = read(tmp_path / name)
    found = {frozenset(row) for row in rows_of(table)}
    assert found == {frozenset(row) for row in ROWS}
    assert len(table.columns) == len(ROWS)
    assert str(tmp_path / name) in table.place(1)


def test_several_fasttext_labels_become_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("__label__a, __label__b one __label__\n\n__label__a two\n")
    assert rows_of(read(tmp_path / "a.txt")) == [("one __label__", '["a", "b"]'), ("two", '["a"]')]


def packed(*names: str, **contents: str) -> bytes:
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, contents.get(name, "x"))
    return file.getvalue()


OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


@pytest.mark.parametrize(
    ("name", "content", "complaint", "remedy"),
    [
        ("a.csv", b"\n<!DOCTYPE html><html>", "an HTML page", "download"),
        ("a.csv", b"<?xml version='1.0'?><Error>", "XML", "download"),
        ("a.jsonl", b'{"error": "Invalid"}', "server's error message", "download"),
        ("a.csv", b"404: Not Found", "server's error message", "download"),
        ("a.json", b'{"message": "No", "status": 404}', "server's error message", "download"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS", "git lfs pull"),
        ("a.csv", b"| text | label |\n|:---|---:|\n| a | b |\n", "in Markdown", "save the table"),
        ("a.csv", b"+---+---+\n| a | b |\n+---+---+\n", "bars and", "save the table"),
        ("a.txt", b"A film\nWell\nNo end\n" * 9, "one text per line", "finetune label"),
        ("a.csv", b"id,text\n1,A film\n2,No end\n", "looks like labels", "finetune label"),
        ("a.csv", b"text\nA film\nWell\nNo end\n", "has one column, 'text'", "finetune label"),
        ("a.jsonl", b'{"text": "A film", "x": {}}\n' * 9, "has one column, 'text'", "add a column"),
        ("a.jsonl", b'{"x": {"y": 1}}\n' * 9, "has no text columns", "add a column"),
        ("a.json", b'["A film", "Well", "No end"]', "has one column, 'text'", "finetune predict"),
        ("a.csv", b"Access Denied\n", "server's error message", "download"),
        ("a.yml", b"a: [b]", "is YAML", "JSON Lines"),
        ("a.arff", b"% x\n@RELATION a\n", "ARFF file of Weka", "as .csv"),
        ("a.png", b"\x89PNG\r\n", "a picture", "save the table"),
        ("a.csv", b"a.csv".ljust(257, b"\0") + b"ustar\0", "tar archive", "unpack it"),
        ("a.pdf", b"%PDF-1.4", "a PDF", "save the table"),
        ("a.csv", b"", "is empty", "download"),
        ("a.zip", b"PK\x05\x06" + bytes(18), "contains no files", "pack it again"),
        ("a.csv.gz", gzip.compress(b"", mtime=0), "is empty", "again"),
        ("a.json", b'{"a": [{"x": "1"}], "b": [{"x": "1"}]}', "2 tables: a, b", "--table"),
        ("a.json", b'{"a": {"b": 1}}', "contain a list of objects", "write a list of objects"),
        ("a.json", b'[{"text": "a"},\n{"text": }]', "Expecting value: line 2 column 10", "fix it"),
        ("a.json", b'{"rows": [["text", "label"], ["a", "b"]]}', "a list of", "write a list"),
        *(
            ("a.json", FRAME.to_json(orient=orient).encode(), "a list of", 'orient="records"')
            for orient in ("split", "index", "columns", "values", "table")
        ),
        ("a.json", b"[" * 100_000, "can't be read", "fix it"),
        ("a.numbers", packed("Index/Document.iwa"), "a spreadsheet of Numbers", "Export To"),
        ("b.numbers", packed("Index.zip", "preview.jpg"), "a spreadsheet of Numbers", "CSV"),
        ("a.pages", packed("Index/Document.iwa"), "a document of Pages", "Plain Text"),
        ("a.docx", packed("[Content_Types].xml", "word/document.xml"), "of Word", ".csv"),
        ("a.odt", packed("mimetype", "content.xml"), "LibreOffice Writer", ".csv"),
        ("a.rtf", b"{\\rtf1\\ansi a,b\\par}", "rich-text document", "Make Plain Text"),
        ("a.csv", b"{\\rtf1\\ansi a,b\\par}", "rich-text document", "Make Plain Text"),
        ("a.xls", b"<html><body><table><tr><td>a</td>", "a web page with a table", "Excel"),
        ("a.xls", b'<?xml version="1.0"?>\n<Workbook xmlns="x">', "XML spreadsheet", ".xlsx"),
        ("a.xls", OLE, "can't be read as a spreadsheet", "save it again"),
        ("a.xlsx.gz", gzip.compress(b"PK\x03\x04 cut", mtime=0), "a damaged spreadsheet", "again"),
        ("a.doc", OLE, "a document of Word", ".csv"),
        ("a.sav", b"$FL2@(#) IBM SPSS" + bytes(9), "an SPSS file", "Save As > CSV"),
        ("a.dta", b"<stata_dta><header>", "a Stata file", "export delimited"),
        ("b.dta", b"\x72\x02\x01\x00" + bytes(9), "a Stata file", "read_stata('b.dta')"),
        ("a.rds", b"X\n\x00\x00\x00\x03", "a file of R", "write.csv"),
        ("a.sas7bdat", bytes(12) + b"\xc2\xea\x81\x60", "a SAS file", "read_sas"),
        ("a.db", b"SQLite format 3\0", "an SQLite database", "sqlite3 -header -csv a.db"),
        ("a.gsheet", b'{"url": "https://docs.google.com/open"}', "Google sheet", "Download"),
        ("a.feather", b"ARROW1\0\0", "an Arrow or Feather file", "read_feather"),
    ],
    ids=lambda value: "file" if isinstance(value, bytes) else value,  # ZIP files contain the time
)  # fmt: skip
def test_file_that_is_not_a_table_is_rejected_with_its_format(
    name: str, content: bytes, complaint: str, remedy: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=complaint) as raised:
        load(tmp_path / name)
    assert remedy in raised.value.remedy
    assert name.partition(".")[0] in raised.value.message


def test_table_option_selects_an_archive_member_or_json_key(tmp_path: Path) -> None:
    table = "text,label\nthe film,good\n"
    write_zip(tmp_path / "a.zip", {"in/x.csv": table, "in/y.csv": "a,b\nc,d\n"})
    for member in ("in/x.csv", "x.csv", "x"):
        assert rows_of(read(tmp_path / "a.zip", table=member)) == ROWS[:1]
    (tmp_path / "a.json").write_text(json.dumps({"a": OBJECTS, "b": {"c": OBJECTS[:1]}}))
    assert rows_of(read(tmp_path / "a.json", table="b.c")) == ROWS[:1]
    (tmp_path / "a.csv").write_text(table)
    for name in ("a.zip", "a.json", "a.csv"):
        with pytest.raises(DataError) as raised:
            read(tmp_path / name, table="z")
        assert "--table" in raised.value.remedy


STUDIO = {"annotator": 1, "annotation_id": 7, "created_at": "2024-05-01", "lead_time": 3.5}
CHOICES = [{"id": 1, "text": "food"}, {"id": 2, "text": "sport"}]


def task(*results: dict[str, Any], **annotation: Any) -> dict[str, Any]:
    named = [{"from_name": "topic", "type": "choices", "value": value} for value in results]
    annotations = [{"id": 1, "result": named, "prediction": {}, **annotation}]
    return {"id": 1, "data": {"text": "a"}, "annotations": annotations, "total_annotations": 1}


def listed(labels: list[Any], *, name: str = "label", **others: Any) -> list[dict[str, Any]]:
    return [{"text": "a", name: label, **others} for label in labels]


EXPORTS: dict[str, tuple[list[dict[str, Any]] | str, list[Any]]] = {
    "Prodigy textcat": (
        [{"text": "a", "label": name, "answer": answer, "_input_hash": 5}
         for name, answer in (("food", "accept"), ("sport", "reject"), ("sport", "accept"))],
        ["food", None, "sport"],
    ),
    "Prodigy binary": (
        [{"text": "a", "label": "spam", "answer": answer}
         for answer in ("accept", "reject", "ignore")],
        ["spam", "not spam", None],
    ),
    "Prodigy choice": (
        [{"text": "a", "accept": names, "answer": answer, "options": CHOICES}
         for names, answer in (([1], "accept"), ([2], "accept"), ([1], "ignore"), ([], "accept"))],
        ["food", "sport", None, None],
    ),
    "Prodigy several": (
        [{"text": "a", "accept": names, "answer": "accept"} for names in (["x", "y"], [], ["x"])],
        [["x", "y"], [], ["x"]],
    ),
    "Prodigy cats": (
        [{"text": "a", "cats": {"x": score, "y": 1 - score}, "answer": "accept"}
         for score in (1.0, 0.0)],
        ["x", "y"],
    ),
    "Label Studio JSON": (
        [task({"choices": ["food"]}), task({"choices": ["sport"]}, was_cancelled=True), task()],
        ["food", None, None],
    ),
    "Label Studio ratings": ([task({"rating": 4}), task({"rating": 2})], [4, 2]),
    "Label Studio JSON-MIN": (
        listed([{"choices": ["x", "y"]}, "x"], name="topic", **STUDIO), [["x", "y"], "x"],
    ),
    "Label Studio CSV": (
        'text,topic,annotator,annotation_id,lead_time\n'
        'a,"{""choices"":[""x"",""y""]}",1,7,3.5\na,x,1,8,2\na,,1,9,2\n',
        [["x", "y"], "x", ""],
    ),
    "doccano JSON Lines": (listed([["food"], ["sport"], []], Comments=[]), ["food", "sport", None]),
    "doccano several": (listed([["x", "y"], []], Comments=[]), [["x", "y"], []]),
    "doccano annotations": (
        listed([[{"label": 3, "user": 1}], [{"label": 4}]], name="annotations",
             annotation_approver=None),
        [3, 4],
    ),
    "doccano CSV": ("id,text,label\n1,a,food\n2,a,food#sport\n", ["food", "food#sport"]),
    "spaCy": (listed([{"x": 1.0, "y": 1.0}, {"x": 0, "y": 1}], name="cats"), [["x", "y"], ["y"]]),
    "questions": (listed(["accept", "Because."], name="answer", label="x"), ["x", "x"]),
}  # fmt: skip


OF_CSV = {name for name, (content, _) in EXPORTS.items() if isinstance(content, str)}
SOURCES = {
    ".csv": OF_CSV,
    ".xlsx": OF_CSV | {"Prodigy textcat", "Prodigy binary", "questions"},
    ".json": EXPORTS.keys() - OF_CSV,
    ".jsonl": EXPORTS.keys() - OF_CSV,
    "frame": EXPORTS.keys(),
    "dataset": EXPORTS.keys() - {"Label Studio JSON-MIN"},  # its values have mixed types
}


def frame_of(content: list[dict[str, Any]] | str) -> pandas.DataFrame:
    if isinstance(content, str):
        return pandas.read_csv(io.StringIO(content), dtype=str, keep_default_na=False)
    return pandas.DataFrame(json.loads(json.dumps(content)))


def write_export(content: list[dict[str, Any]] | str, source: str, folder: Path) -> Path:
    """Write an export in the format of a suffix, or as an in-memory table."""
    path, frame = folder / f"export{source}", frame_of(content)
    if source == "frame":
        return write_table(frame, folder)
    if source == "dataset":
        return write_table(Dataset.from_pandas(frame), folder)
    if source == ".xlsx":
        frame.to_excel(path, index=False)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        lines = [json.dumps(record) for record in content]
        path.write_text(f"[{', '.join(lines)}]" if source == ".json" else "\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("source", "name"),
    [(source, name) for source, names in SOURCES.items() for name in sorted(names)],
)
def test_labeling_tool_export_is_loaded_from_each_format(
    source: str, name: str, tmp_path: Path
) -> None:
    content, labels = EXPORTS[name]
    table = read_file(write_export(content, source, tmp_path), DataConfig()).columns
    column = "topic" if "topic" in table.column_names else "label"
    found = [split_labels(cell, None) for cell in table[column].to_pylist()]
    plain = [own if isinstance(own, list) else [str(own)] * bool(own) for own in labels]
    assert found == plain


@pytest.mark.parametrize("source", [".json", ".xlsx", "frame"])
def test_prodigy_export_keeps_user_columns(source: str, tmp_path: Path) -> None:
    answers = ["accept", "REJECT", "", "Accept"]
    content = [
        {"Ticket": f"T{row}", "body": "a", "label": "xy"[row % 2], "answer": answer, "_is": 1}
        for row, answer in enumerate(answers)
    ]
    table = read_file(write_export(content, source, tmp_path), DataConfig())
    assert columns_of(table) == {
        "Ticket": ["T0", "T1", "T2", "T3"], "body": ["a"] * 4, "label": ["x", "", "", "y"]
    }  # fmt: skip


def test_answer_column_without_labels_is_a_user_column(tmp_path: Path) -> None:
    table = read_lines(tmp_path, {"text": "a", "answer": "accept"}, {"text": "b", "answer": ""})
    assert columns_of(table) == {"text": ["a", "b"], "answer": ["accept", ""]}


@pytest.mark.parametrize("source", [".json", ".jsonl", "frame", "dataset"])
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "a", "label": [0.0, 1.0]}, "'text', and no labels; 'label' has lists of numbers"),
        ({"text": "a", "label": {"id": 1, "name": "x"}}, "'label' has objects with id, name"),
        ({"text": "a", "label": [[1], [0]]}, "'label' has lists of lists of numbers"),
        ({"textContent": "a", "classificationAnnotation": {"displayName": "x"}},
         "'classificationAnnotation' has objects with displayName"),
        ({"messages": [{"role": "user", "content": "a"}]},
         "no text columns; 'messages' has lists of objects with role, content"),
        ({"id": "a", "fields": {"text": "a"}, "metadata": {}, "responses": {"label": [{"a": "x"}]}},
         "; 'responses' has objects with label"),
    ],
)  # fmt: skip
def test_error_describes_nested_columns(
    record: dict[str, Any], words: str, source: str, tmp_path: Path
) -> None:
    path = write_export([record] * 4, source, tmp_path)
    with pytest.raises(DataError) as raised:
        load(path)
    assert words in raised.value.message
    if "text" not in "".join(record):
        with pytest.raises(DataError) as raised:
            [*read_texts(path, DataConfig(), as_lines=False)]
        assert words.partition("; ")[2] in raised.value.message


def test_bytes_and_vectors_in_parquet_are_described_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    picture = {"bytes": b"x", "path": "x.png"}
    columns = {"text": ["a"], "label": [b"x"], "picture": [picture], "vector": [[0.5]]}
    parquet.write_table(pyarrow.table(columns), path)
    table = read(path)
    assert columns_of(table) == {"text": ["a"]}
    content = ["bytes", "objects with bytes, path", "lists of numbers"]
    assert table.left_out == dict(zip(["label", "picture", "vector"], content, strict=True))
    with pytest.raises(DataError, match="and no labels; 'label' has bytes"):
        load(path)


def test_each_annotation_of_a_task_becomes_a_row() -> None:
    twice = task({"choices": ["x"]})
    twice["annotations"] *= 2
    converted = convert(frame_of([task({"choices": ["y"]}), twice]))
    assert [*converted["topic"]] == ["y", "x", "x"]
    assert [*converted.index] == [0, 1, 1]


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ([{"text": "a", "spans": [{"start": 0}], "answer": "accept"}], "Prodigy"),
        ([task({"start": 0, "end": 1, "labels": ["x"]})], "Label Studio"),
        (listed([[{"start": 0, "end": 1}]], name="topic", **STUDIO), "Label Studio"),
        (listed([[[0, 1, "x"]]], Comments=[]), "doccano"),
    ],
)
def test_span_labels_are_rejected(content: list[dict[str, Any]], tool: str) -> None:
    with pytest.raises(DataError, match=tool) as raised:
        convert(frame_of(content))
    assert "export" in raised.value.remedy
