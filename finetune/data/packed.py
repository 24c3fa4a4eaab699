"""Packed files: gzip, and archives that hold one table, unpacked in memory and within a limit."""

import os
import zlib
from gzip import GzipFile
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple
from zipfile import BadZipFile, ZipFile

from finetune.errors import DataNotFound, DataUnreadable

SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
PACKED_SUFFIXES = (".gz", ".zip", ".xlsx")
GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
# Tables become a fifth or a tenth. What becomes a hundredth may be made to fill the memory.
MOST_TIMES = 100
SMALL_BYTES = 2**28


class Content(NamedTuple):
    """The bytes of a file, unpacked, and its name before it was packed."""

    content: bytes
    name: Path


def read_content(path: Path) -> Content:
    """Read a file; what is packed with gzip, or alone in a zip archive, is unpacked.

    Nothing is written, so that the paths in an archive do no harm. A workbook, which is an archive
    too, stays as it is.

    Raises:
        DataNotFound: If there is no such file.
        DataUnreadable: If it can't be read or unpacked, becomes too large, or holds several tables.
    """
    if not os.path.isfile(path):  # no error where a name is too long
        raise DataNotFound(f"there is no file {path}", remedy="check the name")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataUnreadable(
            f"{path} can't be read: {error.strerror}", remedy="check that you may read it"
        ) from error
    try:
        if content.startswith(GZIP):
            with GzipFile(fileobj=BytesIO(content)) as file:
                name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
                return Content(_read(file, packed_bytes=len(content), path=path), name)
        if content.startswith(ZIP):
            return _read_archive(content, path=path)
    # Passwords are a RuntimeError, unknown compressions a NotImplementedError, damaged places and
    # names a ValueError.
    except (BadZipFile, OSError, EOFError, zlib.error, RuntimeError, ValueError) as error:
        raise DataUnreadable(
            f"{path} can't be unpacked: {error}", remedy="unpack it, and name the table in it"
        ) from error
    return Content(content, path)


def _read_archive(content: bytes, *, path: Path) -> Content:
    with ZipFile(BytesIO(content)) as archive:
        if "xl/workbook.xml" in archive.namelist():
            # Of a member, no more is read than the size that the archive names.
            size_bytes = sum(member.file_size for member in archive.infolist())
            _check_size(size_bytes, packed_bytes=len(content), path=path)
            return Content(content, path.with_suffix(".xlsx"))
        name = _find_table(archive.namelist(), path=path)
        with archive.open(name) as file:
            return Content(_read(file, packed_bytes=len(content), path=path), path / name)


def _find_table(names: list[str], *, path: Path) -> str:
    """Return the one file of an archive that has a table's suffix, or is no README."""
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX")]
    tables = [name for name in files if Path(name).suffix.lower() in SUFFIXES]
    found = tables or [name for name in files if not Path(name).name.lower().startswith("readme")]
    if len(found) != 1:
        raise DataUnreadable(
            f"{path} does not hold one table, but {', '.join(found[:5]) or 'none'}",
            remedy="unpack it, and name one table as --data",
        )
    return found[0]


def _read(file: IO[bytes] | GzipFile, *, packed_bytes: int, path: Path) -> bytes:
    content = file.read(_limit_bytes(packed_bytes) + 1)
    _check_size(len(content), packed_bytes=packed_bytes, path=path)
    return content


def _limit_bytes(packed_bytes: int) -> int:
    return max(SMALL_BYTES, MOST_TIMES * packed_bytes)


def _check_size(size_bytes: int, *, packed_bytes: int, path: Path) -> None:
    if size_bytes > _limit_bytes(packed_bytes):
        raise DataUnreadable(
            f"{path} becomes more than {MOST_TIMES} times as large when it is unpacked",
            remedy="unpack it yourself if you trust it, and name the table in it",
        )
