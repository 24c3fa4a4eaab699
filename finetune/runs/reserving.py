"""Who may write to a run folder: it is reserved in one step, and held by a lock."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from finetune.errors import NotWritten, RunFolderInUse, RunFolderNotEmpty, UsageError
from finetune.files import PARTIAL_SUFFIX
from finetune.runs.folder import RunFolder

LOCK_NAME = ".lock"
# macOS puts .DS_Store into every folder that the Finder has shown.
NAMES_THAT_DO_NOT_COUNT = frozenset({LOCK_NAME, ".DS_Store"})


@contextmanager
def reserve_folder(path: Path, *, overwrite: bool) -> Iterator[RunFolder]:
    """Hold a folder for a new run, and remove it again if nothing was written into it.

    Args:
        path: Where; missing parents are made too.
        overwrite: Take a folder that holds an earlier run, which is put back if nothing comes of
            the new one.

    Raises:
        RunFolderNotEmpty: If the folder holds a run and may not be overwritten, or holds
            something that no run wrote.
        RunFolderInUse: If another process is writing to it.
    """
    folder = RunFolder(path)
    check_run_folder(folder, overwrite=overwrite)
    missing = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(path, error) from error
    with _removed_if_empty(missing), lock(folder):
        # Another process may have finished a run here since the first look.
        check_run_folder(folder, overwrite=overwrite)
        with previous_run_put_back(folder, [folder]):
            yield folder


@contextmanager
def reserve_new_folder(parent: Path, name: str) -> Iterator[RunFolder]:
    """Hold the first of ``parent/name``, ``parent/name-2``, ... that no other process has taken.

    Raises:
        UsageError: If the folder can't be made.
    """
    check_writable(parent)
    missing = [one for one in (parent, *parent.parents) if not one.exists()]
    for path in _numbered(parent, name):
        try:
            # One system call, which fails if another process was first. That may have made the
            # parent too, and give it back now.
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_made(path, error) from error
        with _removed_if_empty([path, *missing]), lock(RunFolder(path)):
            yield RunFolder(path)
        return


def _not_made(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"{path} can't be made: {error.strerror}", remedy="choose another folder with --output-dir"
    )


@contextmanager
def _removed_if_empty(folders: Sequence[Path]) -> Iterator[None]:
    """Remove folders, the inner first, unless something was written into them."""
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in folders:
                folder.rmdir()


def set_aside_previous_run(folder: RunFolder) -> None:
    """Move what an earlier run left to ``previous``, unless that holds one with more to lose."""
    if not folder.previous_run.exists():
        previous = _entries(folder)
        if previous:
            folder.previous_run.mkdir()
        for entry in previous:
            os.replace(entry, folder.previous_run / entry.name)
    elif folder.model_folder.exists():
        delete_previous_run(folder)
        set_aside_previous_run(folder)
    else:
        empty_folder(folder)


@contextmanager
def previous_run_put_back(folder: RunFolder, new: Sequence[RunFolder]) -> Iterator[None]:
    """Undo ``set_aside_previous_run`` where new runs fail and leave nothing to resume or to use."""
    try:
        yield
    except BaseException:
        holds_progress = any(one.holds_progress for one in new)
        if folder.is_in_place and folder.previous_run.exists() and not holds_progress:
            empty_folder(folder)
            for entry in folder.previous_run.iterdir():
                os.replace(entry, folder.path / entry.name)
            folder.previous_run.rmdir()
        raise


def delete_previous_run(folder: RunFolder) -> None:
    """Delete what ``set_aside_previous_run`` has kept; links, and not what they point to."""
    if folder.previous_run.exists():
        shutil.rmtree(folder.previous_run)


def empty_folder(folder: RunFolder) -> None:
    """Delete all of a run but its lock and the run before it; links, not what they point to."""
    for entry in _entries(folder):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _entries(folder: RunFolder) -> list[Path]:
    kept = {LOCK_NAME, folder.previous_run.name}
    return [entry for entry in folder.path.iterdir() if entry.name not in kept]


def check_run_folder(folder: RunFolder, *, overwrite: bool) -> None:
    """Make sure, and change nothing, that a new run may have the folder.

    Raises:
        RunFolderNotEmpty: As for ``reserve_folder``.
        UsageError: If the folder can't be made or written to.
    """
    path = folder.path
    if path.exists() and not path.is_dir():
        raise RunFolderNotEmpty(f"{path} is a file", remedy="choose a folder with --output-dir")
    check_writable(path)
    if not path.exists() or _is_empty(path):
        return
    if not _holds_only_a_run(folder):
        raise RunFolderNotEmpty(
            f"{path} holds files that are not a run's",
            remedy="choose another folder with --output-dir, or move the files away",
        )
    if not overwrite:
        raise RunFolderNotEmpty(
            f"{path} already holds a run",
            remedy="continue it with --resume-from-checkpoint, delete it with --overwrite, "
            "or choose another folder with --output-dir",
        )


def check_writable(path: Path) -> None:
    """Make sure, and change nothing, that a folder can be made, or written to.

    Raises:
        UsageError: If not.
    """
    existing = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(
            f"{path} can't be made or written to, because of {existing}",
            remedy="choose another folder with --output-dir",
        )


def next_free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``parent/name``, ``parent/name-2``, ... that does not exist."""
    return next(path for path in _numbered(parent, name) if not path.exists())


def _numbered(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    yield from (parent / f"{name}-{number}" for number in count(2))


@contextmanager
def lock(folder: RunFolder) -> Iterator[RunFolder]:
    """Keep other processes from writing to an existing run folder, and yield it.

    The kernel frees the lock of a process that dies, so that a lock file left behind stops nobody.

    Raises:
        RunFolderInUse: At once, if another process holds the lock.
        NotWritten: If the folder may not be written.
    """
    file_lock = FileLock(folder.path / LOCK_NAME, blocking=False)
    try:
        file_lock.acquire()
    except Timeout:
        raise RunFolderInUse(
            f"another process is writing to {folder.path}",
            remedy="wait until it has finished, or choose another folder with --output-dir",
        ) from None
    except PermissionError as error:
        raise NotWritten(
            f"{folder.path} may not be written", remedy="copy the run folder, and name the copy"
        ) from error
    try:
        folder.hold()
        yield folder
    finally:
        # Only the holder may remove the file: once released, it may be another process's lock.
        if folder.is_in_place:
            Path(file_lock.lock_file).unlink(missing_ok=True)
        file_lock.release()


def _is_empty(path: Path) -> bool:
    return all(entry.name in NAMES_THAT_DO_NOT_COUNT for entry in path.iterdir())


def _holds_only_a_run(folder: RunFolder) -> bool:
    names = {entry.name.removesuffix(PARTIAL_SUFFIX) for entry in folder.path.iterdir()}
    known = {path.name for path in folder.layout} | NAMES_THAT_DO_NOT_COUNT
    return names <= known and not names.isdisjoint({folder.config_file.name, LOCK_NAME})
