"""Lists files in folders and archives, unpacks files, and rejects files that aren't tables.

words.toml contains the words and patterns that identify columns, splits, encodings and files.
"""

import bz2
import gzip
import lzma
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from zipfile import BadZipFile, ZipFile

from finetune.errors import (
    MAX_NAMES,
    DataNotFoundError,
    DataUnreadableError,
    SeveralTablesError,
    explained,
)
from finetune.events import WarningMessage, emit
from finetune.files import is_there, naming

WORDS: dict[str, Any] = tomllib.loads(
    resources.files("finetune.data").joinpath("words.toml").read_text("utf-8")
)
SPLIT_BY_WORD = {word: name for name, words in WORDS["splits"].items() for word in words.split()}
ZIP, EMPTY_ZIP, OLE = b"PK\x03\x04", b"PK\x05\x06", b"\xd0\xcf\x11\xe0"
UNPACKERS: dict[bytes, Any] = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh\d1AY&SY": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
}
PACKED_SUFFIXES = (".gz", ".bz2", ".xz")
# Office files are also ZIP archives.
WORKBOOK = re.compile(r"xl/workbook\.(xml|bin)")
OFFICE = re.compile(
    rf"\[Content_Types\]\.xml|{WORKBOOK.pattern}|mimetype"
    r"|(.*/)?(Index\.zip|index\.apxl|Index/.*\.iwa)"
)
SPREADSHEET = b"application/vnd.oasis.opendocument.spreadsheet"
# Limits that keep a project or a home folder from being read by mistake.
MAX_DEPTH = 5
HIDDEN = re.compile(r"(.*/)?(\.(?!/)|__MACOSX/)")
ABOUT = re.compile(r"[._]|readme|licen[cs]e|citation|requirements|dataset_info", re.IGNORECASE)
PART = re.compile(r"part-?\d|\d-of-\d")
START_BYTES = 4096


@dataclass(frozen=True)
class Content:
    """The bytes of a file, unpacked if needed. The path can continue inside an archive."""

    path: Path
    unpacked: bytes | None = None

    @property
    def suffix(self) -> str:
        """The lowercase suffix of the file, or of the file packed in it."""
        path = Path(self.path.name.lower())
        is_packed = self.unpacked is not None and path.suffix in PACKED_SUFFIXES
        return Path(path.stem).suffix if is_packed else path.suffix

    def open(self) -> BinaryIO:
        """Open the file at its start."""
        return self.path.open("rb") if self.unpacked is None else BytesIO(self.unpacked)

    def start(self, size_bytes: int) -> bytes:
        """Return the first bytes."""
        with self.open() as file, naming(self.path):
            return file.read(size_bytes)


def holds_files(path: Path) -> bool:
    """Return whether a path is a folder or an archive, but not an office document."""
    if os.path.isdir(path):  # false for a name that is too long
        return True
    if not os.path.isfile(path) or not Content(path).start(len(ZIP)).startswith((ZIP, EMPTY_ZIP)):
        return False
    with explained("archive", path=path), ZipFile(path) as archive:
        return not any(map(OFFICE.fullmatch, archive.namelist()))


def names_in(path: Path) -> list[str]:
    """Return the names of the visible files in a folder or archive."""
    if path.is_dir():
        # Hidden folders, such as .git, can contain very many files.
        patterns = ["/".join(["[!.]*"] * depth) for depth in range(1, MAX_DEPTH + 1)]
        files = [file for pattern in patterns for file in path.glob(pattern) if file.is_file()]
        names = [file.relative_to(path).as_posix() for file in files]
    else:
        with explained("archive", path=path), ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name and not name.endswith("/")]
    if shown := sorted(name for name in names if not HIDDEN.match(name)):
        return shown
    raise DataNotFoundError(f"{path} contains no files", remedy="pack it again, or pass a table")


def read_members(path: Path, names: Sequence[str]) -> list[Content]:
    """Return files of a folder or archive. Archives are unpacked into memory."""
    if path.is_dir():
        return [_unpack_file(Content(path / name)) for name in names]
    with explained("archive", path=path), ZipFile(path) as archive:
        return [_unpack_file(Content(path / name, archive.read(name))) for name in names]


def unpack(path: Path, suffixes: Sequence[str] = (), member: str | None = None) -> Content:
    """Return a file, or the only or chosen table of a folder or archive."""
    if holds_files(path):
        names = names_in(path)
        tables = names if member else find_tables(names, suffixes) or names
        return read_members(path, [choose_member(tables, member, path=path)])[0]
    if not os.path.isfile(path):
        what = f"{path} is not a file" if is_there(path) else f"file not found: {path}"
        raise DataNotFoundError(what, remedy="check the path")
    return _unpack_file(Content(path))


def _unpack_file(content: Content) -> Content:
    for beginning, open_packed in UNPACKERS.items():
        if re.match(beginning, content.start(10)):
            with content.open() as packed, explained("archive", path=content.path):
                return Content(content.path, open_packed(packed).read())
    return content


def find_tables(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the topmost tables: by suffix, by split name, or the only file."""
    depths = {name: len(PurePosixPath(name).parts) for name in names}
    shown = without_about(names)
    for depth in sorted({depths[name] for name in shown}):
        level = [name for name in shown if depths[name] == depth]
        tables = [name for name in level if name.lower().endswith(tuple(suffixes))]
        if tables or "train" in splits_named(level):
            return tables or level
    return shown if len(shown) == 1 else []


def without_about(names: Iterable[str]) -> list[str]:
    """Drop files that describe a dataset, such as its license."""
    return [name for name in names if not ABOUT.match(PurePosixPath(name).name)]


def report_ignored(
    path: Path, names: Iterable[str], used: Sequence[Path], suffixes: Sequence[str]
) -> None:
    """Warn about unused tables in a file, or anywhere in a folder or archive."""
    files = without_about(names_in(path)) if holds_files(path) else []
    tables = dict.fromkeys(
        [*names, *(name for name in files if name.lower().endswith((*suffixes,)))]
    )
    if others := [name for name in tables if path / name not in used]:
        listed = ", ".join(others[:MAX_NAMES]) + ", …" * (len(others) > MAX_NAMES)
        emit(WarningMessage(f"these tables of {path} are ignored: {listed}"))


def choose_member(names: Sequence[str], member: str | None, *, path: Path) -> str:
    """Return the name of the only table in a file, or of the table set by an option."""
    if member is None:
        if len(names) > 1:
            raise SeveralTablesError(path, names)
        return names[0]
    for name in sorted(names, key=lambda name: name != member):  # first the whole name
        if member in (name, Path(name).name, Path(name).stem):
            return name
    remedy = f"choose a --table from: {', '.join(names)}"
    raise DataNotFoundError(f"{path} contains no table {member!r}", remedy=remedy)


def find_split(name: str) -> str:
    """Return the split of the last known word in a name, or "" for none."""
    words = [SPLIT_BY_WORD.get(word, "") for word in re.split(r"[\W_]|\d", name.casefold())]
    return next(filter(None, reversed(words)), "")


def splits_named(names: Sequence[str]) -> dict[str, list[str]]:
    """Group tables into splits by their names. Return an empty dict if ambiguous.

    >>> splits_named(["in/train_1.csv", "in/train_2.csv", "x_test.csv", "sample.csv"])
    {'train': ['in/train_1.csv', 'in/train_2.csv'], 'test': ['x_test.csv']}
    >>> splits_named(["part-0.csv", "part-1.csv"])
    {'train': ['part-0.csv', 'part-1.csv']}
    >>> splits_named(["train.csv", "train_small.csv", "train_a.csv"])["train"]
    ['train.csv']
    """
    if all(map(PART.search, names)) and len({re.sub(r"\d", "", name) for name in names}) == 1:
        return {"train": list(names)}
    splits: dict[str, list[str]] = {}
    for name in names:
        if split := find_split(name):
            splits.setdefault(split, []).append(name)
    for split, split_names in splits.items():
        if len({re.sub(r"\d", "", name) for name in split_names}) > 1:
            plain = [name for name in split_names if Path(name).stem.casefold() in SPLIT_BY_WORD]
            if len(plain) != 1:
                return {}
            splits[split] = plain
    return splits


def is_workbook(content: Content) -> bool:
    """Return whether a file is a readable spreadsheet: .xlsx, .xlsb, .xls or .ods."""
    if content.start(len(OLE)) == OLE:
        return content.suffix not in WORDS["documents"]
    names = _names_in_zip(content)
    if "mimetype" in names:
        with content.open() as file, ZipFile(file) as archive:
            return archive.read("mimetype").startswith(SPREADSHEET)
    return any(map(WORKBOOK.fullmatch, names))


def reject_foreign(content: Content) -> None:
    """Raise an error for an unsupported file, with its type and how to export it."""
    start, names = content.start(START_BYTES), _names_in_zip(content)
    is_text = b"\0" not in start and not start.startswith((b"PK", b"{\\rtf", b"bplist"))
    if not is_text or content.suffix in (".yml", ".yaml"):
        reject_document(content.path, content.suffix)
    reject_parts(content.path, names)
    if names:
        raise _not_a_table(content.path, "a ZIP archive", "unpack")
    if start.startswith(ZIP):
        again = "copy, download or export it again"
        raise _not_a_table(content.path, "a damaged spreadsheet or ZIP archive", again)
    for beginning, kind, remedy in WORDS["beginnings"]:
        if re.match(beginning.encode(), start):
            raise _not_a_table(content.path, kind, remedy)


def reject_parts(path: Path, names: Iterable[str]) -> None:
    """Raise an error for an archive or folder that contains the files of a document."""
    for part, document in WORDS["parts"].items():
        if any(re.fullmatch(part, name) for name in names):
            raise _not_a_table(path, *document)


def reject_document(path: Path, suffix: str) -> None:
    """Raise an error for a file or folder with the suffix of a document."""
    if document := WORDS["documents"].get(suffix):
        raise _not_a_table(path, *document)


def _not_a_table(path: Path, kind: str, remedy: str) -> DataUnreadableError:
    remedy = WORDS["remedies"].get(remedy, remedy).replace("FILE", path.name)
    return DataUnreadableError(f"{path} is {kind}", remedy=remedy)


def _names_in_zip(content: Content) -> list[str]:
    """Return the names in a ZIP file, or none if it is damaged or not a ZIP file."""
    if content.start(len(ZIP)) != ZIP:
        return []
    try:
        with content.open() as file, ZipFile(file) as archive:
            return archive.namelist()
    except BadZipFile:
        return []
