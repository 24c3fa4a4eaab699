"""Texts to classify, line by line as they come; free of what reads tables."""

import codecs
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from finetune.errors import DataNotFound, DataUnreadable, UsageError

# As much as a pipe holds.
CHUNK_BYTES = 2**16
# In characters. What has no line ends, as /dev/zero, would fill the memory.
MAX_LINE = 2**24


@dataclass(frozen=True)
class Row:
    """A text, or a pair of texts, and the other columns of its row by name."""

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    pair: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether neither the text nor that of a pair is blank."""
        return all(text is None or text.strip() for text in (self.text, self.pair))


def text_decoder(encoding: str) -> codecs.IncrementalDecoder:
    """Return what decodes a text piece by piece.

    Raises:
        UsageError: If there is no such encoding, or it is none of texts, as base64.
    """
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)
        decoder = codecs.getincrementaldecoder(encoding)()
        decoder.decode(b"")
    except (LookupError, UnicodeError) as error:
        raise UsageError(
            f"there is no encoding {encoding!r}",
            remedy="take a name such as gb18030 or cp1251, or leave out --encoding",
        ) from error
    return decoder


def read_lines(stream: BinaryIO, *, name: str, encoding: str | None) -> Iterator[list[Row]]:
    """Yield the lines of a stream that are not blank, as many as there are at a time.

    A pipe is not waited for while there is a line. Without an encoding it is UTF-8.

    Raises:
        UsageError: If there is no such encoding.
        DataUnreadable: If a line is in another encoding, or has no end for long.
        DataNotFound: If all lines are blank.
    """
    decoder = text_decoder(encoding or "utf-8-sig")
    rest, lines_before, is_empty = "", 0, True
    while True:
        chunk: bytes = stream.read1(CHUNK_BYTES)  # type: ignore[attr-defined]
        try:
            # Not splitlines, which also splits at marks that stand inside texts, such as U+2028.
            *lines, rest = (rest + decoder.decode(chunk, final=not chunk)).split("\n")
        except UnicodeDecodeError as error:
            line = lines_before + error.object[: error.start].count(b"\n") + 1
            raise DataUnreadable(
                f"line {line:,} of {name} is not {error.encoding.upper()}: {error.reason}",
                remedy="name its encoding with --encoding, such as --encoding cp1252",
            ) from error
        lines_before += len(lines)
        if len(rest) > MAX_LINE:
            raise DataUnreadable(
                f"line {lines_before + 1:,} of {name} has more than {MAX_LINE:,} characters",
                remedy="write one text per line",
            )
        if not chunk:
            lines.append(rest)
        if rows := [Row(line.removesuffix("\r")) for line in lines if line.strip()]:
            is_empty = False
            yield rows
        if not chunk:
            break
    if is_empty:
        raise DataNotFound(f"{name} has no texts", remedy="write one text per line")
