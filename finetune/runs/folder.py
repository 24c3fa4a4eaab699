"""The run folder: where each file lies, and what is read of it first."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import ModelUnsupported, NotARun
from finetune.files import read_json

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.tasks.base import Task

# Where runs are written, in the current folder.
RUNS_FOLDER = Path("runs")


@dataclass
class RunFolder:
    """Where each file of one run lies.

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
        # A folder step-N with what is needed to resume after N steps.
        self.checkpoints_folder = self.path / "checkpoints"
        # An earlier run, until the one that takes its place has a model.
        self.previous_run = self.path / "previous"
        self.layout = [one for name, one in vars(self).items() if name != "path"]
        # The trained parameters of the best model so far; gone when the run has finished.
        self.best_checkpoint = self.checkpoints_folder / "best"
        self._held_inode: int | None = None

    def hold(self) -> None:
        """Remember which folder this is, so that another is not taken for it."""
        self._held_inode = self.path.stat().st_ino

    @property
    def is_in_place(self) -> bool:
        """Whether the folder is there, and is the one that was held if one was."""
        try:
            return self._held_inode in (None, self.path.stat().st_ino)
        except OSError:
            return False

    def check_in_place(self) -> None:
        """Raise ``FileNotFoundError`` if the folder was moved or deleted, or replaced since."""
        if not self.is_in_place:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

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
        """Whether there is a checkpoint to resume from, and the configuration of its run."""
        names = (one.name for one in self.checkpoints_folder.glob("step-*"))
        # A kill leaves step-N.partial.
        has_checkpoint = any(name.removeprefix("step-").isdecimal() for name in names)
        return has_checkpoint and self.config_file.is_file() and self.is_in_place

    @property
    def holds_progress(self) -> bool:
        """Whether there is a checkpoint to resume from, or a model."""
        return self.can_resume or self.model_folder.exists()


def open_run_folder(path: Path, *, needs_model: bool = True) -> RunFolder:
    """Return the run that a folder holds, the best of several seeds.

    One that was interrupted has no model yet.

    Raises:
        NotARun: If there is no such folder, or it holds no run, or the model is missing.
    """
    path = path.expanduser()
    folder = RunFolder(_best_of_seeds(path) if seeds_file(path).is_file() else path)
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
    """Return a few run folders in a folder, beside it, around it, or where runs are written."""
    pattern = f"*/{RunFolder(path).config_file.name}"
    folders = [path, path.parent, path.parent.parent, RUNS_FOLDER]
    found = next(filter(None, (sorted(folder.glob(pattern)) for folder in folders)), [])
    return ", ".join(str(file.parent) for file in found[:3]) or "runs/trec-minilm-full"


def seeds_file(path: Path) -> Path:
    """Return what names the runs in a folder of several seeds."""
    return path / "seeds.json"


def seed_name(seed: int) -> str:
    """Return the name of a run's folder in a folder of several seeds."""
    return f"seed-{seed}"


def read_seeds(path: Path) -> list[int]:
    """Return the seeds of the runs in a folder of several seeds.

    Raises:
        NotARun: If its file can't be read.
    """
    return _read_seeds_file(path)[0]


def _best_of_seeds(path: Path) -> Path:
    seeds, best = _read_seeds_file(path)
    if best is None:
        raise NotARun(
            f"{path} holds runs of several seeds, and which is the best is not known",
            remedy=f"name one of them, such as {path / seed_name(seeds[0])}",
        )
    return path / best


def _read_seeds_file(path: Path) -> tuple[list[int], str | None]:
    """Return the seeds, one at least, and the folder of the best."""
    try:
        found = read_json(seeds_file(path))
        seeds, best = [int(seed) for seed in found["seeds"]], found["best"]
        if best not in (None, *map(seed_name, seeds)) or not seeds:
            raise ValueError(best)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotARun(
            f"{seeds_file(path)} can't be read",
            remedy="name one of the runs beside it, or start anew with --overwrite",
        ) from error
    return seeds, best


def load_saved_config(folder: RunFolder) -> "Config":
    """Return the configuration that a run was made with.

    Raises:
        ConfigurationInvalid: If it can't be read.
        NotARun: If it does not say which data and which model the run has.
    """
    from finetune.config.load import load_config

    file = str(folder.config_file)
    loaded = load_config(file=file, environment={}, flags={}, assignments=())
    if not {"data", "model"} <= loaded.origins.keys():
        raise NotARun(
            f"{file} does not say which data and which model the run has",
            remedy="restore the file, or make the run again",
        )
    return loaded.config


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
