"""A checkpoint as files: written whole or not at all, verified when read, and without pickle.

    step-N/ or best-N/
      <group>.safetensors  a file for each group of tensors, such as model and optimizer
      state.json           numbers and words
      manifest.json        size and sha256 of the others; written last

A folder gets its final name when it is complete, so that whenever a process is killed, the manifest
shows whether its files are what was written.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.errors import CheckpointDamaged
from finetune.files import PARTIAL_SUFFIX, file_sha256, flush_to_disk, read_json, write_json

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSORS_SUFFIX = ".safetensors"
# A full disk, or a folder that is gone or may not be written.
WRITE_ERRORS = (OSError, SafetensorError)


def reason_of(error: Exception) -> str:
    """Return in words why a file could not be written."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def step_folder(checkpoints_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after a step."""
    return checkpoints_folder / f"step-{step}"


def best_folder(checkpoints_folder: Path, step: int) -> Path:
    """Return the folder of a best model, that of a step."""
    return checkpoints_folder / f"best-{step}"


def newest_first(checkpoints_folder: Path) -> list[Path]:
    """Return the checkpoints to resume from, damaged or not, by their steps."""
    folders = [
        folder
        for folder in checkpoints_folder.glob("step-*")
        if re.fullmatch(r"step-\d+", folder.name) and folder.is_dir()
    ]
    return sorted(folders, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def write_checkpoint(
    folder: Path, *, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: Mapping[str, Any]
) -> None:
    """Write groups of named tensors, and JSON, in place of a checkpoint of the same name."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_json(partial / STATE_NAME, state)
        # safetensors lets only the owner read its files; ours follow the user's umask.
        permissions = (partial / STATE_NAME).stat().st_mode & 0o777
        for group, named_tensors in tensors.items():
            file = partial / f"{group}{TENSORS_SUFFIX}"
            save_file({name: tensor.contiguous() for name, tensor in named_tensors.items()}, file)
            file.chmod(permissions)
            flush_to_disk(file)
        manifest = {file.name: _fingerprint(file) for file in sorted(partial.iterdir())}
        write_json(partial / MANIFEST_NAME, manifest)
        flush_to_disk(partial)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except WRITE_ERRORS:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    flush_to_disk(folder.parent)


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
