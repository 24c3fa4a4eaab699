"""The formats of tables: a reader each, found by the content of a file and its suffix.

A new format is a file with a ``READER``, such as json_lines.py, and a line in ``READERS``.
"""

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from finetune.config.schema import DataConfig
from finetune.data import delimited, documents, json_lines, line_formats, parquet_files, workbook
from finetune.data.packed import Content, unpack
from finetune.data.reader import STREAM_ROWS, RawTable, Reader
from finetune.errors import DataNotFound, DataUnreadable
from finetune.events import Emit

READERS: dict[str, Reader] = {
    "delimited": delimited.READER,
    "json lines": json_lines.READER,
    "parquet": parquet_files.READER,
    "workbook": workbook.READER,
    "json": documents.JSON,
    "yaml": documents.YAML,
    "arff": line_formats.ARFF,
    "fastText": line_formats.FASTTEXT,
}
SUFFIXES = tuple(suffix for reader in READERS.values() for suffix in reader.suffixes)
PACKED_SUFFIXES = (".gz", ".zip")
TABLE_SUFFIXES = (*SUFFIXES, *PACKED_SUFFIXES)
START_BYTES = 4096
WITH_MEMBERS = (workbook.READER, documents.JSON, documents.YAML)
# What a file is that can't be read, by how it begins, and what to do.
SAVE, DOWNLOAD = f"save it as {', '.join(SUFFIXES)}", "download the file itself, in place of a page"
OTHER_FORMATS = {
    rb"\xd0\xcf\x11\xe0": ("an Excel workbook older than 2007", SAVE),
    rb"BZh91AY&SY": ("compressed with bzip2", "unpack it"),
    rb"\xfd7zXZ\0": ("compressed with xz", "unpack it"),
    rb"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it"),
    rb"7z\xbc\xaf|Rar!|(?s:.{257}ustar)": ("a 7z, RAR or tar archive", "unpack it"),
    rb"\x89PNG|\xff\xd8\xff|GIF8": ("a picture", SAVE),
    rb"SQLite format|ARROW1|FEA1|ORC|Obj\x01|\x89HDF|\x93NUMPY": ("a table of another kind", SAVE),
    rb"(?s).{0,3000}?\n[ |:+-]*(-[ |:+-]*[|+]|[|+][ |:+-]*-)[ |:+-]*\r?\n": (
        "a table drawn with bars and dashes, as in Markdown",
        SAVE,
    ),
    rb"\x80": ("a pickle, which can run code and is not read", SAVE),
    rb"%PDF": ("a PDF document", SAVE),
    rb"(?i)\s*<(!doctype html|html|head|body|!--)": ("an HTML page, no table", DOWNLOAD),
    rb"(\xef\xbb\xbf)?\s*<(\?xml|Error)": ("XML, maybe a server's error message", DOWNLOAD),
    rb"[45]\d\d: [A-Z]|(?i:access denied|(entry |file )?not found|forbidden)\W*$": (
        "a server's error message",
        DOWNLOAD,
    ),
    # One object, with nothing behind it.
    rb'(?s)(?=.{0,500}$)\s*\{(?!.*\}[\s,]*\{)\s*("message":[^{}]*)?'
    rb'"(error|errors|detail|status|documentation_url)":.*\}\s*$': (
        "a server's error message",
        DOWNLOAD,
    ),
    rb"version https://git-lfs": (
        "a pointer of Git LFS to a file that is elsewhere",
        "fetch that with git lfs pull",
    ),
}


def read_file(path: Path, options: DataConfig, *, emit: Emit) -> RawTable:
    """Read the table of a file, which may be packed."""
    content, reader = _open(path, options)
    return reader.read(content, options, emit)


def stream_file(path: Path, options: DataConfig, *, emit: Emit) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a file, which may be packed, in pieces, with their values as they are."""
    content, reader = _open(path, options)
    rows = reader.rows(content, options, emit)
    while piece := [values for _, values in islice(rows, STREAM_ROWS)]:
        yield piece


def _open(path: Path, options: DataConfig) -> tuple[Content, Reader]:
    content = unpack(path, TABLE_SUFFIXES, options.member)
    reader = _find_reader(content)
    if options.member and content.path == path and reader not in WITH_MEMBERS:
        raise DataNotFound(
            f"{path} has one table only", remedy=f"leave out --member {options.member}"
        )
    return content, reader


def _find_reader(content: Content) -> Reader:
    """Return the reader of a format, by the first bytes of a file, else its suffix."""
    start = content.start(START_BYTES)
    if not start:
        raise DataUnreadable(f"{content.path} is empty", remedy="copy, download or export it again")
    for reader in READERS.values():
        if reader.first_bytes and start.startswith(reader.first_bytes):
            return reader
    for beginning, (name, remedy) in OTHER_FORMATS.items():
        if re.match(beginning, start):
            raise DataUnreadable(f"{content.path} is {name}", remedy=remedy)
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    by_suffix = (one for one in READERS.values() if content.suffix in one.suffixes)
    by_start = (one for one in READERS.values() if one.start and re.match(one.start, start))
    reader = next(chain(by_suffix, by_start), delimited.READER)
    if reader is delimited.READER and re.match(rb'[\[{]\s*[{"].*:|@relation\s', start):
        reader = next(by_start)
    if reader in (json_lines.READER, documents.JSON):
        return documents.JSON if documents.is_document(content) else json_lines.READER
    return reader
