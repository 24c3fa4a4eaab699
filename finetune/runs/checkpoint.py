"""The checkpoints of a run: written beside training, verified when read, and without pickle.

    step-N/ or best-N/
      <group>.safetensors  a file for each group of tensors, such as model and optimizer
      state.json           numbers and words
      manifest.json        size and sha256 of the others; written last

A folder gets its final name when it is complete, so that whenever a process is killed, the manifest
shows whether its files are what was written.
"""

import threading
import time
from collections.abc import Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune import distributed
from finetune.devices.base import Device
from finetune.devices.host_memory import spare_bytes
from finetune.errors import CheckpointDamaged, UsageError
from finetune.events import Emit, WarningMessage
from finetune.files import file_sha256, flush_to_disk, read_json, replacing, write_json
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

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSORS_SUFFIX = ".safetensors"
# A full disk, or a folder that is gone or may not be written.
WRITE_ERRORS = (OSError, SafetensorError)
# Fraction of free memory that a copy may use; training needs the rest.
MAX_COPY_FRACTION = 0.5
# Share of the time that checkpoints may take, and the least time between two.
MAX_TIME_SHARE = 0.03
MIN_SECONDS_BETWEEN = 30.0
# Of writing a checkpoint, until one is written.
EXPECTED_SECONDS = 2.0

Checkpoint = tuple[Mapping[str, Tensors], Mapping[str, Any]]


class Checkpoints:
    """The checkpoints of a run: what resuming needs, and the best model so far.

    Training waits for a copy in memory, which a thread writes. A copy that is due
    while another is written waits in memory, until a newer one takes its place. Where there is no
    room for a copy, training waits until all is written. What can't be written, on a full disk for
    example, gives a warning and is tried again at the next saving.

    The order on the disk is journal, best model, checkpoint: each refers only to what is there.
    Only the main process reads and writes; all call each method.
    """

    def __init__(self, folder: RunFolder, *, keep: int, device: Device, emit: Emit) -> None:
        self.folder, self.keep, self.emit = folder, keep, emit
        self._device = device
        # Steps and parameters, until the next saving has written them.
        self._unwritten_best: tuple[int, Tensors] | None = None
        self._writer = futures.ThreadPoolExecutor(max_workers=1)
        self._writing: futures.Future[None] | None = None
        self._lock = threading.Lock()  # of the best model, which the thread drops
        # A step and its checkpoint, which is written if the run stops or fails before a newer one.
        self.held: tuple[int, Checkpoint] | None = None
        self._saved_at, self._seconds = time.monotonic(), EXPECTED_SECONDS

    def is_due(self) -> bool:
        """Return whether one more takes at most its share of the time since the last."""
        if self._is_writing():
            return False
        needed = max(MIN_SECONDS_BETWEEN, self._seconds / MAX_TIME_SHARE)
        return distributed.is_main() and time.monotonic() - self._saved_at >= needed

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def wait(self) -> None:
        """Wait for what is being written, and report what can't be."""
        writing, self._writing = self._writing, None
        try:
            if writing:
                writing.result()
        except WRITE_ERRORS as error:
            message = f"a checkpoint can't be written: {reason_of(error)}"
            remedy = "the run goes on and tries again later"
            self.emit(WarningMessage(message, remedy=remedy))

    def save_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Keep the trained parameters as those of the best model; the next saving writes them."""
        if not distributed.is_main():
            return
        tensors = trained_tensors(training_state)
        if not _fits_in_memory({"model": tensors}):
            self.wait()
            self._unwritten_best = progress.steps, tensors
            self._write_beside(progress.steps, None, waits=True)
            if self._unwritten_best is None:
                return
        best = progress.steps, self._device.snapshot(tensors)
        with self._lock:
            self._unwritten_best = best

    def load_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Copy the best model's parameters back, in place; where that is lost, keep the last."""
        if progress.best_step == progress.steps:
            return

        def read() -> Tensors:
            if self._unwritten_best is not None:
                _, best = self._unwritten_best
                return best if distributed.world_size() == 1 else self._device.to_host(best)
            with suppress(CheckpointDamaged, KeyError):
                return read_checkpoint(self._best(progress.best_step))[0]["model"]
            return {}

        try:
            load_trained_tensors(training_state, distributed.broadcast(read))
        except StateUnusable:
            folder = self.folder.checkpoints_folder
            message = f"the best model, of step {progress.best_step:,}, can't be read from {folder}"
            remedy = f"the model of step {progress.steps:,} takes its place"
            self.emit(WarningMessage(message, remedy=remedy))
            progress.best_score, progress.best_step = None, progress.steps

    def save(
        self,
        training_state: TrainingState,
        progress: Progress,
        *,
        is_over: bool = False,
        writes: bool = True,
    ) -> None:
        """Save what resuming needs, and delete what is older than those that are kept.

        Without ``writes`` it is held in memory, where there is room.
        """
        if not self._is_writing():
            self.wait()
        started = time.monotonic()
        tensors, state = capture_state(training_state, progress)
        if not distributed.is_main():
            return
        if is_over:
            # No step is left that needs it.
            tensors["optimizer"] = {}
        self.held = None
        if fits := _fits_in_memory(tensors):
            tensors = {group: self._device.snapshot(named) for group, named in tensors.items()}
        else:
            self.wait()
        if fits and (self._is_writing() or not writes):
            self.held = progress.steps, (tensors, state)
            return
        self._write_beside(progress.steps, (tensors, state), waits=not fits, started=started)

    def write_held(self) -> None:
        """Write the checkpoint that is held in memory, if there is one, after the one before."""
        self.wait()
        if self.held:
            (step, checkpoint), self.held = self.held, None
            self._write_beside(step, checkpoint, waits=True)

    def close(self) -> None:
        """Drop what is held, and wait for what is being written: the run needs neither."""
        self.held = None
        if self._writing:
            futures.wait([self._writing])

    def _write_beside(
        self, step: int, checkpoint: Checkpoint | None, *, waits: bool, started: float | None = None
    ) -> None:
        """Write in the thread the best model if that is still to do, then a checkpoint."""
        parent, best = self.folder.checkpoints_folder, self._unwritten_best

        def write() -> None:
            # After a power cut the journal has all rows up to the checkpoint.
            flush_to_disk(self.folder.metrics_file)
            needed = set[Path]()
            if best is not None:
                best_step, parameters = best
                needed.add(path := self._best(best_step))
                self._replace(path, {"model": parameters}, {"steps": best_step})
                with self._lock:
                    if self._unwritten_best is best:
                        self._unwritten_best = None
            if checkpoint is not None:
                tensors, state = checkpoint
                self._replace(parent / f"step-{step}", tensors, state)
            self._delete_old(step, needed)
            if started is not None:
                self._seconds = time.monotonic() - started

        self._saved_at = time.monotonic()
        self._writing = self._writer.submit(write)
        if waits:
            self.wait()

    def _replace(
        self, path: Path, tensors: Mapping[str, Tensors], state: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint in place of one of the same name."""
        tensors = {group: self._device.to_host(named) for group, named in tensors.items()}
        with replacing(path, last=MANIFEST_NAME) as partial:
            write_checkpoint(partial, tensors=tensors, state=state)
        flush_to_disk(path.parent)

    def _best(self, step: int) -> Path:
        return self.folder.checkpoints_folder / f"best-{step}"

    def _delete_old(self, step: int, needed: set[Path]) -> None:
        """Keep the newest checkpoints up to a step, and the best models that they refer to."""
        parent = self.folder.checkpoints_folder
        # Newer ones than this step were damaged, and were skipped when the run was resumed.
        older = [one for one in self.folder.checkpoints if int(one.name[5:]) <= step]
        kept = older[: self.keep]
        for folder in kept:
            with suppress(OSError, ValueError, LookupError, TypeError):
                needed.add(self._best(read_json(folder / STATE_NAME)["progress"]["best_step"]))
        for path in set(parent.iterdir()) - needed - set(kept):
            self.folder.delete(path.relative_to(self.folder.path).as_posix())

    def restore(self, training_state: TrainingState) -> Progress:
        """Restore model, optimizer and random state from the newest checkpoint that can be used.

        Damaged ones are skipped with a warning: a power cut may have torn the newest.
        """

        def restore_main() -> tuple[tuple[dict[str, Tensors], dict[str, Any]], Progress]:
            for folder in self.folder.checkpoints:
                try:
                    checkpoint = read_checkpoint(folder)
                    progress = restore_state(training_state, *checkpoint)
                except (CheckpointDamaged, StateUnusable) as error:
                    message = f"checkpoint {folder} is damaged: {error.__cause__ or error}"
                    self.emit(WarningMessage(message, remedy="an older one is taken"))
                    continue
                return checkpoint, progress
            raise nothing_to_resume(self.folder)

        checkpoint, progress = distributed.broadcast(restore_main)
        if not distributed.is_main():
            restore_state(training_state, *checkpoint)
        return progress


def nothing_to_resume(folder: RunFolder) -> UsageError:
    """Return the error for a run that can't be resumed."""
    return UsageError(
        f"the run in {folder.path} has no checkpoint to resume from",
        remedy="start again with --overwrite",
    )


def reason_of(error: Exception) -> str:
    """Return in words why a file could not be written."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_checkpoint(
    folder: Path, *, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> None:
    """Write groups of named tensors, and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATE_NAME, state)
    # safetensors lets only the owner read its files; ours follow the user's umask.
    permissions = (folder / STATE_NAME).stat().st_mode & 0o777
    for group, named_tensors in tensors.items():
        file = folder / f"{group}{TENSORS_SUFFIX}"
        save_file({name: tensor.contiguous() for name, tensor in named_tensors.items()}, file)
        file.chmod(permissions)
    names = [*(f"{group}{TENSORS_SUFFIX}" for group in tensors), STATE_NAME]
    write_json(folder / MANIFEST_NAME, {name: _fingerprint(folder / name) for name in names})


def read_checkpoint(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the groups of tensors, on the CPU, and the state of a checkpoint."""
    try:
        manifest = read_json(folder / MANIFEST_NAME)
        for name, written in manifest.items():
            if _fingerprint(folder / name) != written:
                raise ValueError(f"{name} is not what was written")
        tensors = {
            name.removesuffix(TENSORS_SUFFIX): load_file(folder / name)
            for name in manifest
            if name.endswith(TENSORS_SUFFIX)
        }
        return tensors, read_json(folder / STATE_NAME)
    except (OSError, ValueError, AttributeError, SafetensorError) as error:
        raise CheckpointDamaged(
            f"checkpoint {folder} is damaged: {error}",
            remedy="resume from an earlier checkpoint, or start anew with --overwrite",
        ) from error


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"size_bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _fits_in_memory(tensors: Mapping[str, Tensors]) -> bool:
    copy_bytes = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    return copy_bytes <= MAX_COPY_FRACTION * spare_bytes()
