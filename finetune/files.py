"""Atomic writes, locks, digests, JSON and JSON Lines, and escaped control characters."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from finetune.errors import UsageError

PARTIAL_SUFFIX = ".partial"
# In all JSON that is written or printed. Raise it if keys, or the meaning of values, change.
SCHEMA_VERSION = 3
# Marks cache files that this package wrote. Only marked files are deleted.
WRITTEN_BY = {"written_by": "finetune"}
# Digests of the files in a folder, in the format of sha256sum.
SUMS = "SHA256SUMS"
_WITH_DIGEST = {".json", ".jsonl", ".yaml", ".safetensors", ".onnx", ".data"}
STRICT_JSON: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
# Direction marks, embeddings, overrides, isolates, and the line separators in the same range.
_DIRECTION = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION}\ud800-\udfff]")
# A temporary folder in a path, or the end of the name of a temporary file.
_TEMPORARY = re.compile(rf"(/\.|\.)[0-9a-f]{{32}}\{PARTIAL_SUFFIX}")
_IN_SINGLE_LINE = re.compile(f"{_IN_LINES.pattern}|[\t\n]")


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Put the name of a file into an OSError that has no name, or a temporary name."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of Arrow, which has only a message
            raise OSError(errno.EIO, str(error), str(path)) from error
        name = str(error.filename or path)
        final = _TEMPORARY.sub("", name)
        # If a file to write is missing, its folder is missing.
        is_missing = final != name and error.errno == errno.ENOENT
        error.filename = str(Path(final).parent) if is_missing else final
        raise


def is_there(path: Path | str) -> bool:
    """Return whether there is a file or folder; raise ``OSError`` if that is unknown."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return True


def temporary_path(path: Path) -> Path:
    """Return a random temporary path next to a path; delete those that killed processes left."""
    for other in path.parent.glob(f"{glob.escape(path.name)}.*{PARTIAL_SUFFIX}"):
        with suppress(OSError):
            is_left = time.time() - other.lstat().st_mtime > 3600  # not written for an hour
            if is_left and _TEMPORARY.fullmatch(other.name.removeprefix(path.name)):
                other.unlink()
    return path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL_SUFFIX}")


@contextmanager
def replacing_file(path: Path, *, flushes: bool = True) -> Iterator[Path]:
    """Yield a temporary path, whose file replaces another, flushed against power failures."""
    partial = temporary_path(path)
    try:
        with naming(path):
            yield partial
            if flushes:
                flush_to_disk(partial)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def write_text_atomically(path: Path, text: str, *, flushes: bool = True) -> None:
    """Replace a text file atomically."""
    with replacing_file(path, flushes=flushes) as partial:
        partial.write_bytes(text.encode())


@contextmanager
def replacing(target: Path, *, last: str) -> Iterator[Path]:
    """Yield a temporary folder whose files move to the target at the end, ``last`` as the last."""
    partial = target / f".{uuid4().hex}{PARTIAL_SUFFIX}"
    try:
        with naming(target):
            partial.mkdir(parents=True)
            yield partial
            names = sorted((path.name for path in partial.iterdir()), key=lambda name: name == last)
            for name in names:
                # safetensors lets only the owner read its files; ours follow the user's umask.
                (partial / name).chmod(partial.stat().st_mode & 0o666)
                flush_to_disk(partial / name)
            (target / last).unlink(missing_ok=True)
            for name in names:
                if name == last:
                    flush_to_disk(target)
                os.replace(partial / name, target / name)
            flush_to_disk(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            target.rmdir()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock the folder of a file. The kernel releases the lock if this process dies."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have deleted the lock file.
            if not os.path.samestat(os.fstat(descriptor), file.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise UsageError(
                f"another process is writing to {file.parent}",
                remedy="wait until it has finished, or choose another folder with --output-dir",
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # a file that stays locks nothing
                file.unlink()
    finally:
        with suppress(OSError):
            os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically. Floats survive the round trip exactly."""
    write_text_atomically(path, json.dumps(value, **STRICT_JSON, indent=2) + "\n")


def write_cache_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a value to a cache file, with its digest; ignore errors of the disk."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**value, "sha256": _digest(value)})


def read_cache_json(path: Path) -> Any:
    """Return the value in a cache file; raise ``OSError`` or ``ValueError`` unless it is intact."""
    value = read_json(path)
    if not isinstance(value, dict) or value.pop("sha256", None) != _digest(value):
        raise ValueError(f"{path} changed after it was written")
    return value


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, **STRICT_JSON).encode()).hexdigest()


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, atomically."""
    write_text_atomically(path, "".join(json.dumps(row, **STRICT_JSON) + "\n" for row in rows))


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append all rows or none to a JSON Lines file, and replace an incomplete last line."""
    lines = "".join(json.dumps(row, **STRICT_JSON) + "\n" for row in rows).encode()
    end = None
    try:
        with naming(path), path.open("a+b", buffering=0) as file:
            if end := file.seek(0, os.SEEK_END):
                file.seek(end - 1)
                if file.read(1) != b"\n":
                    file.seek(0)
                    end = file.read().rfind(b"\n") + 1
                    file.truncate(end)
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:  # maybe of a network drive, which reports it when the file is closed
        if end is not None:
            os.truncate(path, end)
        raise


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file; an error names it."""
    with naming(path):
        return path.read_bytes()


def read_json(path: Path) -> Any:
    """Return the value in an intact JSON file."""
    return json.loads(read_bytes(intact(path)).decode())


def read_jsonl(path: Path) -> list[Any]:
    """Return the rows of an intact JSON Lines file, without an incomplete last line."""
    *lines, _incomplete = read_bytes(intact(path)).split(b"\n")
    return [json.loads(line) for line in lines]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size, time and SHA-256 of a file, for ``has_changed``."""
    stat, sha256 = path.stat(), file_sha256(path)
    return {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}


def has_changed(path: Path, described: Mapping[str, Any]) -> bool:
    """Return whether a file has other bytes. They are only read if its time differs."""
    stat, size_bytes = path.stat(), described["size_bytes"]
    if (stat.st_size, stat.st_mtime_ns) == (size_bytes, described["mtime_ns"]):
        return False
    return bool(stat.st_size != size_bytes or file_sha256(path) != described["sha256"])


def write_sums(folder: Path) -> None:
    """Write the digests of the files in a folder that programs read."""
    files = sorted(file for file in folder.iterdir() if file.suffix in _WITH_DIGEST)
    lines = (f"{file_sha256(file)}  {file.name}\n" for file in files)
    write_text_atomically(folder / SUMS, "".join(lines))


def intact(file: Path) -> Path:
    """Return the path of a file; raise ``UsageError`` if it changed since its digest was noted."""
    sums = file.with_name(SUMS)
    known = read_bytes(sums).decode(errors="replace") if is_there(sums) and file.is_file() else ""
    digest = re.search(rf"(?m)^([0-9a-f]{{64}})  {re.escape(file.name)}$", known)
    if digest and digest[1] != file_sha256(file):
        raise UsageError(
            f"{file} changed after it was written: {sums} has another digest",
            remedy=f"restore it or make it again; if you edited it, delete its line in {SUMS}",
        )
    return file


def hash_in_thread(files: list[Path]) -> Future[str]:
    """Compute in a thread the SHA-256 of a file, or of the names and hashes of several files."""

    def digest() -> str:
        if len(files) == 1:
            return file_sha256(files[0])
        lines = (f"{file.name} {file_sha256(file)}\n" for file in files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    thread = ThreadPoolExecutor(max_workers=1)
    sha256 = thread.submit(digest)
    thread.shutdown(wait=False)
    return sha256


def flush_to_disk(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def escape_controls(text: str) -> str:
    r"""Return a text with codes for control characters and direction marks; keep lines and tabs.

    >>> escape_controls("a\x1b[2J\n\u202eb")
    'a\\u001b[2J\n\\u202eb'
    """
    return _IN_LINES.sub(_code, text)


def escape_line(text: str) -> str:
    r"""Return a text as one line, with codes for control characters and direction marks.

    >>> escape_line("a\tb\r\n")
    'a\\u0009b\\u000d\\u000a'
    """
    return _IN_SINGLE_LINE.sub(_code, text)


def _code(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
