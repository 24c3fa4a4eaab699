"""Stores frozen-layer features for later runs, one file per split.

A file name is its key, a hash of everything that the features depend on. Other files in the
folder are left unchanged.
"""

import errno
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune import hub
from finetune.config.schema import CacheConfig
from finetune.files import PARTIAL_SUFFIX, WRITTEN_BY, read_json, replacing_file

if TYPE_CHECKING:
    import torch

# Earlier versions wrote .safetensors.
_NAME = re.compile(rf"[0-9a-f]{{64}}\.(features|safetensors)(\.[0-9a-f]{{32}}\{PARTIAL_SUFFIX})?")
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class TensorStore:
    """Features on disk, at most ``limit_bytes``. The least recently used files are deleted.

    Each file ends with the sha256 of its vectors.
    """

    folder: Path
    limit_bytes: int

    def read(self, key: str, shape: tuple[int, int]) -> "torch.Tensor | None":
        """Map the float32 vectors of a file, or return None if it is missing or damaged."""
        file = self._file(key)
        with suppress(OSError, ValueError):  # ValueError if it is empty
            size_bytes, content = _FLOAT_BYTES * prod(shape), np.memmap(file, np.uint8, mode="r")
            if content[size_bytes:].tobytes() == hashlib.sha256(content[:size_bytes].data).digest():
                with suppress(OSError):  # the store may be read-only
                    os.utime(file)
                return map_vectors(file, shape)
        return None

    @contextmanager
    def creating(self, key: str, shape: tuple[int, int]) -> Iterator[Path]:
        """Yield a file for ``write_vectors``, kept unless too large; OSError on a full disk."""
        size_bytes = total_bytes = _FLOAT_BYTES * prod(shape)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.files():
            with suppress(FileNotFoundError):  # another process may have deleted it
                total_bytes += file.stat().st_size
                if size_bytes <= self.limit_bytes < total_bytes:
                    file.unlink()
        if size_bytes > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with replacing_file(self._file(key)) as partial:
            with partial.open("wb") as opened:
                opened.truncate(size_bytes)
            yield partial
            digest = hashlib.sha256(np.memmap(partial, np.uint8, mode="r").data).digest()
            with partial.open("ab") as opened:
                opened.write(digest)
        if size_bytes > self.limit_bytes:
            self._file(key).unlink()

    def files(self) -> list[Path]:
        """Return the files of the store and leftovers of killed runs, most recently used first."""
        files = [file for file in self.folder.glob("*") if _NAME.fullmatch(file.name)]
        files = [file for file in files if file.is_file() and not file.is_symlink()]
        used_at = {file: file.stat().st_mtime for file in files}
        return sorted(used_at, key=used_at.__getitem__, reverse=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.features"


def write_vectors(file: Path, pieces: "Iterable[tuple[int, torch.Tensor]]") -> None:
    """Write float32 tensors [vectors, hidden], each at the position of its first vector."""
    with file.open("r+b") as opened:
        for first, vectors in pieces:
            opened.seek(_FLOAT_BYTES * first * vectors.shape[1])
            opened.write(vectors.contiguous().numpy().data)


def map_vectors(file: Path, shape: tuple[int, int]) -> "torch.Tensor":
    """Map the vectors of a file. They remain readable after the file is deleted."""
    import torch

    # torch.from_file maps files as writable, and Linux rejects such maps if they exceed the memory.
    mapped = np.memmap(file, np.float32, mode="r", shape=shape)
    with warnings.catch_warnings(action="ignore"):  # the tensor is not writable
        return torch.from_numpy(mapped)


def key_of(parts: "Iterable[str | torch.Tensor]") -> str:
    """Return a hash of texts and tensors, in order. Only one is in memory at a time."""
    import torch

    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
        else:
            # Different tensors can have the same bytes.
            digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
            content = part.detach().cpu().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def cache_folder(options: CacheConfig, name: str) -> Path:
    """Return the cache folder for one kind of files."""
    if options.cache_dir is None:
        return hub.cache_folder(name)
    return Path(options.cache_dir).expanduser() / name


def measured_files(options: CacheConfig) -> list[Path]:
    """Return the files with measured batch sizes and precision timings."""
    folders = (cache_folder(options, name) for name in ("batches", "precision"))
    return [file for folder in folders for file in folder.glob("*.json") if _is_measurement(file)]


def _is_measurement(file: Path) -> bool:
    with suppress(OSError, ValueError):
        content = read_json(file)
        return isinstance(content, dict) and content.items() >= WRITTEN_BY.items()
    return False


def open_tensor_store(options: CacheConfig) -> TensorStore:
    """Open the store of a configuration."""
    folder = cache_folder(options, "features")
    return TensorStore(folder, limit_bytes=int(options.cache_gib * 2**30))
