"""Delimited text files, their delimiters, quotes, headers and encodings."""

import csv
from pathlib import Path
from typing import Any

import pytest
from data_files import messages
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config.schema import DataConfig
from finetune.data.encoding import TextFile, find_text
from finetune.data.packed import Content
from finetune.data.read import RawTable, read_file
from finetune.errors import DataUnreadableError, UsageError

MARKS = "ab\",'\n\t ;|é😀"
WORDS = ["with , and ; and | and \t inside", 'he said "no"', "over\ntwo lines", "NA", "null", "nan"]


def read(
    folder: Path, content: str | bytes, *, name: str = "rows.csv", **options: Any
) -> tuple[RawTable, str]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with messages() as said:
        table = read_file(path, DataConfig("", **options))
    return table, "; ".join(said)


def rows_of(columns: list[Any]) -> list[tuple[str, ...]]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def test_unclosed_quotes_are_literal_in_tsv_files(tmp_path: Path) -> None:
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
        (
            "text,label\ngood,a\nbad, very bad,b\n",
            "line 3 of .*rows.csv has 3 values, but the first row has 2",
        ),
        ("text,label\ngood\n", "line 2 .* has 1 values, but the first row has 2.*'good'"),
        ('text,label\ngood,a\n"bad,b\nfine,c\n', "line 3 .* unexpected end of data.*bad,b"),
        ('text,label\n"good"!,a\n', "line 2 .* expected after"),
        ("text,text,label\na,b,c\n", "duplicate column names"),
        ("text,label\n", "a header row, .*text.* but no rows"),
        ("", "is empty"),
    ],
)
def test_parse_errors_state_the_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(DataUnreadableError, match=complaint) as raised:
        read(tmp_path, content)
    assert raised.value.remedy


@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(*[st.sampled_from(WORDS) | st.text(st.sampled_from(MARKS), max_size=5)] * 2),
        min_size=1,
    ),
    delimiter=st.sampled_from(",;\t|"),
    line_end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_written_csv_is_read_back_unchanged(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    delimiter: str,
    line_end: str,
    quoting: Any,
) -> None:
    path = tmp_path_factory.mktemp("tables") / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end, quoting=quoting)
        writer.writerows([("text", "label"), *rows])
    table = read_file(path, DataConfig("", header=True))
    assert rows_of(table.columns.columns) == rows
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        ends = [reader.line_num for _ in reader]
    assert table.numbers.tolist() == [end + 1 for end in ends[:-1]]


PRAISE = "".join(f"The film number {n} was a joy,good\nNever again {n},bad\n" for n in range(5))


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (PRAISE, ["column1", "column2"]),
        ("1,The film,x\n2,Again,y\n", ["column1", "column2", "column3"]),
        ("remark " * 10 + ",mood\na,b\nc,d\n", ["column1", "column2"]),
        ("remark,mood\n" + PRAISE, ["remark", "mood"]),
        ("text,spam\na,spam\nb,ham\n", ["text", "spam"]),
        ("0,1\na,0\nb,1\n", ["0", "1"]),
        (",remark\n0,a\n1,b\n", ["column1", "remark"]),
    ],
)
def test_header_row_is_distinguished_from_a_data_row(
    tmp_path: Path, content: str, names: list[str]
) -> None:
    table, emitted = read(tmp_path, content)
    assert table.columns.column_names == names
    has_header = names[-1] != f"column{len(names)}"
    assert ("no header row" in emitted) == (not has_header)
    assert len(table.columns) == content.count("\n") - has_header
    assert table.numbers[0] == 1 + has_header


def test_header_option_overrides_the_guess(tmp_path: Path) -> None:
    assert read(tmp_path, "a,b\nc,d\n", header=False)[0].columns.num_rows == 2
    assert read(tmp_path, "1,2\nc,d\n", header=True)[0].columns.column_names == ["1", "2"]
    table, _ = read(tmp_path, "says,spam\na,spam\nb,ham\n", text_column="says")
    assert table.columns.column_names == ["says", "spam"]


def test_trailing_blank_values_are_not_columns(tmp_path: Path) -> None:
    table, _ = read(tmp_path, "text,label\na,x,,\nb,y, ,\n")
    assert table.columns.to_pydict() == {"text": ["a", "b"], "label": ["x", "y"]}
    table, _ = read(tmp_path, "text,label,\na,x,\nb,y,note\n")
    assert table.columns.column_names == ["text", "label", "column3"]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_backslash_escaped_quotes_are_parsed(tmp_path: Path, delimiter: str) -> None:
    values = [r'"He said \"no, no\"\n"', r'"\"A\" ""film"", C:\new\\"', '"plain"', '"x"']
    lines = [delimiter.join(("text", "label")), *(f"{own}{delimiter}a" for own in values)]
    table, emitted = read(tmp_path, "\n".join(lines))
    texts = [r'He said "no, no"\n', r'"A" "film", C:\new\\', "plain", "x"]
    assert table.columns["text"].to_pylist() == texts
    assert "is read as a quote" in emitted
    table, emitted = read(tmp_path, 'text,label\n"C:\\",a\nb,c\n')
    assert table.columns["text"].to_pylist() == ["C:\\", "b"]
    assert "is read as a quote" not in emitted


def test_spaces_before_quotes_are_ignored(tmp_path: Path) -> None:
    table, _ = read(tmp_path, '"text", "label"\n"one, two", "a"\n"three", "b, c"\n')
    assert table.columns.to_pydict() == {"text": ["one, two", "three"], "label": ["a", "b, c"]}


@pytest.mark.parametrize("escaped", ["it''s, all, good", r"it\'s, all, good"])
def test_values_can_be_in_single_quotes(tmp_path: Path, escaped: str) -> None:
    lines = (f"'{escaped} {number}','{'ab'[number % 2]}'" for number in range(12))
    table, emitted = read(tmp_path, "\n".join(("text,label", *lines)))
    assert table.columns["text"][0].as_py() == "it's, all, good 0"
    assert table.columns["label"][1].as_py() == "b"
    assert "single quotes" in emitted
    table, emitted = read(tmp_path, "text,label\n'tis a film,a\n'Never again',b\nall,a\n")
    assert table.columns["text"].to_pylist() == ["'tis a film", "'Never again'", "all"]


PATH = Path("greetings.csv")
# ruff: noqa: RUF001
ENCODED = {
    "cp932": "この映画はとても面白かったです,良い\n二度と見たくない作品,悪い\n",
    "koi8_r": "Этот фильм мне очень понравился,хорошо\nУжасное обслуживание в гостинице,плохо\n",
}


def find(content: bytes, *, encoding: str | None = None) -> TextFile:
    return find_text(Content(PATH, content), encoding=encoding)


def text_of(file: TextFile) -> str:
    return file.open().read()


def test_detected_encoding_is_a_warning_unless_it_is_set() -> None:
    swedish = "text,label\n" + "Maten var väldigt god på restaurangen,bra\n" * 20
    with messages() as said:
        for encoding in (None, "cp1252"):
            found = find(swedish.encode("cp1252"), encoding=encoding)
            assert (text_of(found), found.encoding) == (swedish, "cp1252")
    [warning] = said
    assert "detected as cp1252" in warning


def test_encoding_option_is_used() -> None:
    content = ENCODED["koi8_r"].encode("koi8_r")
    assert text_of(find(content, encoding="koi8_r")) == ENCODED["koi8_r"]
    with pytest.raises(UsageError, match="'koi9'"):
        find(content, encoding="koi9")
    with pytest.raises(DataUnreadableError, match=r"line 1 of greetings\.csv .* ASCII") as raised:
        find(content, encoding="ascii")
    assert "--encoding" in raised.value.remedy


def test_binary_file_is_rejected() -> None:
    with pytest.raises(DataUnreadableError, match=r"greetings\.csv is not a text file"):
        find(bytes(range(256)) * 20)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (b"caf\xe9 and", "line 42 of .* is not UTF-8: "),
        (b"a\0b", "not a text file: it contains NUL characters"),
        (b"cut \xf0\x9f", "line 42 of .* unexpected end of data"),
    ],
)
def test_damage_after_the_first_chunk_is_reported_with_its_line(
    damage: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.data.encoding.CHUNK_BYTES", 64)
    with pytest.raises(DataUnreadableError, match=complaint):
        find("é, a word or two 😀\n".encode() * 41 + damage)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ("like,good\nnever again,bad\nfine,good\n", [4, 5, 6]),
        ("like,good\nnever again,bad\nfine,good", [4, 5, 6]),
        ("\nlike,good\n\n\nnever again,bad\nfine,good\n\n", [5, 8, 9]),
        ('"li\nke",good\nnever again,bad\n" ""fi\n\nne""",good\n', [4, 6, 7]),
        ('"li\nke",good\n\nnever again,bad\nfine,good', [4, 7, 8]),
        ("like,good,,\r\nnever again,bad,\r\n  \r\nfine,good\r\n", [4, 5, 7]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_row_numbers_are_line_numbers(
    content: str, lines: list[int], encoding: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.csv"
    path.write_bytes(f"Reviews of 2026\n\ntext,label\n{content}".encode(encoding))
    table = read_file(path, DataConfig())
    assert table.numbers.tolist() == lines
    assert table.place(table.numbers[1]) == f"line {lines[1]} of {path}"
