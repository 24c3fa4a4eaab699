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

from finetune.errors import DataNotFound, DataUnreadable, SeveralTables, explain
from finetune.files import is_there, naming

GZIP, ZIP, EMPTY_ZIP = b"\x1f\x8b", b"PK\x03\x04", b"PK\x05\x06"
# Tables become five or ten times as large. What becomes larger by far may fill the memory.
MAX_TIMES = 100
SMALL_BYTES = 2**28


@contextmanager
def reading_explained() -> Iterator[None]:
    """Turn what the system raises over a file or folder that can't be read into our error."""
    try:
        yield
    except OSError as error:
        known = explain(error)
        raise DataUnreadable(
            f"{error.filename} can't be read: {error.strerror}",
            remedy=known.remedy if known else "check the file",
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
        with reading_explained(), self.open() as file, naming(self.path):
            return file.read(size_bytes)


def choose_member(names: Sequence[str], member: str | None, *, path: Path) -> str:
    """Return the name of the only table in a file, or of the one that an option names."""
    if member is None:
        if len(names) > 1:
            raise SeveralTables(path, names)
        return names[0]
    for name in names:
        if member in (name, Path(name).name, Path(name).stem):
            return name
    raise DataNotFound(
        f"{path} holds no table {member!r}", remedy=f"--member takes one of: {', '.join(names)}"
    )


def unpack(path: Path, suffixes: Sequence[str] = (), member: str | None = None) -> Content:
    """Unpack a file with gzip, or a table in a zip archive, into memory; others stay.

    Of several tables in an archive, ``member`` names one.
    """
    if not os.path.isfile(path):
        what = f"{path} is not a file" if is_there(path) else f"there is no file {path}"
        raise DataNotFound(what, remedy="check the name")
    content = Content(path, path)
    start = content.start(len(ZIP))
    try:
        if start.startswith(GZIP):
            name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
            with GzipFile(path) as file:
                return Content(path, name, _read(file, path))
        if not start.startswith((ZIP, EMPTY_ZIP)):
            return content
        with ZipFile(path) as archive:
            if "xl/workbook.xml" in archive.namelist():
                # Of a member, no more is read than the size that the archive names.
                _check_size(sum(member.file_size for member in archive.infolist()), path)
                return content
            tables = _find_tables(archive.namelist(), suffixes, path)
            table = tables[0] if len(tables) == 1 else choose_member(tables, member, path=path)
            with archive.open(table) as file:
                return Content(path, path / table, _read(file, path))
    # Passwords are a RuntimeError, unknown compressions a NotImplementedError, damaged places and
    # names a ValueError.
    except (BadZipFile, OSError, EOFError, zlib.error, RuntimeError, ValueError) as error:
        raise DataUnreadable(
            f"{path} can't be unpacked: {error}",
            remedy="it may be cut: copy or download it again, or unpack it and name a table in it",
        ) from error


def _find_tables(names: Sequence[str], suffixes: Sequence[str], path: Path) -> list[str]:
    """Return the files of an archive that have a table's suffix, or else are no README."""
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX")]
    tables = [name for name in files if Path(name).suffix.lower() in suffixes]
    found = tables or [name for name in files if not Path(name).name.lower().startswith("readme")]
    if not found:
        raise DataUnreadable(f"{path} holds no files", remedy="pack it again, with a table in it")
    return found


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
