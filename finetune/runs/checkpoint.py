"""Checkpoints as bytes: written whole or not at all, verified when read, and without pickle.

    step-N/
      <group>.safetensors  a file for each group of tensors, such as model and optimizer
      state.json           numbers and words
      manifest.json        size and sha256 of the others; written last

A folder gets its final name when it is complete, and loses it before it is deleted. So whenever a
process is killed, what bears a final name was complete once, and the manifest shows whether its
bytes still are what was written.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointDamaged, UsageError
from finetune.events import Emit, WarningMessage
from finetune.files import PARTIAL_SUFFIX, file_sha256, flush_to_disk, read_json, write_json
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

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSORS_SUFFIX = ".safetensors"
DISCARDED_SUFFIX = ".discarded"
# A full disk, a folder that is gone or may not be written: Python's words and safetensors'.
WRITE_ERRORS = (OSError, SafetensorError)


class Checkpoints:
    """The checkpoints of a run: the best model so far, and what resuming needs.

    What can't be written, on a full disk for example, gives a warning and is tried again later.

    Args:
        folder: The run, held by this process.
        keep: How many to resume from are kept, the newest.
        emit: Receives warnings.
    """

    def __init__(self, folder: RunFolder, *, keep: int, emit: Emit) -> None:
        self.folder, self.keep, self.emit = folder, keep, emit
        # A copy of the best model's parameters and its state, while they can't be written.
        self._unwritten_best: tuple[Tensors, dict[str, Any]] | None = None

    def save_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Save the trained parameters as those of the best model so far."""
        tensors, state = trained_tensors(training_state), {"updates": progress.updates}
        self._unwritten_best = None
        if not self._write(self.folder.best_checkpoint, {"model": tensors}, state):
            copied = {name: one.to("cpu", copy=True) for name, one in tensors.items()}
            self._unwritten_best = copied, state

    def load_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Copy the best model's parameters back, in place; where that is lost, keep the last."""
        try:
            if self._unwritten_best is None:
                tensors = read_checkpoint(self.folder.best_checkpoint)[0]["model"]
            else:
                tensors, _ = self._unwritten_best
            load_trained_tensors(training_state, tensors)
        except (CheckpointDamaged, StateUnusable, KeyError):
            self._replace_best(progress)

    def remove(self) -> None:
        """Delete all checkpoints: the run has finished and can't be resumed."""
        # Without it the run counts as finished, whatever else is still there.
        shutil.rmtree(self.folder.best_checkpoint, ignore_errors=True)
        shutil.rmtree(self.folder.checkpoints_folder, ignore_errors=True)

    def save(self, training_state: TrainingState, progress: Progress) -> None:
        """Save what resuming needs, and delete what is older than those that are kept."""
        if self._unwritten_best is not None:
            tensors_of_best, state_of_best = self._unwritten_best
            if self._write(self.folder.best_checkpoint, {"model": tensors_of_best}, state_of_best):
                self._unwritten_best = None
        path = checkpoint_path(self.folder.checkpoints_folder, update=progress.updates)
        if self._write(path, *capture_state(training_state, progress)):
            with suppress(OSError):
                remove_old_checkpoints(self.folder.checkpoints_folder, keep=self.keep, written=path)

    def _write(self, path: Path, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> bool:
        """Write a checkpoint and return whether that succeeded."""
        try:
            # A run folder that was moved or deleted is not made again.
            path.parent.mkdir(exist_ok=True)
            write_checkpoint(path, tensors=tensors, state=state)
        except WRITE_ERRORS as error:
            message = f"checkpoint {path} can't be written: {reason_of(error)}"
            self.emit(WarningMessage(message, remedy="the run goes on and tries again later"))
            return False
        return True

    def intact(self) -> list[Path]:
        """Return the checkpoints that verify, the highest update first.

        Raises:
            UsageError: If there is none.
        """
        checkpoints = intact_checkpoints(self.folder.checkpoints_folder, emit=self.emit)
        if not checkpoints:
            raise self._nothing_to_resume()
        return checkpoints

    def restore(self, checkpoints: Sequence[Path], training_state: TrainingState) -> Progress:
        """Restore model, optimizer and random state from the first that can be used.

        Raises:
            UsageError: If there is none.
        """
        for checkpoint in checkpoints:
            try:
                progress = restore_state(training_state, *read_checkpoint(checkpoint))
            except StateUnusable as error:
                _warn_of_damage(_damaged(checkpoint, str(error)), emit=self.emit)
            except CheckpointDamaged as damage:
                _warn_of_damage(damage, emit=self.emit)
            else:
                self._restore_best(training_state, progress)
                return progress
        raise self._nothing_to_resume()

    def _restore_best(self, training_state: TrainingState, progress: Progress) -> None:
        """Let the model that is resumed be the best so far where that can't be read.

        A kill between the two leaves a best model of an update after the checkpoint. It is found
        again, since the updates are taken again.
        """
        saved_updates = self._best_updates()
        if saved_updates == progress.best_updates or not progress.best_updates:
            return
        self.save_best(training_state, progress)
        if saved_updates is None or saved_updates < progress.updates:
            self._replace_best(progress)
        elif progress.best_updates != progress.updates:
            progress.best_score, progress.best_updates = None, progress.updates

    def _replace_best(self, progress: Progress) -> None:
        """Let the model as it is be the best so far in place of one that is lost."""
        if progress.best_updates == progress.updates:
            return
        self.emit(
            WarningMessage(
                f"the best model, of update {progress.best_updates:,}, can't be read from "
                f"{self.folder.best_checkpoint}",
                remedy=f"the model of update {progress.updates:,} takes its place",
            )
        )
        progress.best_score, progress.best_updates = None, progress.updates

    def _best_updates(self) -> int | None:
        """Return the updates of the best model, or None if its checkpoint can't be read."""
        try:
            verify_checkpoint(self.folder.best_checkpoint)
            state = read_json(self.folder.best_checkpoint / STATE_NAME)
            return int(state["updates"])
        except (CheckpointDamaged, KeyError, TypeError, ValueError):
            return None

    def _nothing_to_resume(self) -> UsageError:
        return UsageError(
            f"the run in {self.folder.path} has no checkpoint to resume from",
            remedy="start again with --overwrite",
        )


def reason_of(error: Exception) -> str:
    """Return in words why a file could not be written."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def checkpoint_path(checkpoints_folder: Path, *, update: int) -> Path:
    """Return the folder of the checkpoint that follows an update, counted from 1."""
    return checkpoints_folder / f"step-{update}"


def write_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint, in place of one that bears the same name.

    Args:
        folder: Where; its parents are made too.
        tensors: Groups of named tensors of any shape, dtype and device. No two tensors of a group
            may share memory.
        state: What JSON can say and give back equal: string keys, lists in place of tuples,
            finite numbers.

    Raises:
        ValueError: If ``state`` would not read back equal to what it is now.
    """
    _refuse_what_json_would_alter(state)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _write_files(partial, tensors, state)
    except WRITE_ERRORS:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        _discard(folder)
    os.replace(partial, folder)
    flush_to_disk(folder.parent)


def _write_files(
    partial: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> None:
    write_json(partial / STATE_NAME, state)
    # safetensors keeps its files from all other users; Python's files are as the user's umask says.
    permissions = (partial / STATE_NAME).stat().st_mode & 0o777
    for group, named_tensors in tensors.items():
        file = partial / f"{group}{TENSORS_SUFFIX}"
        save_file({name: tensor.contiguous() for name, tensor in named_tensors.items()}, file)
        file.chmod(permissions)
        flush_to_disk(file)
    manifest = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
    write_json(partial / MANIFEST_NAME, manifest)
    flush_to_disk(partial)


def read_checkpoint(folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """Return the groups of tensors, on the CPU, and the state of a checkpoint.

    Raises:
        CheckpointDamaged: If a file is missing or not what was written.
    """
    manifest = verify_checkpoint(folder)
    try:
        tensors = {
            name.removesuffix(TENSORS_SUFFIX): load_file(folder / name)
            for name in manifest
            if name.endswith(TENSORS_SUFFIX)
        }
        return tensors, read_json(folder / STATE_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(folder, str(error)) from error


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, and return the manifest.

    Raises:
        CheckpointDamaged: If a file is missing or not what was written.
    """
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except (OSError, ValueError):
        raise _damaged(folder, f"{MANIFEST_NAME} is missing or unreadable") from None
    if not isinstance(manifest, dict) or STATE_NAME not in manifest:
        raise _damaged(folder, f"{MANIFEST_NAME} does not list {STATE_NAME}")
    for name, written in manifest.items():
        file = folder / name
        if file.parent != folder or not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        if _fingerprint(file) != written:
            raise _damaged(folder, f"{name} is not what was written")
    return manifest


def intact_checkpoints(checkpoints_folder: Path, *, emit: Emit) -> list[Path]:
    """Return the checkpoints that verify, the highest update first.

    A damaged one is skipped with a warning; a newest one that is half there would otherwise keep a
    run from resuming (transformers#35782).
    """
    intact = []
    for folder in _highest_update_first(checkpoints_folder):
        try:
            verify_checkpoint(folder)
        except CheckpointDamaged as damage:
            _warn_of_damage(damage, emit=emit)
        else:
            intact.append(folder)
    return intact


def remove_old_checkpoints(
    checkpoints_folder: Path, *, keep: int, written: Path | None = None
) -> None:
    """Delete all but the ``keep`` highest updates, damaged checkpoints, and what kills left over.

    Those that stay are verified first, but for the one that was just ``written``, so that no good
    checkpoint goes in favour of a damaged one.
    """
    for suffix in (PARTIAL_SUFFIX, DISCARDED_SUFFIX):
        for leftover in checkpoints_folder.glob(f"*{suffix}"):
            shutil.rmtree(leftover)
    kept = 0
    for folder in _highest_update_first(checkpoints_folder):
        if kept < keep and (folder == written or _is_intact(folder)):
            kept += 1
        else:
            _discard(folder)


def _refuse_what_json_would_alter(state: Mapping[str, Any]) -> None:
    if json.loads(json.dumps(state, allow_nan=False)) != state:
        raise ValueError("the state has keys that are not strings, or tuples")


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"size_bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _damaged(folder: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"checkpoint {folder} is damaged: {what}",
        remedy="resume from an earlier checkpoint, or start anew with --overwrite",
    )


def _warn_of_damage(damage: CheckpointDamaged, *, emit: Emit) -> None:
    warning = f"{damage.message}; it is skipped"
    emit(WarningMessage(warning, remedy="if this happens again, check the disk"))


def _is_intact(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointDamaged:
        return False
    return True


def _highest_update_first(checkpoints_folder: Path) -> list[Path]:
    update_of = {
        folder: int(match[1])
        for folder in checkpoints_folder.glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", folder.name)) and folder.is_dir()
    }
    return sorted(update_of, key=update_of.__getitem__, reverse=True)


def _discard(folder: Path) -> None:
    discarded = folder.with_name(folder.name + DISCARDED_SUFFIX)
    if discarded.exists():
        shutil.rmtree(discarded)
    os.replace(folder, discarded)
    shutil.rmtree(discarded)
