"""Stores tensors for later runs: features of frozen layers, token ids of many texts.

An entry is a safetensors file whose name is its key, a hash of everything that its tensors depend
on. Files without such a name and without the mark of this package are left as they are.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from finetune import hub
from finetune.config.schema import CacheConfig
from finetune.events import WarningMessage, emit
from finetune.files import PARTIAL_SUFFIX, WRITTEN_BY, flush_to_disk, read_json, temporary_path

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

_NAME = re.compile(rf"[0-9a-f]{{64}}\.safetensors(\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX})?")
# A partial file that is this old was left by a killed run.
LEFTOVER_SECONDS = 24 * 3600
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


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
        with suppress(OSError):  # a store that can only be read
            os.utime(file)
        return map_tensors(file)

    def create(self, key: str, name: str, shape: tuple[int, int], dtype: str) -> Path:
        """Return a new file for ``write_rows`` of one tensor. OSError if the disk is full."""
        size_bytes = shape[0] * shape[1] * (4 if dtype == "float32" else 2)
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
        """Rename a complete file, unless it exceeds the limit or the name exists."""
        file = self._file(key)
        flush_to_disk(partial)
        if partial.stat().st_size <= self.limit_bytes and not os.path.lexists(file):
            partial.rename(file)

    def make_room(self, size_bytes: int) -> None:
        """Evict entries, so that new ones fit into the limit. OSError if the disk is full."""
        self.folder.mkdir(parents=True, exist_ok=True)
        total_bytes = size_bytes
        for file in self._files():
            with suppress(FileNotFoundError):  # another process may be deleting it
                status = file.stat()
                if file.suffix == PARTIAL_SUFFIX:
                    evicts = time.time() - status.st_mtime > LEFTOVER_SECONDS
                else:
                    total_bytes += status.st_size
                    evicts = size_bytes <= self.limit_bytes < total_bytes
                if evicts:
                    file.unlink()
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def entries(self) -> list[Path]:
        """Return the files of the entries, the last used first."""
        return [file for file in self._files() if file.suffix != PARTIAL_SUFFIX]

    def clear(self) -> int:
        """Delete all entries and leftovers of killed runs; return the number of bytes."""
        size_bytes = 0
        for file in self._files():
            size_bytes += file.stat().st_size
            file.unlink(missing_ok=True)
        return size_bytes

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _files(self) -> list[Path]:
        """Return the files that a store wrote, partial ones too, the last used first."""
        files = [file for file in self.folder.glob("*") if _NAME.fullmatch(file.name)]
        used_at = {file: file.stat().st_mtime for file in files if _is_ours(file)}
        return sorted(used_at, key=used_at.__getitem__, reverse=True)


def write_rows(partial: Path, rows: "Iterable[tuple[int, torch.Tensor]]") -> None:
    """Write pieces of a tensor, each at the number of its first row, to a file of ``create``."""
    import torch

    with partial.open("r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        for first, piece in rows:
            file.seek(start + first * piece.element_size() * piece.shape[-1])
            file.write(piece.contiguous().view(torch.uint8).numpy().data)


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
    """Return whether a store wrote a file. Partial files have their own suffix."""
    if file.is_symlink() or file.suffix == PARTIAL_SUFFIX:
        return file.is_file() and not file.is_symlink()
    with suppress(OSError, SafetensorError), safe_open(file, framework="numpy") as opened:
        return (opened.metadata() or {}).items() >= WRITTEN_BY.items()
    return False


def cache_folder(options: CacheConfig, name: str) -> Path:
    """Return the cache folder for one kind of files."""
    if options.cache_dir is None:
        return hub.cache_folder(name)
    return Path(options.cache_dir).expanduser() / name


def measured_files(options: CacheConfig) -> list[Path]:
    """Return our files of batch sizes and of timings of precisions that were measured."""
    folders = (cache_folder(options, name) for name in ("batches", "precision"))
    return [file for folder in folders for file in folder.glob("*.json") if _is_measurement(file)]


def _is_measurement(file: Path) -> bool:
    with suppress(OSError, ValueError):
        content = read_json(file)
        return isinstance(content, dict) and content.items() >= WRITTEN_BY.items()
    return False


def open_tensor_store(options: CacheConfig) -> TensorStore:
    """Return the store of a configuration."""
    folder = cache_folder(options, "features")
    return TensorStore(folder, limit_bytes=int(options.cache_gib * 2**30))
