"""Tensors kept on disk from run to run: features of frozen layers, token ids of many texts.

An entry is ``KEY.safetensors``, tensors without padding, and ``KEY.json``, written last, which
says what they are. Tensors are mapped into memory, so that the system gives their memory up where
it is short. The key is a hash of all that they depend on.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open

from finetune import events
from finetune.events import Emit
from finetune.files import PARTIAL_SUFFIX, file_sha256, flush_to_disk, read_json

# What only lists or deletes entries does not wait for torch.
if TYPE_CHECKING:
    import torch

SUFFIX = ".safetensors"
FACTS = ".json"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32"}
# A file that a process still writes to has changed since.
LEFTOVER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """One entry of the store.

    Args:
        used_at: When it was last read or written, in seconds since 1970.
        facts: Shape, dtype, and what its writer noted; empty if the entry is damaged.
    """

    key: str
    size_bytes: int
    used_at: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class TensorStore:
    """Tensors on disk. What was read or written through this object is not evicted by it.

    Where a new entry exceeds ``limit_bytes`` in all, those go that were not used for longest.
    """

    folder: Path
    limit_bytes: int
    _keys_in_use: set[str] = field(default_factory=set, init=False)

    def would_fit(self, size_bytes: int) -> bool:
        """Whether the disk has room for an entry, with that of those it would evict."""
        existing = next(one for one in (self.folder, *self.folder.parents) if one.is_dir())
        evicted_bytes = sum(one.size_bytes for one in self._evicted_by(size_bytes) or ())
        return size_bytes <= shutil.disk_usage(existing).free + evicted_bytes

    def read(self, key: str, *, emit: Emit) -> "dict[str, torch.Tensor] | None":
        """Return the tensors kept under a key, mapped; None if there are none.

        None as well, with a warning, if the bytes are not those that were written.
        """
        file = self._file(key)
        try:
            if read_json(file.with_suffix(FACTS))["sha256"] != file_sha256(file):
                raise ValueError
            tensors = _map(file)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            emit(events.WarningMessage(f"{file} is damaged and is made anew"))
            return None
        self._keys_in_use.add(key)
        # A store that may only be read has nothing to evict.
        with suppress(OSError):
            os.utime(file)
        return tensors

    def write(
        self,
        key: str,
        pieces: "Iterable[torch.Tensor]",
        *,
        shapes: Mapping[str, tuple[int, ...]],
        notes: Mapping[str, Any],
    ) -> "dict[str, torch.Tensor]":
        """Keep tensors of one dtype under a key and return them, mapped.

        The pieces are on the CPU, and together all numbers of the tensors in their order. What does
        not fit the limit beside entries in use is not kept beyond this process.

        Raises:
            OSError: If the disk is full or the folder can't be written to.
            SafetensorError: If the pieces are not of these shapes.
        """
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        self._delete_leftovers()
        pieces = iter(pieces)
        first = next(pieces, torch.empty(0))
        header, data_bytes = _header(shapes, first.dtype)
        fits = self._make_room(len(header) + data_bytes, key=key)
        partial = self.folder / f"{uuid4().hex}{PARTIAL_SUFFIX}"
        try:
            digest = _write(partial, chain([header], map(_bytes_of, chain([first], pieces))))
            # What is mapped stays, whatever becomes of the file's name.
            tensors = _map(partial)
            if fits:
                _rename(partial, self._file(key))
                facts = {**notes, "dtype": _name_of(first.dtype), "sha256": digest}
                _write(partial, [json.dumps(facts).encode()])
                _rename(partial, self._file(key).with_suffix(FACTS))
                self._keys_in_use.add(key)
        finally:
            partial.unlink(missing_ok=True)
        return tensors

    def entries(self) -> list[Entry]:
        """Return what the store holds, the last used first."""
        found = []
        for file in self.folder.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another process may be deleting it
                status = file.stat()
                found.append(Entry(file.stem, status.st_size, status.st_mtime, _read_facts(file)))
        return sorted(found, key=lambda entry: -entry.used_at)

    def clear(self) -> int:
        """Delete all files, those that killed processes left too; return how many bytes."""
        suffixes = (FACTS, SUFFIX, PARTIAL_SUFFIX)
        return sum(_delete(file) for one in suffixes for file in self.folder.glob(f"*{one}"))

    def _evicted_by(self, size_bytes: int, *, key: str | None = None) -> list[Entry] | None:
        """Return what goes to make room for a new entry; None if it has no room all the same."""
        others = [entry for entry in self.entries() if entry.key != key]
        unused = [entry for entry in others if entry.key not in self._keys_in_use]
        used_bytes = sum(one.size_bytes for one in others if one.key in self._keys_in_use)
        left_bytes = self.limit_bytes - size_bytes - used_bytes
        if left_bytes < 0:
            return None
        totals = accumulate(entry.size_bytes for entry in unused)
        return [one for one, total in zip(unused, totals, strict=True) if total > left_bytes]

    def _make_room(self, size_bytes: int, *, key: str) -> bool:
        """Delete what a new entry evicts; return whether it has room then."""
        evicted = self._evicted_by(size_bytes, key=key)
        for entry in evicted or ():
            _delete(self._file(entry.key).with_suffix(FACTS))
            _delete(self._file(entry.key))
        return evicted is not None

    def _delete_leftovers(self) -> None:
        """Delete what killed processes left; it has no name that anybody would look for."""
        for partial in self.folder.glob(f"*{PARTIAL_SUFFIX}"):
            # It may be another user's, or another process may delete it first.
            with suppress(OSError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                    partial.unlink()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def key_of(parts: "Iterable[str | torch.Tensor]") -> str:
    """Return a key of texts and tensors on the CPU, in their order: 64 letters and digits.

    Each part is forgotten before the next is asked for.
    """
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
        else:
            # Without shape and dtype, different tensors may have the same bytes.
            digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
            digest.update(_bytes_of(part))
    return digest.hexdigest()


def _name_of(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: "torch.dtype") -> tuple[bytes, int]:
    """Return what a safetensors file of some tensors begins with, and how many bytes follow."""
    ends = [0, *accumulate(math.prod(shape) * dtype.itemsize for shape in shapes.values())]
    tensors = {
        name: {"dtype": DTYPES[_name_of(dtype)], "shape": shape, "data_offsets": offsets}
        for (name, shape), offsets in zip(shapes.items(), pairwise(ends), strict=True)
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header, ends[-1]


def _write(file: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file piece by piece; return its sha256."""
    digest = hashlib.sha256()
    with file.open("wb") as opened:
        for piece in pieces:
            opened.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _rename(written: Path, to: Path) -> None:
    flush_to_disk(written)
    os.replace(written, to)


def _map(file: Path) -> "dict[str, torch.Tensor]":
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _delete(file: Path) -> int:
    """Delete a file, which another process may do first; return its bytes."""
    with suppress(FileNotFoundError):
        size_bytes = file.stat().st_size
        file.unlink()
        return size_bytes
    return 0


def _read_facts(file: Path) -> Mapping[str, Any]:
    """Return what an entry says of itself; nothing if that can't be read."""
    try:
        facts = read_json(file.with_suffix(FACTS))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _bytes_of(tensor: "torch.Tensor") -> memoryview:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
