"""Files of JSON lines, of Parquet, and of no known format."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.read import RawTable, as_text, read_file
from finetune.errors import DataUnreadableError
from finetune.events import Event, sent_to


def read(path: Path) -> RawTable:
    return read_file(path, DataConfig())


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
        ('{"text": "a", "label": }', "Expecting value: line 2 column 24"),
        ('["a", "b"]', r"lines that are not JSON objects: \['a', 'b'\]"),
    ],
)
def test_a_line_that_is_no_object_is_an_error(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(DataUnreadableError, match=complaint) as raised:
        read_lines(tmp_path, {"text": "good", "label": "a"}, line)
    assert raised.value.remedy


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


@pytest.mark.parametrize("content", [b"text,label\na,x\n", b'{"text": "a", "label": "x"}\n'])
def test_without_a_known_suffix_the_content_decides(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.txt").write_bytes(content)
    assert columns_of(read(tmp_path / "rows.txt")) == {"text": ["a"], "label": ["x"]}


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "tags": [0.5], "more": {"y": 1}}\n')
    parquet.write_table(pyarrow.table({"text": ["a"], "tags": [[0.5]]}), tmp_path / "b.parquet")
    emitted: list[Event] = []
    for name in ("a.jsonl", "b.parquet"):
        with sent_to(emitted.append):
            read_file(tmp_path / name, DataConfig())
    reports = [event.message for event in emitted if "left out" in getattr(event, "message", "")]
    assert len(reports) == 2
    assert all("'tags'" in report for report in reports)
    assert "'more'" in reports[0]


def test_a_column_that_begins_far_behind_is_empty_before(tmp_path: Path) -> None:
    table = read_lines(tmp_path, *[{"text": "a"}] * 3, {"text": "b", "more": 1}, {"more": {}})
    assert columns_of(table) == {"text": ["a", "a", "a", "b", ""]}
    table = read_lines(tmp_path, *[{"text": "a"}] * 3, {"text": "b", "more": 1})
    assert columns_of(table) == {"text": ["a", "a", "a", "b"], "more": ["", "", "", "1"]}


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
def test_values_read_by_column_are_as_read_by_row(
    tmp_path_factory: pytest.TempPathFactory, columns: dict[str, list[Any]]
) -> None:
    expected = {name: [as_text(value) for value in values] for name, values in columns.items()}
    path = tmp_path_factory.mktemp("tables") / "rows.jsonl"
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert columns_of(read(path)) == expected
    with suppress(pyarrow.ArrowException, OverflowError):  # of several kinds
        parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"))
        assert columns_of(read(path.with_suffix(".parquet"))) == expected
