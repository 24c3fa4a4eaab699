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

import pyarrow
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
# No text has them; ISO 8859-1 has them where Windows-1252 has quotes and the euro sign.
CONTROLS = "[\x80-\x9f]"
SAMPLE_BYTES = 2**20
# Another encoding is a rival if it is this close to the best in how well letters suit a language.
CLOSE_COHERENCE = 0.1


@dataclass(frozen=True)
class TextFile:
    """A file of text, its encoding, and the encodings that fit its bytes nearly as well."""

    content: Content
    encoding: str
    rivals: tuple[str, ...] = ()

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
            yield from iter(partial(file.read, SAMPLE_BYTES), "")

    def open_for_arrow(self) -> pyarrow.NativeFile:
        """Open it from its start as UTF-8, in memory of Arrow's own.

        Arrow's threads release what they have read after the reader has returned. Bytes of Python
        they release under its lock, and where Python is ending by then, the process aborts.
        """
        if self.encoding == "utf-8" and self.content.unpacked is None:
            return pyarrow.OSFile(str(self.path))
        sink = pyarrow.BufferOutputStream()
        for piece in self.pieces():
            sink.write(piece.encode())
        return pyarrow.BufferReader(sink.getvalue())

    def no_text(self, reason: str = "") -> DataUnreadable:
        """Return an error that says that the file is no text."""
        complaint = f"{self.path} is not a text file{reason}"
        return DataUnreadable(complaint, remedy="export it as UTF-8")

    def find_fault(self) -> DataUnreadable | None:
        """Return an error that says where the file is damaged, or is no text, if it is."""
        decoder = text_decoder(self.encoding)
        bytes_before = lines_before = 0
        with self.content.open() as file:
            for chunk in chain(iter(partial(file.read, SAMPLE_BYTES), b""), [b""]):
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
                    reason = f": line {line} has the character NUL"
                    return self.no_text(reason)
                lines_before += text.count("\n")
        return None


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


def find_text(content: Content, *, encoding: str | None, emit: Emit = ignore) -> TextFile:
    """Find the encoding of a file, and make sure that all of it is text.

    Without an encoding, by Python's name, it is what a byte-order mark says, else UTF-8, else what
    charset-normalizer detects: then a warning names others that fit nearly as well.

    Raises:
        UsageError: If there is no such encoding.
        DataUnreadable: If the bytes are no text, or damaged in places.
    """
    known = encoding or _stated_encoding(content.start(SAMPLE_BYTES))
    text = TextFile(content, known or "utf-8")
    fault = text.find_fault()
    if fault and not known and not _is_mostly_utf8(text):
        text = _detect(content)
        fault = text.find_fault()
    if fault:
        raise fault
    if text.rivals:
        emit(
            WarningMessage(
                f"the encoding of {text.path} is a guess, {text.encoding}; its bytes also fit"
                f" {', '.join(text.rivals)}",
                remedy="if the texts look wrong, name another encoding with --encoding",
            )
        )
    return text


def _stated_encoding(start: bytes) -> str | None:
    """Return what a byte-order mark says, or bytes of 0 in UTF-16 without one."""
    for mark, named in BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            return named
    if b"\0" in start:
        detected = from_bytes(start, cp_isolation=["utf_16_le", "utf_16_be"]).best()
        return detected.encoding if detected else None
    return None


def _is_mostly_utf8(text: TextFile) -> bool:
    """Return whether more letters beyond ASCII are valid UTF-8 than are not."""
    damaged = beyond_ascii = 0
    for piece in text.pieces(errors="replace"):
        damaged += piece.count("\N{REPLACEMENT CHARACTER}")
        beyond_ascii += len(piece) - len(piece.encode("ascii", errors="ignore"))
    return beyond_ascii - damaged > damaged


def _detect(content: Content) -> TextFile:
    sample = _sample(content)
    matches = list(from_bytes(sample, cp_isolation=list(ENCODINGS)))
    if not matches:
        text = TextFile(content, "cp1252", ENCODINGS[1:])
        if text.find_fault():
            raise text.no_text()
        return text
    best = matches[0]
    ties = {
        name
        for match in matches
        if (match.chaos, match.coherence) == (best.chaos, best.coherence)
        for name in match.could_be_from_charset
    }
    chosen = min(ties.intersection(ENCODINGS), key=ENCODINGS.index)
    rivals = tuple(
        match.encoding
        for match in matches
        if match.coherence >= best.coherence - CLOSE_COHERENCE
        and (rival := sample.decode(match.encoding)) != sample.decode(chosen)
        and not re.search(CONTROLS, rival)
    )
    return TextFile(content, chosen, rivals)


def _sample(content: Content) -> bytes:
    """Return bytes around the first that is not ASCII."""
    with content.open() as file:
        chunks = enumerate(iter(partial(file.read, SAMPLE_BYTES), b""))
        number, chunk = next(((n, one) for n, one in chunks if not one.isascii()), (0, b""))
        first = re.search(rb"[\x80-\xff]", chunk)
        start = max(0, number * SAMPLE_BYTES + (first.start() if first else 0) - SAMPLE_BYTES // 2)
        file.seek(start)
        sample = file.read(SAMPLE_BYTES)
        is_cut = bool(file.read(1))
    # Not to cut a character in two.
    return (sample[: sample.rfind(b"\n") + 1] or sample) if is_cut else sample
