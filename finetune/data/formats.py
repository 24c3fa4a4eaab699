"""The formats of tables: a reader each, found by the content of a file and its suffix.

A new format is a file with a ``READER``, such as json_lines.py, and a line in ``READERS``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune.config.schema import DataConfig
from finetune.data import delimited, json_lines, parquet_files, workbook
from finetune.data.packed import Content, unpack
from finetune.data.reader import RawTable, Reader
from finetune.errors import DataUnreadable
from finetune.events import Emit

READERS: dict[str, Reader] = {
    "delimited": delimited.READER,
    "json lines": json_lines.READER,
    "parquet": parquet_files.READER,
    "workbook": workbook.READER,
}
SUFFIXES = tuple(suffix for reader in READERS.values() for suffix in reader.suffixes)
PACKED_SUFFIXES = (".gz", ".zip")
# What a file is that can't be read, by its first bytes or, without a known suffix, characters.
OTHER_FORMATS = {
    b"\xd0\xcf\x11\xe0": "an Excel workbook older than 2007",
    b"BZh91AY&SY": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x80": "a pickle, which can run code and is not read",
}
OTHER_TEXTS = {
    b"[": "one JSON array, not one object per line",
    b"__label__": "in fastText's format",
}


def read_file(path: Path, options: DataConfig, *, emit: Emit) -> RawTable:
    """Read the table of a file, which may be packed."""
    content = unpack(path, SUFFIXES)
    return _find_reader(content).read(content, options, emit)


def stream_file(path: Path, options: DataConfig, *, emit: Emit) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, which may be packed, in pieces, with their values as they are."""
    content = unpack(path, SUFFIXES)
    return _find_reader(content).stream(content, options, emit)


def _find_reader(content: Content) -> Reader:
    """Return the reader of a format, by the first bytes of a file, else its suffix."""
    start, suffix = content.start(64), content.name.suffix.lower()
    for reader in READERS.values():
        if reader.first_bytes and start.startswith(reader.first_bytes):
            return reader
    names = [name for first, name in OTHER_FORMATS.items() if start.startswith(first)]
    if not names:
        for reader in READERS.values():
            if suffix in reader.suffixes:
                return reader
        start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
        for reader in READERS.values():
            if reader.first_characters and start.startswith(reader.first_characters):
                return reader
        names = [name for first, name in OTHER_TEXTS.items() if start.startswith(first)]
        if not names:
            return delimited.READER
    raise DataUnreadable(
        f"{content.name} is {names[0]}", remedy=f"save it as {', '.join(SUFFIXES)}"
    )
