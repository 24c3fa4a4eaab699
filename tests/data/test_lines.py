"""Lines of texts to classify, as they come."""

import io

import pytest

from finetune.data import lines
from finetune.data.lines import read_lines
from finetune.errors import DataNotFound, DataUnreadable, UsageError


class Pipe(io.BytesIO):
    """A pipe that has some bytes at a time."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__()
        self.chunks = [*chunks, b""]

    def read1(self, size: int | None = -1) -> bytes:
        return self.chunks.pop(0)


def test_lines_are_yielded_as_soon_as_they_are_whole() -> None:
    pieces = read_lines(Pipe(b"one\ntw", b"o\n\xc3", b"\xa4\nend"), name="x", encoding=None)
    assert [[row.text for row in piece] for piece in pieces] == [["one"], ["two"], ["ä"], ["end"]]


def test_a_line_in_another_encoding_is_named() -> None:
    pieces = read_lines(Pipe(b"one\ntwo\n", b"three\ncaf\xe9\n"), name="x", encoding=None)
    assert [row.text for row in next(pieces)] == ["one", "two"]
    with pytest.raises(DataUnreadable, match="line 4 of x"):
        next(pieces)


def test_an_unknown_encoding_and_no_lines_are_refused() -> None:
    for encoding in ("klingon", "base64", "undefined"):
        with pytest.raises(UsageError, match=f"no encoding '{encoding}'"):
            list(read_lines(Pipe(b"one"), name="x", encoding=encoding))
    with pytest.raises(DataNotFound, match="no texts"):
        list(read_lines(Pipe(b"\n  \n"), name="x", encoding=None))


def test_what_has_no_line_ends_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 20)
    pieces = read_lines(Pipe(b"one\n" + 20 * b"x", b"x", b"x"), name="x", encoding=None)
    assert [row.text for row in next(pieces)] == ["one"]
    with pytest.raises(DataUnreadable, match="line 2 of x has more than 20 characters"):
        next(pieces)
