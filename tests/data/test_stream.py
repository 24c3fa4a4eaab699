"""Texts to classify: lines as they arrive, and the rows of tables."""

import io
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.stream import read_lines, read_texts
from finetune.errors import DataNotFoundError, DataUnreadableError


def texts_in(path: Path, *, as_lines: bool = False, **options: str | None) -> list[str | None]:
    given = DataConfig(str(path), **options)
    pieces = read_texts(path, given, as_lines=as_lines)
    return [text for piece in pieces for text in piece[:].texts]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("rows.csv", "text,id\n" + "one,1\n" * 5000 + "two\n", "line 5002"),
        ("rows.jsonl", '{"text": "one"}\n{"text": \n', "line 2"),
        ("rows.parquet", "PAR1text", "not Parquet"),
        ("rows.jsonl", "é\n" * 100_000 + "\xff\n", "line 1"),
        ("rows.txt", "é\n" * 400_000 + "\xff\n", "line 400001 of "),
    ],
)
def test_a_file_that_does_not_parse_is_refused_before_its_first_row(
    name: str, content: str, word: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content.replace("é", "Ã©").encode("latin-1"))
    with pytest.raises((DataUnreadableError, DataNotFoundError), match=word):
        texts_in(path)


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"

    def peak_bytes(lines: int) -> int:
        path.write_text("a text with some words and more words\n" * lines)
        tracemalloc.start()
        pieces = read_texts(path, DataConfig(str(path)), as_lines=False)
        assert sum(map(len, pieces)) == lines
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(1)  # imports too
    assert peak_bytes(80_000) < 1.2 * peak_bytes(40_000)


def test_what_is_no_text_is_not_classified(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"more": {"a": "a long text"}, "said": "cut \ud83d here"}' + "\n{}\n")
    assert texts_in(path) == ["cut � here", ""]
    parquet.write_table(pyarrow.table({"text": [b"bytes"]}), tmp_path / "rows.parquet")
    with pytest.raises(DataNotFoundError, match="looks like texts"):
        texts_in(tmp_path / "rows.parquet")


def test_lines_below_the_columns_of_a_run_are_a_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("Nr\tAntwort\n1\tsehr gut\n2\tna ja\n")
    options = OtherData(str(path), earlier_columns={"text_column": "Antwort"})
    [texts] = read_texts(path, options, as_lines=False)
    assert texts[:].texts == ["sehr gut", "na ja"]
    assert texts_in(path)[0] == "Nr\tAntwort"
    path = path.with_suffix(".csv")
    path.write_text("Grüße\n", encoding="cp1252")
    assert texts_in(path, as_lines=True) == ["Grüße"]


class Pipe(io.BytesIO):
    """A pipe that returns a few bytes at a time."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__()
        self.chunks = [*chunks, b""]

    def read1(self, size: int | None = -1) -> bytes:
        return self.chunks.pop(0)


def test_lines_are_yielded_as_soon_as_they_are_whole() -> None:
    pieces = read_lines(Pipe(b"one\ntw", b"o\n\xc3", b"\xa4\n\nend"), name="x", encoding=None)
    assert [piece.texts for piece in pieces] == [["one"], ["two"], ["ä", ""], ["end"]]


def test_a_line_in_another_encoding_is_named() -> None:
    pieces = read_lines(Pipe(b"one\ntwo\n", b"three\ncaf\xe9\n"), name="x", encoding=None)
    assert next(pieces).texts == ["one", "two"]
    with pytest.raises(DataUnreadableError, match="line 4 of x"):
        next(pieces)
