"""Files of JSON lines, of Parquet, and of no known format."""

import json
from pathlib import Path

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.formats import SUFFIXES, read_file
from finetune.data.reader import RawTable
from finetune.errors import DataUnreadable
from finetune.events import Event


def read(path: Path) -> RawTable:
    return read_file(path, DataConfig(), emit=lambda event: None)


def columns_of(table: RawTable) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = table.columns.to_pydict()
    return columns


def read_lines(folder: Path, *lines: object) -> RawTable:
    """Write lines, those that are no text as JSON, and read them."""
    path = folder / "rows.jsonl"
    written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(written), encoding="utf-8")
    return read(path)


def test_json_lines_become_columns_of_text(tmp_path: Path) -> None:
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
    assert [table.place(row).split()[1] for row in range(3)] == ["1", "3", "4"]


def test_half_a_character_becomes_a_replacement(tmp_path: Path) -> None:
    table = read_lines(tmp_path, r'{"text": "cut \ud83d", "label": "\ud83d\ude00"}')
    assert columns_of(table)["text"] == ["cut �"]
    assert columns_of(table)["label"] == ["😀"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a", "label": }', "line 2 of .* is not JSON, Expecting value at column 24"),
        ('["a", "b"]', "line 2 .* is not a JSON object"),
    ],
)
def test_a_line_that_is_no_object_is_an_error(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DataUnreadable, match=complaint) as raised:
        read_lines(tmp_path, {"text": "good", "label": "a"}, line)
    assert '{"text"' in raised.value.remedy


def test_parquet_of_datasets_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
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
    assert table.place(2) == f"row 3 of {path}"


def test_lists_of_numbered_classes_are_lists_of_their_names(tmp_path: Path) -> None:
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
    ("name", "content", "complaint"),
    [
        ("rows.csv", b"\xd0\xcf\x11\xe0", "an Excel workbook"),
        ("rows.pkl", b"\x80\x04\x95", "a pickle, which can run code"),
        ("rows.json", b' [{"text": "a"}]', "one JSON array"),
        ("rows.txt", b"__label__a Well, well\n__label__b No, no\n", "in fastText's format"),
    ],
)
def test_a_file_of_another_format_is_named_as_such(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataUnreadable, match=f"{name} is {complaint}") as raised:
        read(tmp_path / name)
    assert all(suffix in raised.value.remedy for suffix in SUFFIXES)


@pytest.mark.parametrize("content", [b"text,label\na,x\n", b'{"text": "a", "label": "x"}\n'])
def test_without_a_known_suffix_the_content_decides(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.txt").write_bytes(content)
    assert columns_of(read(tmp_path / "rows.txt")) == {"text": ["a"], "label": ["x"]}


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "tags": [0.5], "more": {"y": 1}}\n')
    parquet.write_table(pyarrow.table({"text": ["a"], "tags": [[0.5]]}), tmp_path / "b.parquet")
    emitted: list[Event] = []
    for name in ("a.jsonl", "b.parquet"):
        read_file(tmp_path / name, DataConfig(), emit=emitted.append)
    reports = [event.message for event in emitted if "left out" in getattr(event, "message", "")]
    assert len(reports) == 2
    assert all("'tags'" in report for report in reports)
    assert "'more'" in reports[0]


def test_a_column_that_begins_far_behind_is_empty_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.reader.STREAM_ROWS", 2)
    table = read_lines(tmp_path, *[{"text": "a"}] * 3, {"text": "b", "more": 1}, {"more": {}})
    assert columns_of(table) == {"text": ["a", "a", "a", "b", ""]}
    table = read_lines(tmp_path, *[{"text": "a"}] * 3, {"text": "b", "more": 1})
    assert columns_of(table) == {"text": ["a", "a", "a", "b"], "more": ["", "", "", "1"]}
