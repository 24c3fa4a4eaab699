"""Tensors kept on disk from run to run: features of frozen layers, token ids of many texts.

An entry is a safetensors file named by its key, a hash of everything that its tensors depend on;
its metadata describes them. It is written under another name and renamed at the end. It is
memory-mapped: the system can take the memory back, and the tensors stay readable after the file is
deleted. Whatever has no such name and no such metadata belongs to somebody else, and stays.
"""

import errno
import hashlib
import json
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
from finetune.files import PARTIAL_SUFFIX, WRITTEN_BY, flush_to_disk, temporary_path

# Listing or deleting entries does not wait for torch.
if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

# Of an entry; of one that is being written.
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL_NAME = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX}")
# A file that a process still writes to has changed since.
LEFTOVER_SECONDS = 24 * 3600
# Those of a store are far smaller.
_MAX_HEADER_BYTES = 2**20


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

    def read(self, key: str, *, emit: Emit) -> "Tensors | None":
        """Return the tensors of an entry, mapped; None if missing or, with a warning, damaged."""
        file = self._file(key)
        if not file.is_file():
            return None
        if not _read_notes(file):
            message = f"{file} is damaged, or no store has written it"
            emit(WarningMessage(message, remedy="delete it, so that its place can be used"))
            return None
        try:
            tensors = _map(file)
        except (OSError, SafetensorError):
            emit(WarningMessage(f"{file} is damaged and is made anew"))
            _delete(file)
            return None
        # A store that may only be read has nothing to evict.
        with suppress(OSError):
            os.utime(file)
        return tensors

    def make_room(self, size_bytes: int) -> bool:
        """Evict what new entries need; return whether they may be kept, by the store's limit.

        What is larger is not kept beyond this process. OSError if the disk is full.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        # Those that killed runs left.
        for partial in self._files(_PARTIAL_NAME):
            with suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                    partial.unlink()
        is_kept = size_bytes <= self.limit_bytes
        total_bytes = size_bytes
        for entry in self.entries() if is_kept else ():
            total_bytes += entry.size_bytes
            if total_bytes > self.limit_bytes:
                _delete(self._file(entry.key))
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return is_kept

    def write(
        self, key: str, tensors: "Tensors", *, is_kept: bool, notes: Mapping[str, Any]
    ) -> "Tensors":
        """Write tensors on the CPU for which there is room, and return them, mapped."""
        from safetensors.torch import save

        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        metadata = {"notes": json.dumps({**notes, **WRITTEN_BY, "dtype": dtype})}
        file = self._file(key)
        partial = temporary_path(file)
        try:
            partial.write_bytes(save(tensors, metadata))
            flush_to_disk(partial)
            mapped = _map(partial)
            # Another process may have written the same entry meanwhile.
            if is_kept and not os.path.lexists(file):
                partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
        return mapped

    def entries(self) -> list[Entry]:
        """Return what the store holds, the last used first."""
        found = []
        for file in self._files(_NAME):
            # Another process may be deleting it.
            with suppress(FileNotFoundError):
                status = file.stat()
                notes = _read_notes(file)
                found.append(Entry(file.stem, status.st_size, status.st_mtime, notes))
        return sorted(found, key=lambda entry: -entry.used_at)

    def clear(self) -> int:
        """Delete all entries, those of killed runs too; return how many bytes."""
        return sum(map(_delete, [*self._files(_NAME), *self._files(_PARTIAL_NAME)]))

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _files(self, name: re.Pattern[str]) -> list[Path]:
        """Return the files of such a name that a store has written."""
        files = [path for path in self.folder.glob("*") if name.fullmatch(path.name)]
        return [path for path in files if not path.is_symlink() and _read_notes(path)]


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


def _map(file: Path) -> "Tensors":
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _read_notes(file: Path) -> Mapping[str, Any]:
    """Return what a file says of itself, even if it is cut off; nothing if no store wrote it."""
    try:
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little") % _MAX_HEADER_BYTES)
        notes = json.loads(json.loads(header)["__metadata__"]["notes"])
        return notes if notes.items() >= WRITTEN_BY.items() else {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _delete(file: Path) -> int:
    """Delete an entry; return its bytes, 0 if it can't be deleted."""
    try:
        size_bytes = file.stat().st_size
        file.unlink()
        return size_bytes
    except OSError:
        return 0
