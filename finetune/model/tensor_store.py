"""Tensors that runs keep for other runs: features of frozen layers, token ids of many texts.

An entry is a safetensors file whose name is its key, a hash of everything that its tensors depend
on. It is written under a temporary name, renamed at the end, and read through a memory map. Files
without such a name and without the mark of this package are left as they are.
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
from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

from finetune.events import WarningMessage, emit
from finetune.files import PARTIAL_SUFFIX, WRITTEN_BY, flush_to_disk, temporary_path

# Listing or deleting entries does not import torch.
if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_PARTIAL_NAME = re.compile(rf"{_NAME.pattern}\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX}")
# A killed run left a partial file that is this old.
LEFTOVER_SECONDS = 24 * 3600
_MAX_HEADER_BYTES = 2**20
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}


class Entry(NamedTuple):
    """An entry of the store. ``used_at`` counts seconds since 1970."""

    file: Path
    size_bytes: int
    used_at: float


@dataclass(frozen=True)
class TensorStore:
    """Tensors on disk, at most ``limit_bytes``. The least recently used entries are evicted."""

    folder: Path
    limit_bytes: int

    def read(self, key: str) -> "Tensors | None":
        """Return the mapped tensors of an entry, or None if it is missing or damaged."""
        file = self._file(key)
        if not file.is_file():
            return None
        if not _is_ours(file):
            message = f"{file} is damaged, or another program wrote it"
            emit(WarningMessage(message, remedy="delete it, so that its place can be used"))
            return None
        try:
            tensors = map_tensors(file)
        except (OSError, SafetensorError):
            emit(WarningMessage(f"{file} is damaged and is made again"))
            file.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # a store that can only be read
            os.utime(file)
        return tensors

    def create(self, key: str, name: str, shape: tuple[int, int], dtype: str) -> Path:
        """Return a new file for ``write_rows`` of one tensor. OSError if the disk is full."""
        size_bytes = shape[0] * shape[1] * (4 if dtype.endswith("32") else 2)
        self.make_room(size_bytes)
        tensor = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [0, size_bytes]}
        header = json.dumps({"__metadata__": WRITTEN_BY, name: tensor}).encode()
        header += b" " * (-len(header) % 8)
        partial = temporary_path(self._file(key))
        with partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(file.tell() + size_bytes)
        return partial

    def write(self, key: str, tensors: "Tensors") -> "Tensors":
        """Write whole tensors on the CPU, and return them mapped."""
        from safetensors.torch import save

        self.make_room(sum(tensor.nbytes for tensor in tensors.values()))
        partial = temporary_path(self._file(key))
        try:
            partial.write_bytes(save(tensors, WRITTEN_BY))
            mapped = map_tensors(partial)
            self.keep(partial, key)
        finally:
            partial.unlink(missing_ok=True)
        return mapped

    def keep(self, partial: Path, key: str) -> None:
        """Give a whole file its name, unless it is larger than the limit or the name exists."""
        file = self._file(key)
        flush_to_disk(partial)
        if partial.stat().st_size <= self.limit_bytes and not os.path.lexists(file):
            partial.rename(file)

    def make_room(self, size_bytes: int) -> None:
        """Evict entries, so that new ones fit into the limit. OSError if the disk is full."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for partial in self._files(_PARTIAL_NAME):
            if time.time() - partial.used_at > LEFTOVER_SECONDS:
                partial.file.unlink(missing_ok=True)
        total_bytes = size_bytes
        for entry in self.entries() if size_bytes <= self.limit_bytes else ():
            total_bytes += entry.size_bytes
            if total_bytes > self.limit_bytes:
                entry.file.unlink(missing_ok=True)
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self) -> list[Entry]:
        """Return the entries, the last used first."""
        return sorted(self._files(_NAME), key=lambda entry: -entry.used_at)

    def clear(self) -> int:
        """Delete all entries, those of killed runs too; return the number of bytes."""
        entries = [*self._files(_NAME), *self._files(_PARTIAL_NAME)]
        for entry in entries:
            entry.file.unlink(missing_ok=True)
        return sum(entry.size_bytes for entry in entries)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _files(self, name: re.Pattern[str]) -> list[Entry]:
        """Return the files with such a name that a store wrote."""
        entries = []
        for path in self.folder.glob("*"):
            if name.fullmatch(path.name) and not path.is_symlink() and _is_ours(path):
                with suppress(FileNotFoundError):  # another process may be deleting it
                    entries.append(Entry(path, path.stat().st_size, path.stat().st_mtime))
        return entries


def write_rows(partial: Path, rows: "Iterable[tuple[int, torch.Tensor]]") -> None:
    """Write pieces of a tensor, each at the number of its first row, to a file of ``create``."""
    import torch

    descriptor = os.open(partial, os.O_RDWR)
    try:
        start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
        for first, piece in rows:
            data = piece.contiguous().view(torch.uint8).numpy().data.cast("B")
            place = start + first * piece.element_size() * piece.shape[-1]
            while data:
                written = os.pwrite(descriptor, data, place)
                data, place = data[written:], place + written
    finally:
        os.close(descriptor)


def map_tensors(file: Path) -> "Tensors":
    """Return the tensors of a file, mapped. They stay readable after the file is deleted."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def key_of(parts: "Iterable[str | torch.Tensor]") -> str:
    """Return a key of texts and tensors on the CPU, in their order; one is in memory at a time."""
    import torch

    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
        else:
            # Different tensors may have the same bytes.
            digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little") % _MAX_HEADER_BYTES)
        metadata: Mapping[str, str] = json.loads(header)["__metadata__"]
        return metadata.items() >= WRITTEN_BY.items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
