"""Files that are written whole or not at all, JSON, and JSON lines."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from finetune.errors import RunFolderInUseError, WriteError

PARTIAL_SUFFIX = ".partial"
# A pattern of what temporary_path() adds to a name, and of the folders of replacing().
TEMPORARY = f".{'[0-9a-f]' * 32}{PARTIAL_SUFFIX}"
# This mark shows that a cache file is ours. Only such files are deleted.
WRITTEN_BY = {"written_by": "finetune"}
STRICT_JSON: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Name a file in an error of the system, which names none, or a temporary one, by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).endswith(PARTIAL_SUFFIX):
            # If a file to write is reported as missing, its folder is missing.
            is_missing = error.filename and error.errno == errno.ENOENT
            error.filename = str(Path(path).parent if is_missing else path)
        raise


def is_there(path: Path | str) -> bool:
    """Return whether there is a file or folder; OSError if that can't be seen."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise
    return True


def temporary_path(path: Path) -> Path:
    """Return a random name next to a path, under which a file is written until it is whole."""
    return path.with_name(f"{path.name}.{uuid4().hex}{PARTIAL_SUFFIX}")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file so that at any moment it holds the old text or the new one, whole."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write a file so that at any moment it holds the old bytes or the new ones, whole."""
    partial = temporary_path(path)
    try:
        with naming(path):
            with partial.open("xb") as file:
                file.write(content)
            flush_to_disk(partial)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


@contextmanager
def replacing(target: Path, *, last: str) -> Iterator[Path]:
    """Yield an empty folder whose files move to the target at the end, ``last`` after others."""
    partial = target / f".{uuid4().hex}{PARTIAL_SUFFIX}"
    partial.mkdir(parents=True)
    try:
        yield partial
        names = sorted((path.name for path in partial.iterdir()), key=lambda name: name == last)
        for name in names:
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
    """Hold the lock of a file's folder, which the kernel frees if this process dies."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CREAT, 0o666)
    except OSError as error:
        raise WriteError(
            f"{file.parent} may not be written", remedy="copy the run folder, and name the copy"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have deleted it.
            if not os.path.samestat(os.fstat(descriptor), file.stat()):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise RunFolderInUseError(
                f"another process is writing to {file.parent}",
                remedy="wait until it has finished, or choose another folder with --output-dir",
            ) from None
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all; floats read back bit for bit."""
    write_text_atomically(path, json.dumps(value, **STRICT_JSON, indent=2) + "\n")


def write_cache_json(path: Path, value: Any) -> None:
    """Write a value to a cache, if the disk takes it."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON, one a line, all of them or none."""
    write_text_atomically(path, "".join(json.dumps(row, **STRICT_JSON) + "\n" for row in rows))


def append_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append all rows to a JSON Lines file or none, in place of a torn last line."""
    lines = "".join(json.dumps(row, **STRICT_JSON) + "\n" for row in rows).encode()
    with path.open("a+b", buffering=0) as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                end = file.read().rfind(b"\n") + 1
                file.truncate(end)
        try:
            if file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(end)
            raise


def read_json(path: Path) -> Any:
    """Return the value that a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_jsonl(path: Path) -> list[Any]:
    """Return the rows of a file of JSON lines, without a last line that a kill has cut off."""
    *lines, _torn = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_in_thread(files: list[Path]) -> Future[str]:
    """Compute in a thread the sha256 of a file or, of several, of their names and sha256."""

    def digest() -> str:
        digests = [file_sha256(file) for file in files]
        if len(digests) == 1:
            return digests[0]
        lines = (f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    thread = ThreadPoolExecutor(max_workers=1)
    sha256 = thread.submit(digest)
    thread.shutdown(wait=False)
    return sha256


def flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
