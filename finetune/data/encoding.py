"""Bytes of a file become text."""

import codecs
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow
from charset_normalizer import from_bytes

from finetune.errors import DataUnreadable, UsageError

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Those in use; among all that Python knows, charset-normalizer takes French for mac_latin2. Where
# several fit equally well, the first is taken.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("koi8_r", "gb18030", "big5", "cp932", "euc_jp", "cp949", "latin_1", "mac_roman"),
)
# No text has them; ISO 8859-1 has them where Windows-1252 has quotes and the euro sign.
CONTROLS = "[\x80-\x9f]"
SAMPLE_BYTES = 2**20
# Another encoding is a rival if it is this close to the best in how well letters suit a language.
CLOSE_COHERENCE = 0.1


class DecodedText(NamedTuple):
    """A file's text, its encoding, and the encodings that fit its bytes nearly as well."""

    text: str
    encoding: str
    rivals: tuple[str, ...] = ()


def decode(content: bytes, *, path: Path, encoding: str | None) -> DecodedText:
    """Return a file's text.

    Without an encoding, by Python's name, it is what a byte-order mark says, else UTF-8, else what
    charset-normalizer detects.

    Raises:
        UsageError: If there is no such encoding.
        DataUnreadable: If the bytes are no text, or damaged in places.
    """
    try:
        decoded = _decode(content, path=path, encoding=encoding)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        expected = (encoding or error.encoding).upper()
        raise DataUnreadable(
            f"line {line} of {path} is damaged {expected}: {error.reason}, byte {error.start + 1}"
            " of the file",
            remedy="correct the line, or name another encoding with --encoding",
        ) from error
    except (LookupError, UnicodeError) as error:
        raise UsageError(
            f"there is no encoding {encoding!r}",
            remedy="take a name such as gb18030 or cp1251, or leave out --encoding",
        ) from error
    if "\0" in decoded.text:
        line = decoded.text[: decoded.text.index("\0")].count("\n") + 1
        raise _no_text(path, f", for line {line} has the character NUL")
    return decoded


def _no_text(path: Path, reason: str = "") -> DataUnreadable:
    return DataUnreadable(f"{path} is not a text file{reason}", remedy="export it as UTF-8")


def encode_for_arrow(text: str) -> pyarrow.Buffer:
    """Return a text as UTF-8 in Arrow's memory.

    Arrow's threads release what they have read after the reader has returned. Bytes of Python they
    release under its lock, and where Python is ending by then, the process aborts.
    """
    return pyarrow.array([text.encode()], "large_binary").buffers()[2]


def _decode(content: bytes, *, path: Path, encoding: str | None) -> DecodedText:
    if encoding is not None:
        return DecodedText(content.decode(encoding), encoding)
    for mark, named in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return DecodedText(content.decode(named), named)
    if b"\0" in content:
        detected = from_bytes(content[:SAMPLE_BYTES], cp_isolation=["utf_16_le", "utf_16_be"])
        if found := detected.best():
            return DecodedText(content.decode(found.encoding), found.encoding)
    try:
        return DecodedText(content.decode("utf-8"), "utf-8")
    except UnicodeDecodeError:
        if _is_mostly_utf8(content):
            raise
        return _detect(content, path=path)


def _detect(content: bytes, *, path: Path) -> DecodedText:
    first = re.search(rb"[\x80-\xff]", content)
    start = max(0, (first.start() if first else 0) - SAMPLE_BYTES // 2)
    sample = content[start : start + SAMPLE_BYTES]
    if len(content) > start + SAMPLE_BYTES:  # not to cut a character in two
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    candidates = ENCODINGS if _may_be_of_a_mac(sample) else ENCODINGS[:-1]
    matches = list(from_bytes(sample, cp_isolation=list(candidates)))
    if not matches:
        try:
            return DecodedText(content.decode("cp1252"), "cp1252", ENCODINGS[1:])
        except UnicodeDecodeError as error:
            raise _no_text(path) from error
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
    return DecodedText(content.decode(chosen), chosen, rivals)


def _may_be_of_a_mac(sample: bytes) -> bool:
    """Return whether there are more small letters in Mac Roman, as Excel writes on a Mac."""
    mac, windows = (sample.decode(name, errors="ignore") for name in ("mac_roman", "cp1252"))
    return sum(map(str.islower, mac)) > sum(map(str.islower, windows))


def _is_mostly_utf8(content: bytes) -> bool:
    """Return whether more letters beyond ASCII are valid UTF-8 than are not."""
    text = content.decode("utf-8", errors="replace")
    damaged = text.count("\N{REPLACEMENT CHARACTER}")
    beyond_ascii = len(text) - len(text.encode("ascii", errors="ignore"))
    return beyond_ascii - damaged > damaged
