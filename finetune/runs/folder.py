"""A run folder: where each file lies, who may write to it, and how it is read."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.config.schema import Config, change_options
from finetune.errors import NotARun, NotWritten, RunFolderInUse, RunFolderNotEmpty, UsageError
from finetune.files import PARTIAL_SUFFIX, read_json, read_jsonl

if TYPE_CHECKING:
    from finetune.tasks.base import Task

# Where runs are written, in the current folder.
RUNS_FOLDER = Path("runs")
LOCK_NAME = ".lock"
# macOS puts .DS_Store into every folder that the Finder has shown.
IGNORED_NAMES = frozenset({LOCK_NAME, ".DS_Store"})

T = TypeVar("T")


@dataclass
class RunFolder:
    """The folder of one run, which need not exist."""

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
        # Folders step-N with what is needed to resume after N steps, and best-N with the best model
        # so far; gone when the run has finished.
        self.checkpoints_folder = self.path / "checkpoints"
        # An earlier run, until the one that overwrites it has a model.
        self.previous_run = self.path / "previous"
        self._layout = [path for name, path in vars(self).items() if name != "path"]
        # How the model reads texts, and how confident it was on validation rows.
        self.inference_file = self.model_folder / "inference.json"
        self.confidences_file = self.model_folder / "confidences.json"

    @property
    def has_finished(self) -> bool:
        """Whether the run has written all its files."""
        return self.results_file.is_file() and not self.checkpoints_folder.exists()

    @property
    def can_resume(self) -> bool:
        """Whether there is a checkpoint to resume from, and the configuration of its run."""
        names = (path.name for path in self.checkpoints_folder.glob("step-*"))
        # A kill leaves step-N.partial.
        has_checkpoint = any(name.removeprefix("step-").isdecimal() for name in names)
        return has_checkpoint and self.config_file.is_file()

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume, or everything."""
        return self.can_resume or self.has_finished

    @property
    def begun_at(self) -> float:
        """When the run began, in seconds of the file system's clock."""
        return self.config_file.stat().st_mtime

    @property
    def has_model(self) -> bool:
        """Whether there is a model: of this run, or of one of several seeds in this folder."""
        return self.model_folder.exists() or any(self.path.glob("seed-*/model"))

    @property
    def has_progress(self) -> bool:
        """Whether there is a model or a checkpoint, of this run or of one of several seeds."""
        runs = [self, *map(RunFolder, self.path.glob("seed-*"))]
        return self.has_model or any(run.can_resume for run in runs)

    @contextmanager
    def create(self, *, overwrite: bool) -> Iterator["RunFolder"]:
        """Create and lock the folder of a new run; delete it again if it stays empty."""
        self.check_can_create(overwrite=overwrite)
        with _created(self.path, exist_ok=True), self.lock():
            # Another process may have finished a run here since the first look.
            self.check_can_create(overwrite=overwrite)
            yield self

    @classmethod
    @contextmanager
    def create_next(cls, parent: Path, name: str) -> Iterator["RunFolder"]:
        """Create and lock the first of ``parent/name``, ``parent/name-2``, ... that is free."""
        check_writable(parent)
        with ExitStack() as stack:
            while True:
                path = next_free_folder(parent, name)
                # Another process may create it first.
                with suppress(FileExistsError):
                    stack.enter_context(_created(path, exist_ok=False))
                    break
            yield stack.enter_context(cls(path).lock())

    @contextmanager
    def lock(self) -> Iterator["RunFolder"]:
        """Lock the existing folder, so that no other process writes to it.

        If the work fails before it has saved a checkpoint or a model, the run that it overwrites
        comes back. The kernel frees the lock of a process that dies.
        """
        from filelock import FileLock, Timeout

        file_lock = FileLock(self.path / LOCK_NAME, blocking=False)
        try:
            file_lock.acquire()
        except Timeout:
            raise RunFolderInUse(
                f"another process is writing to {self.path}",
                remedy="wait until it has finished, or choose another folder with --output-dir",
            ) from None
        except PermissionError as error:
            raise NotWritten(
                f"{self.path} may not be written", remedy="copy the run folder, and name the copy"
            ) from error
        try:
            yield self
        except BaseException:
            self._restore_previous()
            raise
        finally:
            # While it is locked: once released, it may be another process's lock.
            Path(file_lock.lock_file).unlink(missing_ok=True)
            file_lock.release()

    def check_can_create(self, *, overwrite: bool) -> None:
        """Raise ``UsageError`` if a new run may not have the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderNotEmpty(
                f"{self.path} is a file", remedy="choose a folder with --output-dir"
            )
        check_writable(self.path)
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if names <= IGNORED_NAMES:
            return
        names = {name.removesuffix(PARTIAL_SUFFIX) for name in names}
        is_run = not names.isdisjoint({self.config_file.name, LOCK_NAME})
        if not is_run or not names <= {path.name for path in self._layout} | IGNORED_NAMES:
            raise RunFolderNotEmpty(
                f"{self.path} holds files that are not a run's",
                remedy="choose another folder with --output-dir, or move the files away",
            )
        if not overwrite:
            raise RunFolderNotEmpty(
                f"{self.path} already holds a run",
                remedy="continue it with --resume-from-checkpoint, delete it with --overwrite, "
                "or choose another folder with --output-dir",
            )

    def set_aside_previous(self) -> None:
        """Move an earlier run to ``previous/``, unless one with a model is already there."""
        if self.previous_run.exists() and not self.has_model:
            self._delete_entries()
            return
        self.delete_previous()
        if entries := self._entries():
            self.previous_run.mkdir()
            for entry in entries:
                os.replace(entry, self.previous_run / entry.name)

    def delete_previous(self) -> None:
        """Delete the run that was overwritten; links, not what they point to."""
        if self.previous_run.exists():
            shutil.rmtree(self.previous_run)

    def _restore_previous(self) -> None:
        """Move an earlier run back if the new one has neither a model nor a checkpoint."""
        if not self.previous_run.exists() or self.has_progress:
            return
        self._delete_entries()
        for entry in self.previous_run.iterdir():
            os.replace(entry, self.path / entry.name)
        self.previous_run.rmdir()

    def _entries(self) -> list[Path]:
        kept = {LOCK_NAME, self.previous_run.name}
        return [entry for entry in self.path.iterdir() if entry.name not in kept]

    def _delete_entries(self) -> None:
        for entry in self._entries():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def delete_checkpoints(self) -> None:
        """Delete all checkpoints: the run has finished."""
        # Renamed first: else a run killed meanwhile would be resumed from half of them.
        discarded = self.path / f"checkpoints{PARTIAL_SUFFIX}"
        shutil.rmtree(discarded, ignore_errors=True)
        if self.checkpoints_folder.exists():
            os.replace(self.checkpoints_folder, discarded)
        shutil.rmtree(discarded, ignore_errors=True)

    def read(self, file: Path, parse: Callable[[Any], T]) -> T:
        """Parse the value of a JSON file or the rows of a .jsonl file, or raise ``NotARun``."""
        try:
            return parse(read_jsonl(file) if file.suffix == ".jsonl" else read_json(file))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise NotARun(
                f"{file} is missing or can't be read",
                remedy="restore the file, or make the run again",
            ) from error

    def read_config(self) -> Config:
        """Return the configuration of the run."""
        from finetune.config.load import load_config

        loaded = load_config(file=str(self.config_file))
        if not {"data", "model"} <= loaded.sources.keys():
            raise NotARun(
                f"{self.config_file} does not say which data and which model the run has",
                remedy="restore the file, or make the run again",
            )
        return loaded.config

    def read_task(self) -> "Task":
        """Return the task of the run's model, from the model's ``config.json``."""
        from finetune.tasks.choose import read_task

        return self.read(self.model_folder / "config.json", read_task)


class SeedsFolder(RunFolder):
    """The folder of several runs, at least ``count``, that differ in their seed: ``seed-42``..."""

    def __init__(self, path: Path, count: int = 0) -> None:
        super().__init__(path)
        self.count = count
        # The seeds, the name of the best run's folder, and metrics.
        self.seeds_file = path / "seeds.json"

    def run(self, seed: int) -> RunFolder:
        """Return the folder of one run."""
        return RunFolder(self.path / seed_name(seed))

    @property
    def seeds(self) -> list[int]:
        """The seeds of the runs, at least one."""
        return self.read(self.seeds_file, _parse_seeds)[0]

    @property
    def best(self) -> RunFolder:
        """The best run on the validation split; raises ``NotARun`` if it is not known."""
        seeds, best = self.read(self.seeds_file, _parse_seeds)
        if best is None:
            raise NotARun(
                f"{self.path} holds runs of several seeds, and which is the best is not known",
                remedy=f"name one of them, such as {self.path / seed_name(seeds[0])}",
            )
        return RunFolder(self.path / best)

    @property
    def first_begun(self) -> RunFolder | None:
        """The first run that has a configuration."""
        runs = map(self.run, self.seeds if self.seeds_file.is_file() else ())
        return next((run for run in runs if run.config_file.is_file()), None)

    @property
    def has_begun(self) -> bool:
        """Whether a run has begun."""
        return self.first_begun is not None

    @property
    def begun_at(self) -> float:
        """When the last run began or finished."""
        return self.seeds_file.stat().st_mtime

    @property
    def has_finished(self) -> bool:
        """Whether its runs are as many as asked, or more, and have all finished."""
        seeds = self.seeds
        return len(seeds) >= self.count and all(self.run(seed).has_finished for seed in seeds)

    def check_can_create(self, *, overwrite: bool) -> None:
        """Raise ``UsageError`` if new runs may not have the folder: they replace only such runs."""
        has_seeds = self.seeds_file.is_file()
        if overwrite and (has_seeds or self.previous_run.is_dir()):
            return
        if has_seeds or self.config_file.is_file():
            runs = "runs of several seeds" if has_seeds else "a single run"
            resume = "resume them by --resume-from-checkpoint auto, delete them with --overwrite, "
            raise RunFolderNotEmpty(
                f"{self.path} already holds {runs}",
                remedy=f"{(resume + 'or ') * has_seeds}choose another folder with --output-dir",
            )
        super().check_can_create(overwrite=False)

    def read_config(self) -> Config:
        """Return the configuration of all runs, with the first seed."""
        first = self.first_begun or self.run(self.seeds[0])
        # The folder of the first seed may be gone.
        return change_options(first.read_config(), {"seed": self.seeds[0]})


def seed_name(seed: int) -> str:
    """Return the name of a run's folder in a folder of several seeds."""
    return f"seed-{seed}"


def _parse_seeds(content: Any) -> tuple[list[int], str | None]:
    """Return the seeds, at least one, and the folder name of the best."""
    seeds, best = [int(seed) for seed in content["seeds"]], content["best"]
    if best not in (None, *map(seed_name, seeds)) or not seeds:
        raise ValueError(best)
    return seeds, best


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` if a folder can't be created, or written to."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise UsageError(
            f"{path} can't be created or written to, because of {existing}",
            remedy="choose another folder with --output-dir",
        )


def next_free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``parent/name``, ``parent/name-2``, ... that does not exist."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for name in names if not os.path.lexists(path := parent / name))


@contextmanager
def _created(path: Path, *, exist_ok: bool) -> Iterator[None]:
    """Create a folder and its parents, and delete those again at the end that stay empty."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        # One system call, which fails if another process was first.
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise UsageError(
            f"{path} can't be created: {error.strerror}",
            remedy="choose another folder with --output-dir",
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()


def open_run_folder(path: Path, *, needs_model: bool = True) -> RunFolder:
    """Return the run in a folder, or the best of several seeds, or raise ``NotARun``."""
    path = path.expanduser()
    seeds = SeedsFolder(path)
    folder = seeds.best if seeds.seeds_file.is_file() else RunFolder(path)
    if not folder.config_file.is_file():
        raise NotARun(
            f"{path} is not a run folder: it has no {folder.config_file.name}"
            if path.exists()
            else f"there is no folder {path}",
            remedy=f"name the folder that finetune run has written, such as {_examples(path)}",
        )
    if needs_model and not folder.model_folder.is_dir():
        if folder.has_finished:
            raise NotARun(
                f"the run in {path} has finished, and its model is missing",
                remedy=f"restore {folder.model_folder}, or make the run again",
            )
        raise NotARun(
            f"the run in {path} has not saved its model yet",
            remedy=f"finish it with finetune run --resume-from-checkpoint {path}",
        )
    return folder


def _examples(path: Path) -> str:
    """Return the paths of up to three run folders nearby, for an error message."""
    pattern = f"*/{RunFolder(path).config_file.name}"
    folders = [path, path.parent, path.parent.parent, RUNS_FOLDER]
    files = next(filter(None, (sorted(folder.glob(pattern)) for folder in folders)), [])
    return ", ".join(str(file.parent) for file in files[:3]) or "runs/trec-minilm-full"
