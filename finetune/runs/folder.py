"""Run folders: layout, locking and reading."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

from finetune.config.schema import Config, change_options
from finetune.errors import NotARunError, UsageError
from finetune.events import Info, WarningMessage, emit
from finetune.files import SUMS, intact, is_there, read_json, read_jsonl, write_sums
from finetune.ownership import CONTENTS, OwnFolder

if TYPE_CHECKING:
    from finetune.tasks.base import Task

# The folder for runs, in the current folder.
RUNS_FOLDER = Path("runs")
# Name for the newest run there.
LATEST = Path("latest")
MAX_NAMES_SHOWN = 5
TABLE = re.compile(r"table-[0-9a-f]{8}\.parquet")

# Kinds of folders with several runs, and the name of a run in them.
RUN_KINDS = {"seeds": "seed", "folds": "fold", "sweep": "trial"}

T = TypeVar("T")


class RunFolder(OwnFolder):
    """The folder of one run, which need not exist. Its manifest lists the inputs of the run."""

    kind = "run"
    # The subfolders of the model and of its export.
    model_name, onnx_name = "model", "onnx"
    # In-memory tables, which a new run copies.
    tables: Sequence[Path] = ()

    def __init__(self, path: Path) -> None:
        super().__init__(path, self.kind)
        self.config_file = self.path / "config.yaml"
        # Versions and machine.
        self.environment_file = self.path / "environment.json"
        # One row per report of the training loop and per validation.
        self.metrics_file = self.path / "metrics.jsonl"
        self.warnings_file = self.path / "warnings.jsonl"
        # One row per test text.
        self.predictions_file = self.path / "predictions.jsonl"
        # Final metrics, with Trainer names.
        self.results_file = self.path / "all_results.json"
        self.report_file = self.path / "report.html"
        # Written by save_pretrained, with the model card.
        self.model_folder = self.path / self.model_name
        self.weights_file = self.model_folder / "model.safetensors"
        # The LoRA adapter, written by peft.
        self.adapter_folder = self.path / "adapter"
        self.onnx_folder = self.path / self.onnx_name
        self.bundle_folder = self.path / "bundle"
        # Folders step-N with the state to resume after N steps, and the best model.
        # Deleted when the run is finished.
        self.checkpoints_folder = self.path / "checkpoints"
        # How the model reads texts, and its confidences on validation rows.
        self.inference_file = self.model_folder / "inference.json"
        self.confidences_file = self.model_folder / "confidences.json"
        self.card_file = self.model_folder / "README.md"
        self.adapter_card_file = self.adapter_folder / "README.md"
        # If this file exists, the model is complete.
        self.model_config_file = self.model_folder / "config.json"
        self.digests_file = self.path / SUMS
        # Its modification time is the start of the run.
        self.first_file = self.config_file

    @property
    def parts(self) -> list[OwnFolder]:
        """Exports, which are deleted with the run."""
        return [OwnFolder(self.onnx_folder, "onnx"), OwnFolder(self.bundle_folder, "bundle")]

    @property
    def has_finished(self) -> bool:
        """Whether the run wrote all its files."""
        return self.results_file.is_file() and not self.checkpoints

    @property
    def can_resume(self) -> bool:
        """Whether a checkpoint and the configuration of its run exist."""
        return bool(self.checkpoints) and self.config_file.is_file()

    @property
    def resume_command(self) -> str:
        """The command that continues the run."""
        return f"finetune run --resume-from-checkpoint {quote(str(self.path))}"

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoint folders, damaged or not, newest first."""
        files = self.checkpoints_folder.glob("step-*/manifest.json")
        folders = [file.parent for file in files if file.parent.name[5:].isdecimal()]
        return sorted(folders, key=lambda folder: int(folder.name[5:]), reverse=True)

    @property
    def has_started(self) -> bool:
        """Whether a checkpoint exists or the run is finished."""
        return self.can_resume or self.has_finished

    def start(self) -> None:
        """Delete the files of an earlier run, and report kept files."""
        if stays := self.empty():
            others = ["..."] if len(stays) > MAX_NAMES_SHOWN else []
            names = ", ".join([*stays[:MAX_NAMES_SHOWN], *others])
            emit(Info(f"keeping files in {self.path} that no run wrote: {names}"))
        for table in self.tables:
            shutil.copyfile(table, self.path / table.name)

    def delete_tables(self) -> None:
        """Delete the run's copies of in-memory tables."""
        for path in self.files():
            if TABLE.fullmatch(path.name):
                path.unlink()

    def delete_checkpoints(self) -> None:
        """Delete all checkpoints and leftovers of killed processes, after the run is finished."""
        # Newest last, so that a run killed meanwhile can resume from it.
        for folder in reversed(self.checkpoints):
            self.delete(folder.relative_to(self.path).as_posix())
        self.delete(self.checkpoints_folder.name)
        self.delete(only_temporary=True)

    def read(self, file: Path, parse: Callable[[Any], T]) -> T:
        """Parse the value of a .json or the rows of a .jsonl file, or raise ``NotARunError``."""
        try:
            return parse(read_jsonl(file) if file.suffix == ".jsonl" else read_json(file))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f": {error.strerror}" if isinstance(error, OSError) else ""
            message = f"{file} is missing or can't be read{reason}"
            raise NotARunError(message, remedy="restore the file, or train again") from error

    def write_digests(self) -> None:
        """Note the digests of the files in this folder, and of the saved model."""
        for folder in filter(Path.is_dir, (self.model_folder, self.adapter_folder, self.path)):
            write_sums(folder)

    def report_edits(self) -> None:
        """Emit a warning if the configuration was edited after it was written."""
        try:
            intact(self.config_file)
        except UsageError as error:
            emit(WarningMessage(error.message, remedy=error.remedy))

    def read_config(self) -> Config:
        """Return the configuration of the run."""
        from finetune.config.load import load_config

        return load_config(file=str(self.config_file)).config

    def read_task(self) -> "Task":
        """Return the task of the model, from its ``config.json``."""
        from finetune.tasks.choose import read_task

        return self.read(self.model_folder / "config.json", read_task)


class BundleFolder(RunFolder):
    """A bundle: an exported model, and what predicting needs of its run, in one folder."""

    kind, model_name, onnx_name = "bundle", "", ""


class SeveralFolder(RunFolder):
    """The folder of several runs, at least ``count``, with a table of the runs.

    Seeds share a test split, each fold of a cross-validation has its own, and the trials of a sweep
    differ in some options. The runs are in ``seed-42``, ``fold-1``, ``trial-1``...
    """

    def __init__(self, path: Path, kind: str, count: int = 0) -> None:
        self.kind = kind
        super().__init__(path)
        self.count, self.run_kind = count, RUN_KINDS[kind]
        # Run numbers, the folder name of the best run, and metrics.
        self.table_file = self.first_file = path / f"{kind}.json"
        # In a sweep: the configuration of the best trial.
        self.best_file = path / "best.yaml"

    @property
    def resume_command(self) -> str:
        """The command that continues the runs."""
        if self.kind == "sweep":
            return "the same finetune sweep command"
        several = f"finetune run --{self.kind} {self.count or len(self.numbers)}"
        return f"{several} --resume-from-checkpoint {quote(str(self.path))}"

    def run_name(self, number: int) -> str:
        """Return the folder name of a run."""
        return f"{self.run_kind}-{number}"

    def run(self, number: int) -> RunFolder:
        """Return the folder of a run in this folder."""
        return RunFolder(self.path / self.run_name(number))

    @property
    def numbers(self) -> list[int]:
        """The run numbers, at least one: seeds, or 1, 2, ..."""
        return self._read_table()[0]

    @property
    def best(self) -> RunFolder:
        """The best seed on the validation split. Raises ``NotARunError`` if unknown."""
        numbers, best = self._read_table()
        if best is not None and self.kind == "seeds":
            return RunFolder(self.path / best)
        remedy = f"choose a run, such as {self.path / self.run_name(numbers[0])}, or train with "
        remedy += "--validation-fraction 0.1, so that the best run is known"
        if self.best_file.exists():
            remedy = f"train a model with finetune run {quote(str(self.best_file))}"
        elif self.kind != "seeds":
            remedy = "train a model on nearly all rows with finetune run "
            remedy += f"{quote(str(self.run(numbers[0]).config_file))} --test-fraction 0.02"
        contents = CONTENTS[self.kind]
        raise NotARunError(
            f"{self.path} contains {contents}, and no model of its own", remedy=remedy
        )

    def _read_table(self) -> tuple[list[int], str | None]:
        """Return the run numbers, at least one, and the folder name of the best run."""

        def parse(content: dict[str, Any]) -> tuple[list[int], str | None]:
            numbers, best = [int(number) for number in content[self.kind]], content["best"]
            if best not in (None, *map(self.run_name, numbers)) or not numbers:
                raise ValueError(best)
            return numbers, best

        return self.read(self.table_file, parse)

    @property
    def runs(self) -> list[RunFolder]:
        """The folders of started runs, or none if the table can't be read."""
        with suppress(NotARunError):
            return [*map(self.run, self.numbers)]
        return []

    @property
    def parts(self) -> list[OwnFolder]:
        """The runs, which are deleted with the folder."""
        return [*self.runs]

    @property
    def can_resume(self) -> bool:
        """Whether a run has finished or has a checkpoint."""
        return any(run.has_started for run in self.runs)

    @property
    def has_started(self) -> bool:
        """Whether a run started. The table of a sweep lists all trials."""
        return any(self.kind == "sweep" or run.config_file.is_file() for run in self.runs)

    @property
    def has_finished(self) -> bool:
        """Whether all requested runs are finished or, in a sweep, the best trial is known.

        Folds are finished when the predictions of all folds are written.
        """
        if self.kind == "sweep":
            return self.has_started and self._read_table()[1] is not None
        is_written = self.kind != "folds" or self.predictions_file.is_file()
        has_all = len(self.runs) >= max(self.count, 1)
        return is_written and has_all and all(run.has_finished for run in self.runs)

    def read_config(self) -> Config:
        """Return the configuration of the first run, or of another run if its folder is missing."""
        first = self.numbers[0]
        runs = (run for run in self.runs if run.config_file.is_file())
        config = next(runs, self.run(first)).read_config()
        return change_options(config, {"seed": first} if self.kind == "seeds" else {})


def find_several(path: Path) -> SeveralFolder | None:
    """Return the folder of several runs at a path, or None for other folders."""
    folders = (SeveralFolder(path, kind) for kind in RUN_KINDS)
    return next((folder for folder in folders if folder.table_file.is_file()), None)


def next_free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``parent/name``, ``parent/name-2``, ... that doesn't exist."""
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for name in names if not os.path.lexists(path := parent / name))


def find_latest(path: Path) -> Path:
    """Return the path or, for ``latest``, the newest finished run in ``runs``.

    Folds and sweeps, which have no model, are skipped if other runs exist.
    """
    if path != LATEST or is_there(path):
        return path
    finished = [run for run in list_runs(RUNS_FOLDER) if run.has_finished]
    if not finished:
        raise NotARunError(
            f"no finished run in {RUNS_FOLDER.absolute()}",
            remedy="train one with finetune run FILE, or pass a run folder",
        )
    have_models = (run for run in finished if run.kind in ("run", "seeds"))
    latest = next(have_models, finished[0])
    for run in finished[: finished.index(latest)]:
        contents = CONTENTS[run.kind]
        emit(Info(f"latest: skipped {run.path}, which has {contents} and no model"))
    emit(Info(f"latest: {latest.path}"))
    return latest.path


def list_runs(parent: Path) -> list[RunFolder]:
    """Return the runs in a folder, including folders of several runs, most recent first."""

    def written_at(folder: RunFolder) -> float:
        """Return the time when a run finished or, if unfinished, started. 0 if it is not a run."""
        files = (folder.results_file, folder.first_file)
        return next((file.stat().st_mtime for file in files if file.is_file()), 0.0)

    paths = (path for path in parent.glob("*/") if not BundleFolder(path).is_ours)
    runs = [find_several(path) or RunFolder(path) for path in paths]
    return sorted(filter(written_at, runs), key=written_at, reverse=True)


def open_run_folder(
    path: Path, *, needs_model: bool = True, accepts_bundle: bool = False
) -> RunFolder:
    """Return the run in a folder, or the best of several seeds, or raise ``NotARunError``.

    If the command accepts a bundle, the folder can also be a bundle.
    """
    path = find_latest(path).expanduser()
    if (bundle := BundleFolder(path)).is_ours:
        if accepts_bundle and bundle.config_file.is_file():
            return bundle
        message, remedy = f"{path} is incomplete", "export it again with finetune export bundle RUN"
        if not accepts_bundle:
            message = f"{path} is a bundle, which only predict, evaluate and serve can read"
            remedy = "pass the run that it was exported from"
        raise NotARunError(message, remedy=remedy)
    several = find_several(path)
    folder = several.best if several else RunFolder(path)
    if not folder.config_file.is_file():
        message = f"{path} is not a run folder: it has no {folder.config_file.name}"
        remedy = "pass a folder that finetune run wrote, or latest; finetune runs lists them"
        if path.suffix == ".zip":
            remedy = "unpack the bundle, and pass its folder"
        raise NotARunError(
            message if is_there(path) else f"folder not found: {path}", remedy=remedy
        )
    files = (folder.model_config_file, folder.inference_file)
    if needs_model and not all(file.is_file() for file in files):
        remedy = f"finish the run with finetune run --resume-from-checkpoint {path}"
        if folder.has_finished:
            remedy = f"train a model with finetune run {folder.config_file}"
            remedy += ", or keep the models of folds with --keep-models"
        raise NotARunError(f"the run in {path} has no model", remedy=remedy)
    folder.report_edits()
    return folder
