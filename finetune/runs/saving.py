"""The checkpoints of a run: written beside training, kept, and restored."""

import os
import shutil
import threading
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from finetune.devices.host_memory import spare_bytes
from finetune.distributed.processes import ALONE, Processes
from finetune.errors import CheckpointDamaged, UsageError
from finetune.events import Emit, WarningMessage
from finetune.files import flush_to_disk, read_json
from finetune.runs.checkpoint import (
    DISCARDED_SUFFIX,
    STATE_NAME,
    WRITE_ERRORS,
    checkpoint_path,
    damaged,
    highest_step_first,
    put_back_discarded,
    read_checkpoint,
    reason_of,
    remove_old_checkpoints,
    verify_checkpoint,
    warn_of_damage,
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
from finetune.training.training_state import TrainingState

# Of the spare memory; the rest is left to the steps that go on meanwhile.
MAX_COPY_SHARE = 0.5


@dataclass(frozen=True)
class _Best:
    """The best model's parameters and the steps that it has taken."""

    tensors: Tensors
    steps: int

    def copy(self) -> "_Best":
        """Return the same in memory that no step changes."""
        return _Best(_copy(self.tensors), self.steps)


class Checkpoints:
    """The checkpoints of a run: the best model so far, and what resuming needs.

    Steps wait for a copy in the machine's memory, which a thread writes. Where a copy would take
    too much memory, they wait until all is written. What can't be written, on a full disk for
    example, gives a warning and is tried again at the next saving.

    As a context manager it waits at its end for what is being written.

    Of several processes the main one alone reads and writes, and the others get from it what it has
    read; each calls all methods.

    Args:
        folder: The run, held by the main process.
        keep: How many to resume from are kept, the newest.
        emit: Receives warnings, never in the thread that writes.
        processes: Those that train together.
    """

    def __init__(
        self, folder: RunFolder, *, keep: int, emit: Emit, processes: Processes = ALONE
    ) -> None:
        self.folder, self.keep, self.emit, self.processes = folder, keep, emit, processes
        # Until the next saving has written it.
        self._unwritten_best: _Best | None = None
        self._writer = futures.ThreadPoolExecutor(max_workers=1)
        self._writing: futures.Future[WarningMessage | None] | None = None
        self._hurry = threading.Event()
        self._written: list[Path] = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._hurry.set()
        self.wait()

    def wait(self) -> None:
        """Wait for what is being written, and report what can't be.

        An interruption leaves out all but the file in hand: the last checkpoint stays.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            warning = writing.result()
        except KeyboardInterrupt:
            self._hurry.set()
            futures.wait([writing])
            raise
        if warning and not self._hurry.is_set():
            self.emit(warning)

    def save_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Keep the trained parameters as those of the best model; the next saving writes them."""
        if not self.processes.is_main:
            return
        self.wait()
        best = _Best(trained_tensors(training_state), progress.steps)
        if _fits_in_memory({"model": best.tensors}):
            self._unwritten_best = best.copy()
            return
        self._unwritten_best = None
        if warning := self._write_best(best):
            self._unwritten_best = best.copy()
            self.emit(warning)

    def load_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Copy the best model's parameters back, in place; where that is lost, keep the last."""
        if progress.best_step == progress.steps:
            return
        try:
            load_trained_tensors(training_state, self.processes.broadcast(self._read_best))
        except StateUnusable:
            self._replace_best(progress)

    def _read_best(self) -> Tensors:
        """Return the best model's parameters; none if they are lost."""
        if self._unwritten_best is not None:
            return self._unwritten_best.tensors
        try:
            return read_checkpoint(self.folder.best_checkpoint)[0]["model"]
        except (CheckpointDamaged, KeyError):
            return {}

    def remove(self) -> None:
        """Delete all checkpoints: the run has finished and can't be resumed."""
        if not self.processes.is_main:
            return
        # Without it the run counts as finished, whatever else is still there. Deleted file by file,
        # a kill would leave half of it, and the model of the last step in the best one's place.
        best = self.folder.best_checkpoint
        with suppress(OSError):
            os.replace(best, best.with_name(best.name + DISCARDED_SUFFIX))
        shutil.rmtree(self.folder.checkpoints_folder, ignore_errors=True)

    def save(
        self, training_state: TrainingState, progress: Progress, *, is_over: bool = False
    ) -> None:
        """Save what resuming needs, and delete what is older than those that are kept.

        The optimizer's state is left out of a run that is over: no step is left that needs it.
        """
        self.wait()
        tensors, state = capture_state(training_state, progress)
        if not self.processes.is_main:
            return
        if is_over:
            tensors["optimizer"] = {}
        if _fits_in_memory(tensors):
            copies = {group: _copy(named) for group, named in tensors.items()}
            self._writing = self._writer.submit(self._write_all, progress.steps, copies, state)
        elif warning := self._write_all(progress.steps, tensors, state):
            self.emit(warning)

    def _write_all(
        self, steps: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
    ) -> WarningMessage | None:
        """Write the best model if that is still to do, then a checkpoint, which refers to it."""
        if self._unwritten_best is not None:
            if warning := self._write_best(self._unwritten_best):
                return warning
            self._unwritten_best = None
        path = checkpoint_path(self.folder.checkpoints_folder, step=steps)
        if warning := self._write(path, tensors, state):
            return warning
        with suppress(OSError):
            self._written.append(path)
            parent = self.folder.checkpoints_folder
            remove_old_checkpoints(
                parent,
                keep=self.keep,
                written=self._written,
                checked_steps=state["progress"]["checked_steps"],
            )
        return None

    def _write_best(self, best: _Best) -> WarningMessage | None:
        state = {"steps": best.steps}
        return self._write(self.folder.best_checkpoint, {"model": best.tensors}, state)

    def _write(
        self, path: Path, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
    ) -> WarningMessage | None:
        """Write a checkpoint; return why that was not possible."""
        try:
            path.parent.mkdir(exist_ok=True)
            # After a power cut the journal has all rows up to the checkpoint.
            flush_to_disk(self.folder.metrics_file)
            write_checkpoint(path, tensors=tensors, state=state, check=self._check_hurry)
        except WRITE_ERRORS as error:
            message = f"checkpoint {path} can't be written: {reason_of(error)}"
            return WarningMessage(message, remedy="the run goes on and tries again later")
        return None

    def _check_hurry(self) -> None:
        if self._hurry.is_set():
            raise InterruptedError("the run was stopped")

    def restore(self, training_state: TrainingState) -> Progress:
        """Restore model, optimizer and random state from the newest checkpoint that can be used.

        One that is damaged is skipped with a warning; a newest one that is half there would
        otherwise keep a run from resuming (transformers#35782).

        Raises:
            UsageError: If there is none.
        """
        found, progress = self.processes.broadcast(lambda: self._restore_main(training_state))
        if not self.processes.is_main:
            restore_state(training_state, *found)
        return progress

    def _restore_main(
        self, training_state: TrainingState
    ) -> tuple[tuple[dict[str, Tensors], dict[str, Any]], Progress]:
        """Restore the main process; return what it has read, and where the run stands."""
        put_back_discarded(self.folder.best_checkpoint)
        for checkpoint in highest_step_first(self.folder.checkpoints_folder):
            try:
                found = read_checkpoint(checkpoint)
                progress = restore_state(training_state, *found)
                if checkpoint_path(checkpoint.parent, step=progress.steps) != checkpoint:
                    raise StateUnusable(f"its state is that of step {progress.steps:,}")
            except StateUnusable as error:
                warn_of_damage(damaged(checkpoint, str(error)), emit=self.emit)
            except CheckpointDamaged as damage:
                warn_of_damage(damage, emit=self.emit)
            else:
                self._restore_best(training_state, progress)
                return found, progress
        raise nothing_to_resume(self.folder)

    def _restore_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Let the model that is resumed be the best so far where that can't be read.

        A kill between the two leaves a best model of a step after the checkpoint. It is found
        again, since the steps are taken again.
        """
        saved_steps = self._best_step()
        if saved_steps == progress.best_step or not progress.best_step:
            return
        self.save_best(training_state, progress)
        if saved_steps is None or saved_steps < progress.steps:
            self._replace_best(progress)
        elif progress.best_step != progress.steps:
            progress.best_score, progress.best_step = None, progress.steps

    def _replace_best(self, progress: Progress) -> None:
        """Let the model as it is be the best so far in place of one that is lost."""
        if progress.best_step == progress.steps:
            return
        self.emit(
            WarningMessage(
                f"the best model, of step {progress.best_step:,}, can't be read from "
                f"{self.folder.best_checkpoint}",
                remedy=f"the model of step {progress.steps:,} takes its place",
            )
        )
        progress.best_score, progress.best_step = None, progress.steps

    def _best_step(self) -> int | None:
        """Return the steps of the best model, or None if its checkpoint can't be read."""
        try:
            verify_checkpoint(self.folder.best_checkpoint)
            state = read_json(self.folder.best_checkpoint / STATE_NAME)
            return int(state["steps"])
        except (CheckpointDamaged, KeyError, TypeError, ValueError):
            return None


def nothing_to_resume(folder: RunFolder) -> UsageError:
    """Return the error that says of a run that it can't be resumed."""
    return UsageError(
        f"the run in {folder.path} has no checkpoint to resume from",
        remedy="start again with --overwrite",
    )


def _fits_in_memory(tensors: Mapping[str, Tensors]) -> bool:
    copy_bytes = sum(one.nbytes for named in tensors.values() for one in named.values())
    return copy_bytes <= MAX_COPY_SHARE * spare_bytes()


def _copy(tensors: Tensors) -> Tensors:
    return {name: one.to("cpu", copy=True) for name, one in tensors.items()}
