"""Which files are ours: the one rule by which anything in a folder is replaced or deleted.

A folder that we make has a marker, ``.finetune.jsonl``. Its first row says what the folder holds,
with a random id; each other row names a file, and is written before that file. Only these files
are replaced or deleted, one by one, then folders that are empty. All else, and every link, belongs
to somebody else and stays.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from finetune.errors import NotARun, NotWritten, RunFolderInUse, RunFolderNotEmpty, UsageError
from finetune.files import (
    PARTIAL_SUFFIX,
    append_jsonl,
    flush_to_disk,
    is_there,
    read_jsonl,
    write_json,
    write_text_atomically,
)

MARKER_NAME = ".finetune.jsonl"
# macOS puts .DS_Store into every folder that the Finder has shown.
IGNORED_NAMES = frozenset({MARKER_NAME, ".DS_Store"})
CONTENTS = {
    "run": "a single run",
    "seeds": "runs of several seeds",
    "folds": "the folds of a cross-validation",
    "sweep": "the trials of a sweep",
}
# What files.temporary_path() adds to a name; a folder has it within the one that it is for.
_TEMPORARY = re.compile(rf"/?\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX}(?=/|$)")
# In such a folder, what safetensors leaves when it is killed.
_OF_SAFETENSORS = re.compile(r"(?<![^/])\.tmp\w{6}$")


@dataclass(frozen=True)
class OwnFolder:
    """A folder that we make for one kind of files, maybe as part of another; it need not exist."""

    path: Path
    kind: str
    parent: "OwnFolder | None" = None

    @property
    def marker(self) -> Path:
        """The file that lists what we wrote."""
        return self.path / MARKER_NAME

    @property
    def names(self) -> dict[str, int]:
        """The relative names of the files that we wrote, or were about to, in that order."""
        rows = _read_marker(self.path) if self.is_ours else []
        return {row["file"]: order for order, row in enumerate(rows) if order}

    @property
    def is_ours(self) -> bool:
        """Whether we have made the folder, for files of this kind."""
        rows = _read_marker(self.path)
        return bool(rows) and rows[0]["kind"] == self.kind

    def check(self) -> bool:
        """Return whether there are files of ours; UsageError unless it is new, empty or ours."""
        another = "choose another folder with --output-dir"
        check_writable(self.path)
        if not is_there(self.path):
            return False
        if self.is_ours:
            return bool(self.names)
        if rows := _read_marker(self.path):
            contents = CONTENTS.get(rows[0]["kind"], f"the files of finetune {rows[0]['kind']}")
            raise RunFolderNotEmpty(f"{self.path} already holds {contents}", remedy=another)
        # A process that was killed at once leaves a marker without a row.
        has_marker = os.path.lexists(self.marker) and self.marker.lstat().st_size
        if has_marker or not {one.name for one in self.path.iterdir()} <= IGNORED_NAMES:
            raise RunFolderNotEmpty(
                f"{self.path} holds files that finetune has not written",
                remedy=f"{another}, or move the files away",
            )
        return False

    @contextmanager
    def make(self, *, exist_ok: bool = True) -> Iterator[None]:
        """Make the folder and lock it; what stays empty is deleted again."""
        if exist_ok:
            self.check()
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        # One system call, which fails if another process was first.
        self.path.mkdir(parents=True, exist_ok=exist_ok)
        try:
            with self.lock(makes=True):
                yield
        finally:
            with suppress(OSError):
                for folder in missing:
                    folder.rmdir()

    @contextmanager
    def lock(self, *, makes: bool = False) -> Iterator[None]:
        """Lock the folder for this process; the kernel frees the lock of one that dies."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT * makes
        try:
            descriptor = os.open(self.marker, flags, 0o666)
        except FileNotFoundError as error:
            raise NotARun(
                f"{self.marker} is missing, which lists the files that may be written",
                remedy="copy a run with its hidden files, or make it again",
            ) from error
        except OSError as error:
            raise NotWritten(
                f"{self.path} may not be written", remedy="copy the run folder, and name the copy"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it before may have deleted it.
                if not os.path.samestat(os.fstat(descriptor), self.marker.stat()):
                    raise BlockingIOError
            except (BlockingIOError, FileNotFoundError):
                raise RunFolderInUse(
                    f"another process is writing to {self.path}",
                    remedy="wait until it has finished, or choose another folder with --output-dir",
                ) from None
            if makes and not os.fstat(descriptor).st_size:
                own_id = self.parent._id_of(self.path.name) if self.parent else uuid4().hex
                first_row = {"tool": "finetune", "kind": self.kind, "id": own_id}
                os.write(descriptor, json.dumps(first_row).encode() + b"\n")
            try:
                # Another process may have used it since the first look.
                self.check()
                yield
            finally:
                # A process without the lock would delete the marker of the one that has it.
                with suppress(OSError):
                    if {one.name for one in self.path.iterdir()} <= IGNORED_NAMES:
                        self.marker.unlink()
        finally:
            os.close(descriptor)

    def _id_of(self, part: str) -> str:
        return f"{_read_marker(self.path)[0]['id']}/{part}"

    def find_foreign(self, *names: str) -> list[str]:
        """Return which of these files are there, or lie in links, and are not ours."""
        listed, foreign = self.names, []
        for name in names:
            path = self.path / name
            is_ours = name in listed and path.is_file() and not path.is_symlink()
            is_taken = os.path.lexists(path) and not is_ours
            if is_taken or self._lies_elsewhere(PurePosixPath(name).parent):
                foreign.append(name)
        return foreign

    def _lies_elsewhere(self, folder: str | PurePosixPath) -> bool:
        """Return whether a folder in this one is a link or a file, or lies in one."""
        parts = PurePosixPath(folder).parts
        places = [self.path.joinpath(*parts[: end + 1]) for end in range(len(parts))]
        return any(
            os.path.lexists(one) and (one.is_symlink() or not one.is_dir()) for one in places
        )

    def claim(self, *names: str) -> None:
        """List files that are about to be written; FileExistsError for one that is not ours."""
        if foreign := self.find_foreign(*names):
            message = f"{foreign[0]} is there, and is not ours: move it away"
            raise FileExistsError(errno.EEXIST, message, str(self.path / foreign[0]))
        self.record(*names)

    def record(self, *names: str) -> None:
        """List files that may have been written already, under names that nobody else uses."""
        listed = self.names
        if new := [{"file": name} for name in dict.fromkeys(names) if name not in listed]:
            if not self.is_ours:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.marker))
            append_jsonl(self.marker, new)
            flush_to_disk(self.marker)

    def write_all(self, files: Mapping[str, str | Mapping[str, Any]]) -> None:
        """Make the folder, and write texts, and mappings as JSON, in place of earlier ones."""
        with self.make():
            self.claim(*files)
            for name, content in files.items():
                if isinstance(content, str):
                    write_text_atomically(self.path / name, content)
                else:
                    write_json(self.path / name, content)

    @contextmanager
    def replacing(self, under: str, *names: str, last: str) -> Iterator[Path]:
        """Yield an empty folder whose files replace ours in the folder ``under`` at the end.

        ``last`` is there only as long as all others are. Without ``names`` in advance, a process
        that is killed leaves files that nobody dares to delete.
        """
        target = self.path / under
        prefix = f"{under}/" if under else ""
        self.claim(*(prefix + name for name in names))
        partial = target / f".{uuid4().hex}{PARTIAL_SUFFIX}"
        partial.mkdir(parents=True)
        try:
            yield partial
            files = [path for path in partial.rglob("*") if path.is_file()]
            files.sort(key=lambda path: (path == partial / last, path))
            written = [path.relative_to(partial) for path in files]
            self.claim(*(prefix + path.as_posix() for path in written))
            for file in files:
                flush_to_disk(file)
            (target / last).unlink(missing_ok=True)
            self.delete(under, keeps=partial)
            for name in written:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                if name == Path(last):
                    flush_to_disk(target)
                os.replace(partial / name, target / name)
            flush_to_disk(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):
                target.rmdir()

    def delete(
        self, under: str = "", *, keeps: Path | None = None, only_temporary: bool = False
    ) -> None:
        """Delete our files below a folder, the last written first, and folders that get empty."""
        ours, found, folders = self.names, list[tuple[int, Path]](), list[Path]()
        if self._lies_elsewhere(under):
            return
        parents = {str(parent) for name in ours for parent in PurePosixPath(name).parents}
        for place, inner, files in os.walk(self.path / under):
            inner[:] = [name for name in inner if Path(place, name) != keeps]
            for path in (Path(place, name) for name in files):
                name = self._name_of(path)
                is_temporary = name != path.relative_to(self.path).as_posix()
                if name in ours and not path.is_symlink() and (is_temporary or not only_temporary):
                    found.append((ours[name], path))
            if self._name_of(Path(place)) in parents:
                folders.append(Path(place))
        for _, path in sorted(found, reverse=True):
            path.unlink()
        for folder in reversed(folders):
            with suppress(OSError):
                folder.rmdir()

    def _name_of(self, path: Path) -> str:
        """Return the relative name of a file, or of the one whose place it will take."""
        name = path.relative_to(self.path).as_posix()
        if _TEMPORARY.search(name):
            name = _OF_SAFETENSORS.sub("model.safetensors", _TEMPORARY.sub("", name))
        return name.lstrip("/") or "."

    def empty(self) -> list[str]:
        """Delete all our files, those of parts too; return the relative names of what stays."""
        self.delete()
        for part in (path for path in self.path.iterdir() if path.is_dir()):
            rows = [] if part.is_symlink() else _read_marker(part)
            if rows and rows[0]["id"] == self._id_of(part.name):
                folder = OwnFolder(part, rows[0]["kind"], self)
                if not folder.empty():
                    folder.marker.unlink()
                    with suppress(OSError):
                        part.rmdir()
        # In place: this process has locked it.
        with self.marker.open("r+b") as marker:
            marker.truncate(len(marker.readline()))
        files = (path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir())
        return sorted(
            str(path.relative_to(self.path)) for path in files if path.name not in IGNORED_NAMES
        )


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` if a folder can't be created, or written to."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "may not be written to" if existing.is_dir() else "is a file"
        remedy = "choose another folder with --output-dir"
        raise UsageError(f"{existing} {reason}", remedy=remedy)


def check_output_file(path: Path, *, overwrite: bool | None = None) -> None:
    """Raise ``UsageError`` for a file that exists, unless it may be overwritten.

    A file that a run or the like has listed never may. None is for commands without --overwrite.
    """
    if not os.path.lexists(path):
        return
    for folder in path.absolute().parents:
        name = path.absolute().relative_to(folder).as_posix()
        if name in (row["file"] for row in _read_marker(folder)[1:]):
            raise UsageError(f"{path} is a file of {folder}", remedy="name another file")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", remedy="name a file")
    if not overwrite:
        another = "move it away" if overwrite is None else "replace it with --overwrite"
        remedy = f"name another file, or {another}"
        raise UsageError(f"{path} already exists", remedy=remedy)


def _read_marker(path: Path) -> list[Any]:
    """Return the rows of a folder's marker; none if we did not make the folder."""
    marker = path / MARKER_NAME
    try:
        if not marker.is_symlink() and (rows := read_jsonl(marker)):
            first, *others = rows
            if first["tool"] == "finetune" and first["kind"] and first["id"]:
                return [first, *(row for row in others if row["file"])]
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return []
