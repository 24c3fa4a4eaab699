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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointDamaged
from finetune.events import Emit, WarningMessage
from finetune.files import PARTIAL_SUFFIX, file_sha256, flush_to_disk, read_json, write_json

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSORS_SUFFIX = ".safetensors"
DISCARDED_SUFFIX = ".discarded"
# A full disk, a folder that is gone or may not be written: Python's words and safetensors'.
WRITE_ERRORS = (OSError, SafetensorError)


def reason_of(error: Exception) -> str:
    """Return in words why a file could not be written."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def checkpoint_path(checkpoints_folder: Path, *, step: int) -> Path:
    """Return the folder of the checkpoint that follows a step, counted from 1."""
    return checkpoints_folder / f"step-{step}"


def write_checkpoint(
    folder: Path,
    *,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint, in place of one that bears the same name.

    Args:
        folder: Where; its parents are made too.
        tensors: Groups of named tensors of any shape, dtype and device. No two tensors of a group
            may share memory.
        state: What JSON can say and give back equal: string keys, lists in place of tuples,
            finite numbers.
        check: Called before each file of tensors; an OSError of it ends the writing.

    Raises:
        ValueError: If ``state`` would not read back equal to what it is now.
    """
    _refuse_what_json_would_alter(state)
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _write_files(partial, tensors, state, check)
        _rename(partial, folder)
    except WRITE_ERRORS:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_to_disk(folder.parent)


def _rename(partial: Path, folder: Path) -> None:
    """Let a complete checkpoint take the place of an older one, which stays if that fails."""
    older = _set_aside(folder) if folder.exists() else None
    try:
        os.replace(partial, folder)
    except OSError:
        if older:
            os.replace(older, folder)
        raise
    if older:
        shutil.rmtree(older, ignore_errors=True)


def _write_files(
    partial: Path,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: Mapping[str, Any],
    check: Callable[[], None],
) -> None:
    write_json(partial / STATE_NAME, state)
    # safetensors keeps its files from all other users; Python's files are as the user's umask says.
    permissions = (partial / STATE_NAME).stat().st_mode & 0o777
    for group, named_tensors in tensors.items():
        check()
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
        raise damaged(folder, str(error)) from error


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """Compare a checkpoint's files with its manifest, and return the manifest.

    Raises:
        CheckpointDamaged: If a file is missing or not what was written.
    """
    try:
        manifest = read_json(folder / MANIFEST_NAME)
    except (OSError, ValueError):
        raise damaged(folder, f"{MANIFEST_NAME} is missing or unreadable") from None
    if not isinstance(manifest, dict) or STATE_NAME not in manifest:
        raise damaged(folder, f"{MANIFEST_NAME} does not list {STATE_NAME}")
    for name, written in manifest.items():
        file = folder / name
        if file.parent != folder or not file.is_file():
            raise damaged(folder, f"{name} is missing")
        if _fingerprint(file) != written:
            raise damaged(folder, f"{name} is not what was written")
    return manifest


def highest_step_first(checkpoints_folder: Path) -> list[Path]:
    """Return the checkpoints to resume from, damaged or not, by their steps."""
    folders = [
        folder
        for folder in checkpoints_folder.glob("step-*")
        if re.fullmatch(r"step-\d+", folder.name) and folder.is_dir()
    ]
    return sorted(folders, key=_update_of, reverse=True)


def remove_old_checkpoints(
    checkpoints_folder: Path,
    *,
    keep: int,
    written: Sequence[Path] = (),
    checked_steps: int | None = None,
) -> None:
    """Delete all but the ``keep`` highest steps, damaged checkpoints, and what kills left over.

    Those that stay are verified first, so that no good checkpoint goes in favour of a damaged one;
    not so those that this process has ``written``, the last of them just now. Higher steps than
    that were passed over when the run was resumed. The newest of at most ``checked_steps`` stays
    too: what the device has computed since then may be wrong.
    """
    for suffix in (PARTIAL_SUFFIX, DISCARDED_SUFFIX):
        for leftover in checkpoints_folder.glob(f"*{suffix}"):
            shutil.rmtree(leftover)
    kept = 0
    folders = highest_step_first(checkpoints_folder)
    is_known = bool(written) and written[-1] in folders
    passed_over = folders[: folders.index(written[-1])] if is_known else []
    needs_checked = checked_steps is not None
    for folder in folders:
        is_checked = checked_steps is not None and _update_of(folder) <= checked_steps
        is_wanted = folder not in passed_over and (kept < keep or (needs_checked and is_checked))
        if is_wanted and (folder in written or _is_intact(folder)):
            kept += 1
            needs_checked = needs_checked and not is_checked
        else:
            _discard(folder)


def put_back_discarded(folder: Path) -> None:
    """Undo the beginning of a replacement: a kill came before the new checkpoint had the name."""
    discarded = folder.with_name(folder.name + DISCARDED_SUFFIX)
    if discarded.exists() and not folder.exists():
        os.replace(discarded, folder)


def discard_checkpoints_after(checkpoints_folder: Path, *, step: int) -> Path | None:
    """Delete the checkpoints that follow a step, and return the newest of the others."""
    folders = highest_step_first(checkpoints_folder)
    good = [folder for folder in folders if _update_of(folder) <= step]
    for folder in set(folders).difference(good):
        _discard(folder)
    return good[0] if good else None


def _refuse_what_json_would_alter(state: Mapping[str, Any]) -> None:
    if json.loads(json.dumps(state, allow_nan=False)) != state:
        raise ValueError("the state has keys that are not strings, or tuples")


def _fingerprint(file: Path) -> dict[str, Any]:
    return {"size_bytes": file.stat().st_size, "sha256": file_sha256(file)}


def damaged(folder: Path, what: str) -> CheckpointDamaged:
    """Return the error that names a checkpoint and its damage."""
    return CheckpointDamaged(
        f"checkpoint {folder} is damaged: {what}",
        remedy="resume from an earlier checkpoint, or start anew with --overwrite",
    )


def warn_of_damage(damage: CheckpointDamaged, *, emit: Emit) -> None:
    """Say that a checkpoint is not used."""
    warning = f"{damage.message}; it is skipped"
    emit(WarningMessage(warning, remedy="if this happens again, check the disk"))


def _is_intact(folder: Path) -> bool:
    try:
        verify_checkpoint(folder)
    except CheckpointDamaged:
        return False
    return True


def _update_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _discard(folder: Path) -> None:
    shutil.rmtree(_set_aside(folder))


def _set_aside(folder: Path) -> Path:
    """Take its final name from a checkpoint that is to be deleted; return the other name."""
    discarded = folder.with_name(folder.name + DISCARDED_SUFFIX)
    if discarded.exists():
        shutil.rmtree(discarded)
    os.replace(folder, discarded)
    return discarded
