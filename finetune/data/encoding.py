"""Finds the encoding of a file (set, UTF-8 or detected), and reads its text in chunks."""

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import log
from pathlib import Path
from typing import TextIO

import pyarrow

from finetune.data.packed import WORDS, Content
from finetune.errors import DataUnreadableError, UsageError
from finetune.events import WarningMessage, emit
from finetune.files import naming

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
CHUNK_BYTES = 2**20
SAMPLE_LINES = 1_000
# Characters between words in texts of all languages.
PUNCTUATION = frozenset("–—‘’‚“”„…«»‹›•·€£§°©®™¿¡²³½¼\u00a0\u3000")  # noqa: RUF001
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
# Sequences that don't occur in words: a symbol after a letter, a quote before one, letters of two
# scripts, a single letter before a number, a capital after a small letter.
MISREAD = re.compile(
    r"(?<=[^\W\d_])[^\w\s'’\-./,:;!?()\[\]{}<>%#&*|\"«»“”„‘–—…@+=\u00a0。、，！？\x00-\x7f]"  # noqa: RUF001
    r"|[”»](?=[^\W\d_])|[a-zA-Z](?=[\u0370-\u052f])|[\u0370-\u052f](?=[a-zA-Z])"
    r"|(?<!\w)[^\W\d_a-zA-Z](?=[\d(])"
)
CAPITAL = re.compile(r"(?<=[a-z])[^\W\d_a-zA-Z]")
# How much less likely each encoding is than the previous one.
LESS_LIKELY = 0.1
ERROR, COMMON_EAST, MARK = 1e-6, 5e-4, 0.02


@dataclass(frozen=True)
class TextFile:
    """A text file and its encoding."""

    content: Content
    encoding: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.content.path

    def open(self, *, newline: str = "", errors: str = "strict") -> TextIO:
        """Open the file at its start, with the arguments of the built-in ``open``."""
        return io.TextIOWrapper(
            self.content.open(), encoding=self.encoding, newline=newline, errors=errors
        )

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the stripped non-blank lines with their line numbers."""
        with self.open(newline="\n") as lines:
            stripped = enumerate(map(str.strip, lines), start=1)
            yield from (numbered for numbered in stripped if numbered[1])

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file."""
        with self.content.open() as file:
            yield from iter(partial(file.read, CHUNK_BYTES), b"")

    def line_end(self) -> str:
        """Return the line ending of the first line."""
        with self.open() as file:
            return "\r\n" if file.readline(CHUNK_BYTES).endswith("\r\n") else "\n"

    def open_for_arrow(self) -> pyarrow.NativeFile:
        """Open the file at its start as UTF-8, in memory owned by Arrow.

        Arrow threads need the GIL to free Python bytes, and would abort when Python exits.
        """
        if self.encoding == "utf-8" and self.content.unpacked is None:
            return pyarrow.OSFile(str(self.path))
        sink = pyarrow.BufferOutputStream()
        for text in decode(self.chunks(), self.encoding, name=str(self.path)):
            sink.write(text.encode())
        return pyarrow.BufferReader(sink.getvalue())


def decode(chunks: Iterable[bytes], encoding: str, *, name: str) -> Iterator[str]:
    """Yield the text of each chunk, then the rest. Report the line of an error."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)  # rejects bytes codecs such as base64
        decoder = codecs.getincrementaldecoder(encoding)()
        decoder.decode(b"")
    except (LookupError, UnicodeError) as error:
        remedy = "use a name such as gb18030 or cp1251, or drop --encoding"
        raise UsageError(f"unknown encoding {encoding!r}", remedy=remedy) from error
    lines_before = 0
    with naming(name):
        for chunk in chain(chunks, [b""]):
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeError as error:
                what, reason = name, str(error)
                if isinstance(error, UnicodeDecodeError):
                    line = lines_before + error.object[: error.start].count(b"\n") + 1
                    what, reason = f"line {line} of {name}", error.reason
                raise DataUnreadableError(
                    f"{what} is not {encoding.removesuffix('-sig').upper()}: {reason}",
                    remedy="fix it, or set the encoding, such as --encoding cp1252",
                ) from error
            lines_before += text.count("\n")
            yield text


def find_text(content: Content, *, encoding: str | None) -> TextFile:
    """Detect the encoding unless an option sets it, and check that the whole file is text."""
    start = content.start(4)
    marked = [name for mark, name in BYTE_ORDER_MARKS.items() if start.startswith(mark)]
    known = encoding or next(iter(marked), None)
    try:
        return _check(TextFile(content, known or "utf-8"))
    except DataUnreadableError:
        if known or _is_mostly_utf8(TextFile(content, "utf-8")):
            raise
    with content.open() as file:
        lines = (line for line in file if not line.isascii())
        detected = detect_encoding(b"".join(islice(lines, SAMPLE_LINES)))
    if detected is None:
        raise _not_text(content.path)
    text = _check(TextFile(content, detected))
    finding = f"{text.path} is not UTF-8; its encoding was detected as {text.encoding}"
    remedy = "if the texts look wrong, set another encoding with --encoding"
    emit(WarningMessage(finding, remedy=remedy))
    return text


def _check(text: TextFile) -> TextFile:
    """Return the file, or raise an error with the line if it is damaged or not text."""
    for piece in decode(text.chunks(), text.encoding, name=str(text.path)):
        if "\0" in piece:
            raise _not_text(text.path, ": it contains NUL characters")
    return text


def _not_text(path: Path, reason: str = "") -> DataUnreadableError:
    return DataUnreadableError(f"{path} is not a text file{reason}", remedy="export it as UTF-8")


def _is_mostly_utf8(text: TextFile) -> bool:
    """Return whether most non-ASCII letters are valid UTF-8."""
    damaged = beyond_ascii = 0
    with text.open(errors="replace") as lines:
        for line in lines:
            damaged += line.count("\N{REPLACEMENT CHARACTER}")
            beyond_ascii += len(line) - len(line.encode("ascii", errors="ignore"))
    return beyond_ascii - damaged > damaged


def detect_encoding(sample: bytes) -> str | None:
    """Return the encoding whose text looks most like a language, or None if all fail.

    Non-ASCII letters are weighted by their frequency in the language.

    >>> detect_encoding("Zażółć gęślą jaźń".encode("cp1250"))
    'cp1250'
    """
    if CONTROL.search(sample):
        return None
    scores = {}
    for place, (encoding, group) in enumerate(WORDS["encodings"].items()):
        with suppress(UnicodeError):
            text = sample.decode(encoding)
            if group == "east":
                score = _score(text, **WORDS["east"][encoding])
            else:
                score = max(_score(text, letters) for letters in WORDS["letters"][group].values())
            scores[encoding] = score - LESS_LIKELY * place
    return max(scores, key=scores.__getitem__, default=None)


def _score(text: str, frequent: str, *, letters: str = "", common: str = "") -> float:
    """Return the log-likelihood of a text in a language with these frequent letters.

    For East Asian languages, ``letters`` lists more letters, and the ``common`` encoding contains
    the usual ones.
    """
    total = 0.0
    if not letters:
        errors = len(MISREAD.findall(text)) + sum(map(str.isupper, CAPITAL.findall(text)))
        total = errors * log(ERROR / MARK)
    for character, count in Counter(filter("\x7f".__lt__, text)).items():
        if (rank := frequent.find(character)) >= 0:
            likelihood = 0.2 / (rank + 5) if letters else max(0.5 / (rank + 1), MARK)
        elif letters and re.match(letters, character) and character.encode(common, "ignore"):
            likelihood = COMMON_EAST
        else:
            likelihood = MARK if character in PUNCTUATION else ERROR
        total += count * log(likelihood)
    return total
