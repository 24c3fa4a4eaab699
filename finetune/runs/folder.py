"""The run folder: where each file lies, and who may write to it."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from finetune.errors import ModelUnsupported, NotARun, RunFolderInUse, RunFolderNotEmpty, UsageError
from finetune.files import PARTIAL_SUFFIX, read_json

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.tasks.base import Task

LOCK_NAME = ".lock"
# macOS puts .DS_Store into every folder that the Finder has shown.
NAMES_THAT_DO_NOT_COUNT = frozenset({LOCK_NAME, ".DS_Store"})


@dataclass
class RunFolder:
    """Know where each file of one run lies.

    Args:
        path: The folder; it need not exist.
    """

    path: Path

    def __post_init__(self) -> None:
        self.config_file = self.path / "config.yaml"
        # What the run was made from, and with which versions on which machine.
        self.manifest_file = self.path / "manifest.json"
        self.environment_file = self.path / "environment.json"
        # A row for each report of the training loop and each validation.
        self.metrics_file = self.path / "metrics.jsonl"
        self.warnings_file = self.path / "warnings.jsonl"
        # A row for each text of the test split.
        self.predictions_file = self.path / "predictions.jsonl"
        # Metrics at the end and on the way, under the names that Trainer gives them.
        self.results_file = self.path / "all_results.json"
        self.state_file = self.path / "trainer_state.json"
        self.report_file = self.path / "report.html"
        # What save_pretrained writes, and the model card.
        self.model_folder = self.path / "model"
        self.onnx_folder = self.path / "onnx"
        self.coreml_folder = self.path / "coreml"
        self.tensorboard_folder = self.path / "tensorboard"
        # A folder step-N with what is needed to resume after N updates.
        self.checkpoints_folder = self.path / "checkpoints"
        # An earlier run, until the one that takes its place has a model.
        self.previous_run = self.path / "previous"
        self.layout = [one for name, one in vars(self).items() if name != "path"]
        # The trained parameters of the best model so far; gone when the run has finished.
        self.best_checkpoint = self.checkpoints_folder / "best"

    @property
    def inference_file(self) -> Path:
        """Beside the model: how it reads texts."""
        return self.model_folder / "inference.json"

    @property
    def confidences_file(self) -> Path:
        """Beside the model: how sure it was of its answers to validation rows."""
        return self.model_folder / "confidences.json"

    @property
    def has_finished(self) -> bool:
        """Whether the run has written all that it leaves."""
        return self.results_file.is_file() and not self.best_checkpoint.exists()

    @property
    def can_resume(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        names = (one.name for one in self.checkpoints_folder.glob("step-*"))
        # A kill leaves step-N.partial.
        return any(name.removeprefix("step-").isdecimal() for name in names)


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
    _make(path)
    with _removed_if_empty(missing), lock(folder):
        # Another process may have finished a run here since the first look.
        check_run_folder(folder, overwrite=overwrite)
        try:
            yield folder
        except BaseException:
            put_back_previous_run(folder)
            raise


@contextmanager
def reserve_new_folder(parent: Path, name: str) -> Iterator[RunFolder]:
    """Hold the first of ``parent/name``, ``parent/name-2``, ... that no other process has taken.

    Raises:
        UsageError: If the folder can't be made.
    """
    check_writable(parent)
    missing = [one for one in (parent, *parent.parents) if not one.exists()]
    _make(parent)
    for path in _numbered(parent, name):
        try:
            # One system call, which fails if another process was first.
            path.mkdir()
        except FileExistsError:
            continue
        with _removed_if_empty([path, *missing]), lock(RunFolder(path)):
            yield RunFolder(path)
        return


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} can't be made: {error.strerror}",
            remedy="choose another folder with --output-dir",
        ) from error


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


def put_back_previous_run(folder: RunFolder) -> None:
    """Undo ``set_aside_previous_run`` where the new run has left nothing to resume or to use."""
    if not folder.previous_run.exists() or folder.can_resume or folder.model_folder.exists():
        return
    empty_folder(folder)
    for entry in folder.previous_run.iterdir():
        os.replace(entry, folder.path / entry.name)
    folder.previous_run.rmdir()


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


def open_run_folder(path: Path, *, needs_model: bool = True) -> RunFolder:
    """Return the run that a folder holds, the best of several seeds.

    One that was interrupted has no model yet.

    Raises:
        NotARun: If there is no such folder, or it holds no run, or the model is missing.
    """
    folder = RunFolder(_best_of_seeds(path) if seeds_file(path).is_file() else path)
    if not folder.config_file.is_file():
        raise NotARun(
            f"{path} is not a run folder: it has no {folder.config_file.name}",
            remedy="name the folder that finetune run has written, such as runs/trec-minilm-full",
        )
    if needs_model and not folder.model_folder.is_dir():
        raise NotARun(
            f"the run in {path} has not saved its model yet",
            remedy="finish it with --resume-from-checkpoint",
        )
    return folder


def seeds_file(path: Path) -> Path:
    """Return what names the runs in a folder of several seeds."""
    return path / "seeds.json"


def read_seeds(path: Path) -> list[int]:
    """Return the seeds of the runs in a folder of several seeds.

    Raises:
        NotARun: If its file can't be read.
    """
    return [int(seed) for seed in _read_seeds_file(path, "seeds")]


def _best_of_seeds(path: Path) -> Path:
    best = _read_seeds_file(path, "best")
    if best is None:
        raise NotARun(
            f"{path} holds runs of several seeds, and which is the best is not known",
            remedy=f"name one of them, such as {path}/seed-{read_seeds(path)[0]}",
        )
    return path / str(best)


def _read_seeds_file(path: Path, name: str) -> Any:
    try:
        return read_json(seeds_file(path))[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotARun(
            f"{seeds_file(path)} can't be read",
            remedy="name one of the runs beside it, or start anew with --overwrite",
        ) from error


def load_saved_config(folder: RunFolder) -> "Config":
    """Return the configuration that a run was made with."""
    from finetune.config.load import load_config

    file = str(folder.config_file)
    return load_config(file=file, environment={}, flags={}, assignments=()).config


def load_saved_task(folder: RunFolder) -> "Task":
    """Return the task of a run's model.

    Raises:
        ModelUnsupported: If its config can't be read.
    """
    from finetune.tasks.choose import read_task

    try:
        return read_task(read_json(folder.model_folder / "config.json"))
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnsupported(
            f"the model of {folder.path} is damaged: its config.json can't be read",
            remedy="make the run again",
        ) from error


@contextmanager
def lock(folder: RunFolder) -> Iterator[None]:
    """Keep other processes from writing to an existing run folder.

    The kernel frees the lock of a process that dies, so that a lock file left behind stops nobody.

    Raises:
        RunFolderInUse: At once, if another process holds the lock.
    """
    file_lock = FileLock(folder.path / LOCK_NAME, blocking=False)
    try:
        file_lock.acquire()
    except Timeout:
        raise RunFolderInUse(
            f"another process is writing to {folder.path}",
            remedy="wait until it has finished, or choose another folder with --output-dir",
        ) from None
    try:
        yield
    finally:
        # Only the holder may remove the file: once released, it may be another process's lock.
        Path(file_lock.lock_file).unlink(missing_ok=True)
        file_lock.release()


def _is_empty(path: Path) -> bool:
    return all(entry.name in NAMES_THAT_DO_NOT_COUNT for entry in path.iterdir())


def _holds_only_a_run(folder: RunFolder) -> bool:
    names = {entry.name.removesuffix(PARTIAL_SUFFIX) for entry in folder.path.iterdir()}
    known = {path.name for path in folder.layout} | NAMES_THAT_DO_NOT_COUNT
    return names <= known and not names.isdisjoint({folder.config_file.name, LOCK_NAME})
