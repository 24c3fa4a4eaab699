"""Files of commas, semicolons, tabs and bars."""

import csv
from pathlib import Path

import pytest

from finetune.data.files import RawTable, read_file
from finetune.errors import DataUnreadable
from finetune.events import Event, Stage

ROWS = [
    ("plain", "a"),
    ("with , and ; and | and \t inside", "b"),
    ('he said "no"', "a"),
    ("over\ntwo lines", "b"),
    ("NA", "null"),
    ("😀👩‍👩‍👧", "nan"),
]


def read(folder: Path, content: str | bytes, *, name: str = "rows.csv") -> tuple[RawTable, str]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    emitted: list[Event] = []
    table = read_file(path, encoding=None, emit=emitted.append)
    return table, "; ".join(event.message for event in emitted if isinstance(event, Stage))


def rows_of(table: RawTable) -> list[tuple[str, ...]]:
    return list(zip(*table.columns.to_pydict().values(), strict=True))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("delimiter", "name"), [(",", "comma"), (";", "semicolon"), ("\t", "tab"), ("|", "bar")]
)
def test_each_delimiter_is_found_and_reported(
    tmp_path: Path, delimiter: str, name: str, line_end: str
) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
        writer.writerows([("text", "label"), *ROWS])
    table, emitted = read(tmp_path, path.read_bytes())
    assert rows_of(table) == ROWS
    assert name in emitted
    assert "UTF-8" in emitted


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "iso-8859-1"])
def test_each_encoding_is_read(tmp_path: Path, codec: str) -> None:
    table, _ = read(tmp_path, "text,label\nÄpfel für Zoë,süß\n".encode(codec))
    assert table.columns.to_pydict() == {"text": ["Äpfel für Zoë"], "label": ["süß"]}


def test_a_row_stands_where_its_first_line_does(tmp_path: Path) -> None:
    table, _ = read(tmp_path, 'text,label\n"one\ntwo",a\n\n   \nthree,b\n')
    assert [table.place(row) for row in range(2)] == [
        f"line {line} of {tmp_path / 'rows.csv'}" for line in (2, 6)
    ]


def test_spaces_around_the_names_of_columns_do_not_count(tmp_path: Path) -> None:
    table, _ = read(tmp_path, "text, label \nyes,a\n")
    assert table.columns.column_names == ["text", "label"]


def test_a_text_of_any_length_is_read(tmp_path: Path) -> None:
    long = "word " * 100_000
    table, _ = read(tmp_path, f"text,label\n{long},a\n")
    assert table.columns["text"].to_pylist() == [long]


def test_quotes_that_never_end_are_part_of_the_texts_between_tabs(tmp_path: Path) -> None:
    content = 'text\tlabel\n"Well, he said\ta\nThe "best" film\tb\n"Never again\ta\n'
    table, emitted = read(tmp_path, content, name="rows.tsv")
    assert table.columns["text"].to_pylist() == [
        '"Well, he said',
        'The "best" film',
        '"Never again',
    ]
    assert "quotes" in emitted


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("text,label\ngood,a\nbad, very bad,b\n", r"line 3 of .*rows.csv has 3 values and not 2"),
        ("text,label\ngood\n", "line 2 .* has 1 values and not 2.*'good'"),
        ('text,label\ngood,a\n"bad,b\nfine,c\n', "line 3 .* unexpected end of data.*bad,b"),
        ('text,label\n"good"!,a\n', "line 2 .* expected after"),
        ("text\tlabel\ngood\ta\tb\n", "line 2 .* has 3 values"),
        ("text,text,label\na,b,c\n", "two columns .* same name"),
        ("text,label\n", "a header row, .*text.* and no rows"),
        ("", "is empty"),
        ("\n\n", "is empty"),
    ],
)
def test_what_does_not_parse_is_reported_with_its_line(
    tmp_path: Path, content: str, complaint: str
) -> None:
    with pytest.raises(DataUnreadable, match=complaint) as raised:
        read(tmp_path, content)
    assert raised.value.remedy
