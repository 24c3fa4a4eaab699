"""Tensors kept on disk from run to run: features of frozen layers, token ids of many texts.

An entry is a folder named by its key, a hash of everything that its tensors depend on. It holds one
or more safetensors files, and ``notes.json``, which describes them. An entry is written under
another name and renamed at the end. Its files are memory-mapped: the system can take the memory
back, and the tensors stay readable after the files are deleted. Whatever has no such name and no
such notes belongs to somebody else, and stays.
"""

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from finetune.events import Emit, WarningMessage
from finetune.files import (
    PARTIAL_SUFFIX,
    WRITTEN_BY,
    flush_to_disk,
    read_json,
    temporary_path,
    write_json,
)

# Listing or deleting entries does not wait for torch.
if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

NOTES = "notes.json"
# Of an entry; of one that is being written or deleted.
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL_NAME = re.compile(rf"[0-9a-f]{{64}}\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX}")
_FILE_NAME = re.compile(rf"\d{{5}}\.safetensors|{re.escape(NOTES)}")
# A folder that a process still writes to has changed since.
LEFTOVER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """One entry of the store; ``used_at`` counts seconds since 1970, ``notes`` are its writer's."""

    key: str
    size_bytes: int
    used_at: float
    notes: Mapping[str, Any]


@dataclass(frozen=True)
class TensorStore:
    """Tensors on disk: at most ``limit_bytes``, the least recently used are evicted."""

    folder: Path
    limit_bytes: int

    def read(self, key: str, *, emit: Emit) -> "list[Tensors] | None":
        """Return the parts of an entry, mapped; None if missing or, with a warning, damaged."""
        entry = self.folder / key
        if not os.path.isfile(entry / NOTES):
            return None
        try:
            count = read_json(entry / NOTES)["parts"]
            parts = [_map(_part(entry, number)) for number in range(count)]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            if _read_notes(entry):
                emit(WarningMessage(f"{entry} is damaged and is made anew"))
                _delete(entry)
            else:
                message = f"{entry} is damaged, or no store has written it"
                emit(WarningMessage(message, remedy="delete it, so that its place can be used"))
            return None
        # A store that may only be read has nothing to evict.
        with suppress(OSError):
            os.utime(entry)
        return parts

    def write(
        self, key: str, parts: "Iterable[Tensors]", *, size_bytes: int, notes: Mapping[str, Any]
    ) -> "list[Tensors]":
        """Keep tensors on the CPU, a file for each part, and return them, mapped.

        What is larger than the limit is not kept beyond this process. OSError if the disk is full.
        """
        from safetensors.torch import save

        self.folder.mkdir(parents=True, exist_ok=True)
        # Those that killed processes have left.
        for partial in self._folders(_PARTIAL_NAME):
            with suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                    _delete(partial)
        is_kept = size_bytes <= self.limit_bytes
        total_bytes = size_bytes
        for entry in self.entries() if is_kept else ():
            total_bytes += entry.size_bytes
            if total_bytes > self.limit_bytes:
                _delete(self.folder / entry.key)
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial = temporary_path(self.folder / key)
        partial.mkdir()
        try:
            write_json(partial / NOTES, WRITTEN_BY)
            mapped: list[Tensors] = []
            for part in parts:
                file = _part(partial, len(mapped))
                file.write_bytes(save(part))
                flush_to_disk(file)
                mapped.append(_map(file))
            dtype = str(next(iter(mapped[0].values())).dtype).removeprefix("torch.")
            entry_notes = {**notes, **WRITTEN_BY, "dtype": dtype, "parts": len(mapped)}
            write_json(partial / NOTES, entry_notes)
            if is_kept:
                # Another process may have written the same entry meanwhile.
                with suppress(OSError):
                    partial.rename(self.folder / key)
        finally:
            _delete_files(partial)
        return mapped

    def entries(self) -> list[Entry]:
        """Return what the store holds, the last used first."""
        found = []
        for entry in self._folders(_NAME):
            # Another process may be deleting it.
            with suppress(FileNotFoundError):
                size_bytes = sum(file.stat().st_size for file in _files(entry))
                used_at = entry.stat().st_mtime
                found.append(Entry(entry.name, size_bytes, used_at, _read_notes(entry)))
        return sorted(found, key=lambda entry: -entry.used_at)

    def _folders(self, name: re.Pattern[str]) -> list[Path]:
        """Return the folders of such a name that a store has written."""
        folders = [path for path in self.folder.glob("*") if name.fullmatch(path.name)]
        return [path for path in folders if not path.is_symlink() and _read_notes(path)]

    def clear(self) -> int:
        """Delete all entries, those that killed processes left too; return how many bytes."""
        entries = [self.folder / entry.key for entry in self.entries()]
        return sum(map(_delete, [*entries, *self._folders(_PARTIAL_NAME)]))


def key_of(parts: "Iterable[str | torch.Tensor]") -> str:
    """Return a key of texts and tensors on the CPU, in their order; one is in memory at a time."""
    import torch

    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
        else:
            # Without shape and dtype, different tensors may have the same bytes.
            digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _part(entry: Path, number: int) -> Path:
    return entry / f"{number:05}.safetensors"


def _map(file: Path) -> "Tensors":
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _read_notes(entry: Path) -> Mapping[str, Any]:
    """Return what an entry says of itself; nothing if no store has written it."""
    try:
        notes = read_json(entry / NOTES)
        return notes if notes.items() >= WRITTEN_BY.items() else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _files(entry: Path) -> list[Path]:
    """Return the files of an entry, its notes last."""
    files = [file for file in entry.iterdir() if _FILE_NAME.fullmatch(file.name)]
    return sorted(file for file in files if file.is_file() and not file.is_symlink())


def _delete(entry: Path) -> int:
    """Delete an entry, for other processes at once; return its bytes, 0 if it can't be deleted."""
    try:
        if len(files := _files(entry)) == len(list(entry.iterdir())):
            entry = entry.rename(temporary_path(entry.with_name(entry.name[:64])))
            files = _files(entry)
        size_bytes = sum(file.stat().st_size for file in files)
    except OSError:
        return 0
    _delete_files(entry)
    return size_bytes


def _delete_files(entry: Path) -> None:
    with suppress(OSError):
        for file in _files(entry):
            file.unlink()
        entry.rmdir()
