"""The bytes of a file: gzip, and archives that hold one table, are unpacked within a limit."""

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from pathlib import Path
from typing import IO, BinaryIO
from zipfile import BadZipFile, ZipFile

from finetune.errors import DataNotFound, DataUnreadable

GZIP, ZIP = b"\x1f\x8b", b"PK\x03\x04"
# Tables become five or ten times as large. What becomes larger by far may fill the memory.
MAX_TIMES = 100
SMALL_BYTES = 2**28


@contextmanager
def reading_explained() -> Iterator[None]:
    """Turn what the system raises over a file or folder that can't be read into our error."""
    try:
        yield
    except OSError as error:
        raise DataUnreadable(
            f"{error.filename} can't be read: {error.strerror}", remedy="check its permissions"
        ) from error


@dataclass(frozen=True)
class Content:
    """The bytes of a file, or what was packed in it, under that one's name."""

    path: Path
    name: Path
    unpacked: bytes | None = None

    def open(self) -> BinaryIO:
        """Open it from its start."""
        if self.unpacked is not None:
            return BytesIO(self.unpacked)
        with reading_explained():
            return self.path.open("rb")

    def start(self, size_bytes: int) -> bytes:
        """Return its first bytes."""
        with self.open() as file:
            return file.read(size_bytes)


def unpack(path: Path, suffixes: Sequence[str] = ()) -> Content:
    """Unpack a file with gzip, or the only table in a zip archive, into memory; others stay."""
    if not os.path.isfile(path):  # no error where a name is too long
        raise DataNotFound(f"there is no file {path}", remedy="check the name")
    content = Content(path, path)
    start = content.start(len(ZIP))
    try:
        if start.startswith(GZIP):
            name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
            with GzipFile(path) as file:
                return Content(path, name, _read(file, path))
        if not start.startswith(ZIP):
            return content
        with ZipFile(path) as archive:
            if "xl/workbook.xml" in archive.namelist():
                # Of a member, no more is read than the size that the archive names.
                _check_size(sum(member.file_size for member in archive.infolist()), path)
                return content
            table = _find_table(archive.namelist(), suffixes, path)
            with archive.open(table) as member:
                return Content(path, path / table, _read(member, path))
    # Passwords are a RuntimeError, unknown compressions a NotImplementedError, damaged places and
    # names a ValueError.
    except (BadZipFile, OSError, EOFError, zlib.error, RuntimeError, ValueError) as error:
        raise DataUnreadable(
            f"{path} can't be unpacked: {error}", remedy="unpack it, and name the table in it"
        ) from error


def _find_table(names: Sequence[str], suffixes: Sequence[str], path: Path) -> str:
    """Return the one file of an archive that has a table's suffix, or is no README."""
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX")]
    tables = [name for name in files if Path(name).suffix.lower() in suffixes]
    found = tables or [name for name in files if not Path(name).name.lower().startswith("readme")]
    if len(found) != 1:
        raise DataUnreadable(
            f"{path} holds {len(found)} tables, not one: {', '.join(found[:5])}",
            remedy="unpack it, and name one table as --data",
        )
    return found[0]


def _read(file: IO[bytes] | GzipFile, path: Path) -> bytes:
    content = file.read(max(SMALL_BYTES, MAX_TIMES * path.stat().st_size) + 1)
    _check_size(len(content), path)
    return content


def _check_size(size_bytes: int, path: Path) -> None:
    if size_bytes > max(SMALL_BYTES, MAX_TIMES * path.stat().st_size):
        raise DataUnreadable(
            f"{path} becomes more than {MAX_TIMES} times as large when it is unpacked",
            remedy="unpack it yourself if you trust it, and name the table in it",
        )
