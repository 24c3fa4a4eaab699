"""The checkpoints of a run: written beside training, kept, and restored."""

import shutil
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.devices.host_memory import spare_bytes
from finetune.distributed.processes import ALONE, Processes
from finetune.errors import CheckpointDamaged, UsageError
from finetune.events import Emit, WarningMessage
from finetune.files import flush_to_disk, read_json
from finetune.runs.checkpoint import (
    STATE_NAME,
    WRITE_ERRORS,
    best_folder,
    newest_first,
    read_checkpoint,
    reason_of,
    step_folder,
    step_of,
    write_checkpoint,
)
from finetune.runs.folder import RunFolder
from finetune.training.snapshot import (
    Progress,
    StateUnusable,
    Tensors,
    capture_state,
    load_trained_tensors,
    restore_state,
    trained_tensors,
)
from finetune.training.step import TrainingState

# Fraction of free memory that a copy may use; training needs the rest.
MAX_COPY_FRACTION = 0.5


class Checkpoints:
    """The checkpoints of a run: what resuming needs, and the best model so far.

    Training waits for a copy in the machine's memory, which a thread writes; where there is no room
    for a copy, it waits until all is written. What can't be written, on a full disk for example,
    gives a warning and is tried again at the next saving.

    The order on the disk is journal, best model, checkpoint: each refers only to what is there.
    Only the main process reads and writes; all call each method.
    """

    def __init__(
        self, folder: RunFolder, *, keep: int, emit: Emit, processes: Processes = ALONE
    ) -> None:
        self.folder, self.keep, self.emit, self.processes = folder, keep, emit, processes
        # Steps and parameters, until the next saving has written them.
        self._unwritten_best: tuple[int, Tensors] | None = None
        self._writer = futures.ThreadPoolExecutor(max_workers=1)
        self._writing: futures.Future[WarningMessage | None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()

    def wait(self) -> None:
        """Wait for what is being written, and report what can't be."""
        writing, self._writing = self._writing, None
        if writing and (warning := writing.result()):
            self.emit(warning)

    def save_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Keep the trained parameters as those of the best model; the next saving writes them."""
        if not self.processes.is_main:
            return
        self.wait()
        tensors = trained_tensors(training_state)
        if not _fits_in_memory({"model": tensors}):
            self._unwritten_best = (progress.steps, tensors)
            if (warning := self._write(progress.steps, None)) is None:
                return
            self.emit(warning)
        self._unwritten_best = (progress.steps, _copy(tensors))

    def load_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Copy the best model's parameters back, in place; where that is lost, keep the last."""
        if progress.best_step == progress.steps:
            return
        tensors = self.processes.broadcast(lambda: self._read_best(progress.best_step))
        try:
            load_trained_tensors(training_state, tensors)
        except StateUnusable:
            self.emit(
                WarningMessage(
                    f"the best model, of step {progress.best_step:,}, can't be read from "
                    f"{self.folder.checkpoints_folder}",
                    remedy=f"the model of step {progress.steps:,} takes its place",
                )
            )
            progress.best_score, progress.best_step = None, progress.steps

    def _read_best(self, step: int) -> Tensors:
        """Return the best model's parameters; none if they are lost."""
        if self._unwritten_best is not None:
            return self._unwritten_best[1]
        try:
            return read_checkpoint(best_folder(self.folder.checkpoints_folder, step))[0]["model"]
        except (CheckpointDamaged, KeyError):
            return {}

    def save(
        self, training_state: TrainingState, progress: Progress, *, is_over: bool = False
    ) -> None:
        """Save what resuming needs, and delete what is older than those that are kept."""
        self.wait()
        tensors, state = capture_state(training_state, progress)
        if not self.processes.is_main:
            return
        if is_over:
            # No step is left that needs it.
            tensors["optimizer"] = {}
        if _fits_in_memory(tensors):
            copies = {group: _copy(named) for group, named in tensors.items()}
            self._writing = self._writer.submit(self._write, progress.steps, (copies, state))
        elif warning := self._write(progress.steps, (tensors, state)):
            self.emit(warning)

    def _write(
        self, step: int, checkpoint: tuple[Mapping[str, Tensors], Mapping[str, Any]] | None
    ) -> WarningMessage | None:
        """Write the best model if that is still to do, then a checkpoint; return what failed."""
        parent = self.folder.checkpoints_folder
        try:
            # Not its parents: the run's folder may have been moved.
            parent.mkdir(exist_ok=True)
            # After a power cut the journal has all rows up to the checkpoint.
            flush_to_disk(self.folder.metrics_file)
            needed = set[Path]()
            if self._unwritten_best is not None:
                best_step, best = self._unwritten_best
                needed.add(path := best_folder(parent, best_step))
                write_checkpoint(path, tensors={"model": best}, state={"steps": best_step})
                self._unwritten_best = None
            if checkpoint is not None:
                tensors, state = checkpoint
                write_checkpoint(step_folder(parent, step), tensors=tensors, state=state)
            self._delete_old(step, needed)
        except WRITE_ERRORS as error:
            return WarningMessage(
                f"the checkpoint of step {step:,} can't be written: {reason_of(error)}",
                remedy="the run goes on and tries again later",
            )
        return None

    def _delete_old(self, step: int, needed: set[Path]) -> None:
        """Keep the newest checkpoints up to a step, and the best models that they refer to."""
        parent = self.folder.checkpoints_folder
        # Newer ones than this step were damaged, and were skipped when the run was resumed.
        kept = [folder for folder in newest_first(parent) if step_of(folder) <= step][: self.keep]
        for folder in kept:
            with suppress(OSError, ValueError, LookupError, TypeError):
                best_step = read_json(folder / STATE_NAME)["progress"]["best_step"]
                needed.add(best_folder(parent, best_step))
        for path in set(parent.iterdir()) - needed - set(kept):
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, training_state: TrainingState) -> Progress:
        """Restore model, optimizer and random state from the newest checkpoint that can be used.

        Damaged ones are skipped with a warning: a power cut may have torn the newest.
        """
        checkpoint, progress = self.processes.broadcast(lambda: self._restore_main(training_state))
        if not self.processes.is_main:
            restore_state(training_state, *checkpoint)
        return progress

    def _restore_main(
        self, training_state: TrainingState
    ) -> tuple[tuple[dict[str, Tensors], dict[str, Any]], Progress]:
        """Restore the main process; return what it has read, and where the run stands."""
        for folder in newest_first(self.folder.checkpoints_folder):
            try:
                checkpoint = read_checkpoint(folder)
                return checkpoint, restore_state(training_state, *checkpoint)
            except CheckpointDamaged as error:
                message = error.message
            except StateUnusable as error:
                message = f"checkpoint {folder} is damaged: {error}"
            self.emit(
                WarningMessage(
                    f"{message}; it is skipped", remedy="if this happens again, check the disk"
                )
            )
        raise nothing_to_resume(self.folder)


def nothing_to_resume(folder: RunFolder) -> UsageError:
    """Return the error for a run that can't be resumed."""
    return UsageError(
        f"the run in {folder.path} has no checkpoint to resume from",
        remedy="start again with --overwrite",
    )


def _fits_in_memory(tensors: Mapping[str, Tensors]) -> bool:
    copy_bytes = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    return copy_bytes <= MAX_COPY_FRACTION * spare_bytes()


def _copy(tensors: Tensors) -> Tensors:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
