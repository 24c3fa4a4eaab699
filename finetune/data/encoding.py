"""The encoding of a file: stated, UTF-8, or detected; and its text, piece by piece."""

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TextIO

from charset_normalizer import from_bytes

from finetune.data.packed import Content
from finetune.errors import DataUnreadable, UsageError
from finetune.events import Emit, WarningMessage, ignore

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Those in use; where several fit equally well, the first is taken.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("koi8_r", "gb18030", "big5", "cp932", "euc_jp", "cp949", "latin_1"),
)
PIECE_BYTES = 2**20


@dataclass(frozen=True)
class TextFile:
    """A file of text and its encoding."""

    content: Content
    encoding: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.content.path

    def open(self, *, newline: str = "", errors: str = "strict") -> TextIO:
        """Open it from its start; the options are those of Python's ``open``."""
        return io.TextIOWrapper(
            self.content.open(), encoding=self.encoding, newline=newline, errors=errors
        )

    def pieces(self, *, errors: str = "strict") -> Iterator[str]:
        """Yield the text in pieces of so many characters that they take little memory."""
        with self.open(errors=errors) as file:
            yield from iter(partial(file.read, PIECE_BYTES), "")

    def find_fault(self) -> DataUnreadable | None:
        """Return an error that says where the file is damaged, or is no text, if it is."""
        decoder = text_decoder(self.encoding)
        bytes_before = lines_before = 0
        with self.content.open() as file:
            for chunk in chain(iter(partial(file.read, PIECE_BYTES), b""), [b""]):
                bytes_before += len(chunk)
                try:
                    text = decoder.decode(chunk, final=not chunk)
                except UnicodeDecodeError as error:
                    line = lines_before + error.object[: error.start].count(b"\n") + 1
                    byte = bytes_before - len(error.object) + error.start + 1
                    return DataUnreadable(
                        f"line {line} of {self.path} is damaged {self.encoding.upper()}:"
                        f" {error.reason}, byte {byte} of the file",
                        remedy="correct the line, or name the encoding with --encoding",
                    )
                if "\0" in text:
                    line = lines_before + text[: text.index("\0")].count("\n") + 1
                    return _not_text(self.path, f": line {line} has the character NUL")
                lines_before += text.count("\n")
        return None


def text_decoder(encoding: str) -> codecs.IncrementalDecoder:
    """Return what decodes a text piece by piece."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)  # refuses those of bytes, such as base64
        decoder = codecs.getincrementaldecoder(encoding)()
        decoder.decode(b"")
    except (LookupError, UnicodeError) as error:
        raise UsageError(
            f"there is no encoding {encoding!r}",
            remedy="use a name such as gb18030 or cp1251, or leave out --encoding",
        ) from error
    return decoder


def find_text(content: Content, *, encoding: str | None, emit: Emit = ignore) -> TextFile:
    """Find the encoding, unless it is named, and make sure that all of the file is text."""
    start = content.start(4)
    marked = [name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)]
    known = encoding or next(iter(marked), None)
    text = TextFile(content, known or "utf-8")
    fault = text.find_fault()
    if fault and not known and not _is_mostly_utf8(text):
        detected = _detect(content)
        text = TextFile(content, detected or "cp1252")
        fault = text.find_fault()
        if fault and not detected:
            fault = _not_text(content.path)
    if fault:
        raise fault
    if not known and text.encoding != "utf-8":
        emit(
            WarningMessage(
                f"{text.path} is not UTF-8; its encoding was detected as {text.encoding}",
                remedy="if the texts look wrong, name another encoding with --encoding",
            )
        )
    return text


def _not_text(path: Path, reason: str = "") -> DataUnreadable:
    return DataUnreadable(f"{path} is not a text file{reason}", remedy="export it as UTF-8")


def _is_mostly_utf8(text: TextFile) -> bool:
    """Return whether more letters beyond ASCII are valid UTF-8 than are not."""
    damaged = beyond_ascii = 0
    for piece in text.pieces(errors="replace"):
        damaged += piece.count("\N{REPLACEMENT CHARACTER}")
        beyond_ascii += len(piece) - len(piece.encode("ascii", errors="ignore"))
    return beyond_ascii - damaged > damaged


def _detect(content: Content) -> str | None:
    """Return the encoding that fits best the bytes around the first that is not ASCII."""
    with content.open() as file:
        start = 0
        for chunk in iter(partial(file.read, PIECE_BYTES), b""):
            if found := re.search(rb"[\x80-\xff]", chunk):
                start += found.start()
                break
            start += len(chunk)
        file.seek(max(0, start - PIECE_BYTES // 2))
        sample = file.read(PIECE_BYTES)
        if file.read(1):  # not to cut a character in two
            sample = sample[: sample.rfind(b"\n") + 1] or sample
    matches = list(from_bytes(sample, cp_isolation=list(ENCODINGS)))
    best = [(one.chaos, one.coherence) for one in matches[:1]]
    names = {
        name
        for match in matches
        if (match.chaos, match.coherence) in best
        for name in match.could_be_from_charset
    }
    return min(names.intersection(ENCODINGS), key=ENCODINGS.index, default=None)
