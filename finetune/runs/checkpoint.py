"""The checkpoints of a run: written atomically, verified when read, and without pickle.

step-N/
  <group>.safetensors  a file for each group of tensors: model, optimizer, random, best
  state.json           numbers and words
  manifest.json        size and sha256 of the other files; written last
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune import distributed
from finetune.devices.base import Device
from finetune.errors import CheckpointDamagedError, FinetuneError, UsageError, system_error
from finetune.events import WarningMessage, clock, emit
from finetune.files import file_sha256, flush_to_disk, read_json, replacing, write_json
from finetune.ownership import MANIFEST
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal
from finetune.training.loop import Progress, TrainingLoop
from finetune.training.snapshot import (
    StateUnusableError,
    Tensors,
    capture_state,
    load_trained_tensors,
    restore_state,
    trained_tensors,
)

STATE_NAME = "state.json"
TENSORS_SUFFIX = ".safetensors"
# Maximum fraction of the time for checkpoints, and minimum time between two of them.
MAX_TIME_SHARE = 0.03
MIN_SECONDS_BETWEEN = 30.0
# Expected time to write a checkpoint, until the first one is written.
EXPECTED_SECONDS = 2.0


class Checkpoints:
    """The checkpoints of a run: what resuming needs, with the best model so far.

    The best model is also kept in memory. The journal is written before a checkpoint. If a file
    can't be written, for example on a full disk, there is a warning, and the next save tries again.

    Only the main process reads and writes; all call each method.
    """

    def __init__(self, folder: RunFolder, *, keep: int, device: Device, journal: Journal) -> None:
        self.folder, self.keep = folder, keep
        self._device, self._journal = device, journal
        # The parameters of the best model.
        self._best: Tensors = {}
        self._saved_at, self._seconds = time.monotonic(), EXPECTED_SECONDS

    def is_due(self) -> bool:
        """Return whether another checkpoint stays within its share of the time."""
        needed = max(MIN_SECONDS_BETWEEN, self._seconds / MAX_TIME_SHARE)
        return distributed.is_main() and time.monotonic() - self._saved_at >= needed

    @clock("saving")
    def save_best(self, trainer: TrainingLoop) -> None:
        """Keep the trained parameters as the best model."""
        if distributed.is_main():
            self._best = self._device.snapshot(trained_tensors(trainer))

    def load_best(self, trainer: TrainingLoop) -> None:
        """Copy the parameters of the best model back."""
        if trainer.progress.best_step != trainer.progress.steps:
            is_alone = distributed.world_size() == 1
            best = self._best if is_alone else distributed.broadcast(self._best_on_cpu)
            load_trained_tensors(trainer, best)

    def _best_on_cpu(self) -> Tensors:
        return {name: tensor.cpu() for name, tensor in self._best.items()}

    @clock("saving")
    def save(self, trainer: TrainingLoop) -> None:
        """Write a checkpoint and delete old checkpoints beyond the limit."""
        # A checkpoint ahead of the journal would leave a gap in it after resuming.
        if not distributed.broadcast(self._journal.write):
            return
        tensors, state = capture_state(trainer)
        progress = trainer.progress
        if not distributed.is_main():
            return
        if trainer.is_over:
            # The last steps are not needed, and the model may have been calibrated since.
            tensors |= {"model": self._best_on_cpu(), "optimizer": {}}
        elif self._best and progress.best_step != progress.steps:
            tensors["best"] = self._best = self._best_on_cpu()
        started = time.monotonic()
        try:
            # After a power cut the journal has all rows up to the checkpoint.
            flush_to_disk(self.folder.metrics_file)
            folder = self.folder.checkpoints_folder / f"step-{progress.steps}"
            write_checkpoint(folder, tensors=tensors, state=state)
            self._delete_old(progress)
        except Exception as error:
            if not (cause := system_error(error)):
                raise
            message = f"a checkpoint can't be written: {cause.strerror}"
            remedy = "the run continues and tries again later"
            emit(WarningMessage(message, remedy=remedy))
        self._saved_at = time.monotonic()
        self._seconds = self._saved_at - started

    def _delete_old(self, progress: Progress) -> None:
        """Keep the newest checkpoints up to a step."""
        # Newer checkpoints were damaged, and were skipped when the run was resumed.
        folders = self.folder.checkpoints
        kept = [folder for folder in folders if int(folder.name[5:]) <= progress.steps]
        for path in {*self.folder.checkpoints_folder.iterdir()} - {*kept[: self.keep]}:
            self.folder.delete(path.relative_to(self.folder.path).as_posix())

    def restore(self, trainer: TrainingLoop) -> None:
        """Restore the newest checkpoint that can be used; report and skip damaged ones."""

        def restore_main() -> tuple[dict[str, Tensors], dict[str, Any]]:
            failure: FinetuneError = nothing_to_resume(self.folder)
            for folder in self.folder.checkpoints:
                try:
                    checkpoint = read_checkpoint(folder)
                    restore_state(trainer, *checkpoint)
                    return checkpoint
                except (CheckpointDamagedError, StateUnusableError) as error:
                    message = f"checkpoint {folder} is damaged, so an older checkpoint is used"
                    emit(WarningMessage(f"{message}: {error.__cause__ or error}"))
                    failure = error if isinstance(error, CheckpointDamagedError) else failure
            raise failure

        tensors, state = distributed.broadcast(restore_main)
        if not distributed.is_main():
            restore_state(trainer, tensors, state)
        self._best = tensors.get("best", tensors["model"])


def nothing_to_resume(folder: RunFolder) -> UsageError:
    """Return the error for a run that can't be resumed."""
    return UsageError(
        f"the run in {folder.path} has no checkpoint to resume from",
        remedy="start again with --overwrite",
    )


def write_checkpoint(
    folder: Path, *, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
) -> None:
    """Write groups of named tensors, and JSON; replace a checkpoint of the same name."""
    with replacing(folder, last=MANIFEST) as partial:
        write_json(partial / STATE_NAME, state)
        for group, named_tensors in tensors.items():
            contiguous = {name: tensor.contiguous() for name, tensor in named_tensors.items()}
            save_file(contiguous, partial / f"{group}{TENSORS_SUFFIX}")
        fingerprints = {file.name: _fingerprint(file) for file in partial.iterdir()}
        write_json(partial / MANIFEST, fingerprints)
    flush_to_disk(folder.parent)


def read_checkpoint(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the groups of tensors, on the CPU, and the state of a checkpoint."""
    try:
        manifest = read_json(folder / MANIFEST)
        for name, written in manifest.items():
            if _fingerprint(folder / name) != written:
                raise ValueError(f"{name} has changed since it was written")
        tensors = {
            name.removesuffix(TENSORS_SUFFIX): load_file(folder / name)
            for name in manifest
            if name.endswith(TENSORS_SUFFIX)
        }
        return tensors, read_json(folder / STATE_NAME)
    except (OSError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointDamagedError(
            f"checkpoint {folder} is damaged: {error}",
            remedy="resume from an earlier checkpoint, or start again with --overwrite",
        ) from error


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"size_bytes": file.stat().st_size, "sha256": file_sha256(file)}
