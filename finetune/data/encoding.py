"""Bytes of a file become text."""

import codecs
from pathlib import Path
from typing import NamedTuple

from finetune.errors import DataUnreadable

BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: ("utf-8-sig", "UTF-8 with a byte-order mark"),
    codecs.BOM_UTF16_LE: ("utf-16", "UTF-16"),
    codecs.BOM_UTF16_BE: ("utf-16", "UTF-16"),
}


class DecodedText(NamedTuple):
    """A file's text, and the name of the encoding that it was in."""

    text: str
    encoding: str


def decode(content: bytes, *, path: Path) -> DecodedText:
    """Return a file's text: UTF-16 or UTF-8 as its first bytes say, else UTF-8 or Windows-1252.

    Args:
        content: The bytes.
        path: What errors call the file.

    Raises:
        DataUnreadable: If the bytes are no text, or UTF-8 that is damaged in places.
    """
    try:
        decoded = _decode(content)
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataUnreadable(
            f"line {line} of {path} is damaged {error.encoding.upper()}: {error.reason}, byte"
            f" {error.start + 1} of the file",
            remedy="write the line anew, or export the whole file as UTF-8",
        ) from error
    if "\0" in decoded.text:
        raise DataUnreadable(
            f"{path} holds zero bytes, as no text does", remedy="export it as UTF-8"
        )
    return decoded


def _decode(content: bytes) -> DecodedText:
    for mark, (codec, encoding) in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return DecodedText(content.decode(codec), encoding)
    try:
        return DecodedText(content.decode("utf-8"), "UTF-8")
    except UnicodeDecodeError:
        if _is_mostly_utf8(content):
            raise
    try:
        return DecodedText(content.decode("cp1252"), "Windows-1252")
    except UnicodeDecodeError:  # five bytes have no meaning in it
        return DecodedText(content.decode("iso-8859-1"), "ISO-8859-1")


def _is_mostly_utf8(content: bytes) -> bool:
    """Return whether more letters beyond ASCII read well as UTF-8 than do not."""
    text = content.decode("utf-8", errors="replace")
    damaged = text.count("\N{REPLACEMENT CHARACTER}")
    beyond_ascii = len(text) - len(text.encode("ascii", errors="ignore"))
    return beyond_ascii - damaged > damaged
