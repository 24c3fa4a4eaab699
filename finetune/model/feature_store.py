"""What a frozen core gave for texts, kept in files from run to run.

A file holds one line of numbers a token or a text, without padding; then, as JSON, what they are;
then the sha256 of it all. It is read by mapping it: the system holds it in memory while there is
room, and gives that memory up when there is none. It is found by a key made of everything that its
content depends on.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import events
from finetune.events import Emit
from finetune.files import PARTIAL_SUFFIX, flush_to_disk

SUFFIX = ".lines"
PARTIAL = SUFFIX + PARTIAL_SUFFIX
DIGEST_CHARACTERS = 64
MOST_FACTS_BYTES = 2**16
# A file that a process still writes to has changed since.
LEFTOVER_SECONDS = 24 * 3600


@dataclass(frozen=True)
class Entry:
    """One file of the store.

    Args:
        key: What its content depends on, hashed.
        size_bytes: Size of the file.
        used_at: When it was last read or written, in seconds since 1970.
        facts: What it says of itself: shape, dtype, and what its writer noted. Empty if it is
            damaged.
    """

    key: str
    size_bytes: int
    used_at: float
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class FeatureStore:
    """Files with the states of frozen cores.

    Args:
        folder: Where they are; made when needed.
        limit_bytes: Size that all files together may have. When a new one would not fit, those
            that were not used for the longest time go.
    """

    folder: Path
    limit_bytes: int

    def read(self, key: str, *, emit: Emit) -> torch.Tensor | None:
        """Return the lines kept under a key, mapped: floats of shape [lines, hidden], or None.

        None as well, with a warning, if the bytes are not those that were written.
        """
        file = self._file(key)
        try:
            lines = _read_lines(file)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except (OSError, ValueError):
            emit(events.WarningMessage(f"{file} is damaged and is made anew"))
            return None
        # Where a store may only be read, nobody evicts what was not used for long.
        with suppress(OSError):
            os.utime(file)
        return lines

    def write(
        self, key: str, pieces: Iterable[torch.Tensor], *, notes: Mapping[str, Any]
    ) -> torch.Tensor:
        """Keep lines under a key and return them, mapped.

        The key stands for nothing before all is on the disk. Lines that are larger than the limit
        are not kept beyond this process.

        Args:
            key: Letters and digits.
            pieces: The lines in their order, each piece of shape [lines, hidden] on the CPU.
            notes: What is said of them in the list of the store.

        Raises:
            OSError: If the disk is full or the folder can't be written to.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._delete_leftovers()
        descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=PARTIAL)
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                _write_lines(file, pieces, notes=notes)
            # What is mapped stays, whatever becomes of the file's name.
            lines = _lines_in(_map(partial))
            if partial.stat().st_size <= self.limit_bytes:
                flush_to_disk(partial)
                os.replace(partial, self._file(key))
                self._evict(keep=key)
        finally:
            partial.unlink(missing_ok=True)
        return lines

    def entries(self) -> list[Entry]:
        """Return what the store holds, the last used first."""
        found = []
        for file in self.folder.glob(f"*{SUFFIX}"):
            # Another process may be deleting it.
            with suppress(OSError):
                status = file.stat()
                found.append(Entry(file.stem, status.st_size, status.st_mtime, _read_facts(file)))
        return sorted(found, key=lambda entry: -entry.used_at)

    def clear(self) -> int:
        """Delete all files, those that killed processes left too; return how many bytes."""
        freed_bytes = 0
        for file in (*self.folder.glob(f"*{SUFFIX}"), *self.folder.glob(f"*{PARTIAL}")):
            with suppress(FileNotFoundError):
                size_bytes = file.stat().st_size
                file.unlink()
                freed_bytes += size_bytes
        return freed_bytes

    def _evict(self, *, keep: str) -> None:
        left_bytes = self.limit_bytes
        for entry in sorted(self.entries(), key=lambda entry: entry.key != keep):
            left_bytes -= entry.size_bytes
            if left_bytes < 0:
                self._file(entry.key).unlink(missing_ok=True)

    def _delete_leftovers(self) -> None:
        """Delete what killed processes left; it has no name that anybody would look for."""
        for partial in self.folder.glob(f"*{PARTIAL}"):
            with suppress(FileNotFoundError):
                if time.time() - partial.stat().st_mtime > LEFTOVER_SECONDS:
                    partial.unlink()

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"


def _write_lines(
    file: IO[bytes], pieces: Iterable[torch.Tensor], *, notes: Mapping[str, Any]
) -> None:
    """Write pieces one after another, then what they are, then the sha256 of it all."""
    digest = hashlib.sha256()

    def add(content: bytes | memoryview) -> None:
        file.write(content)
        digest.update(content)

    lines, width, dtype = 0, 0, torch.float32
    for piece in pieces:
        add(_bytes_of(piece).data)
        lines, width, dtype = lines + len(piece), piece.shape[1], piece.dtype
    facts = {**notes, "shape": [lines, width], "dtype": str(dtype).removeprefix("torch.")}
    add(f"\n{json.dumps(facts)}\n".encode())
    file.write(digest.hexdigest().encode())


def _read_lines(file: Path) -> torch.Tensor:
    """Map a file's lines.

    Raises:
        OSError: If there is no such file, or it can't be read.
        ValueError: If its bytes are not those that were written.
    """
    content = _map(file)
    digest = hashlib.sha256(content[:-DIGEST_CHARACTERS].data).hexdigest()
    if content[-DIGEST_CHARACTERS:].tobytes() != digest.encode():
        raise ValueError(f"{file} is damaged")
    return _lines_in(content)


def _map(file: Path) -> NDArray[np.uint8]:
    # In mode c nobody writes to the file, and PyTorch does not warn that it can't be written to.
    return np.memmap(file, np.uint8, mode="c")


def _lines_in(content: NDArray[np.uint8]) -> torch.Tensor:
    facts = _facts_at(content[-MOST_FACTS_BYTES:].tobytes())
    lines, width = facts["shape"]
    dtype: torch.dtype = getattr(torch, facts["dtype"])
    numbers = torch.from_numpy(content[: lines * width * dtype.itemsize])
    return numbers.view(dtype).reshape(lines, width)


def _read_facts(file: Path) -> Mapping[str, Any]:
    """Return what a file says of itself; nothing if that can't be read."""
    with file.open("rb") as opened:
        size_bytes = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size_bytes - MOST_FACTS_BYTES))
        end = opened.read()
    try:
        facts = _facts_at(end)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _facts_at(end: bytes) -> Any:
    _, facts, _ = end.rsplit(b"\n", 2)
    return json.loads(facts)


def key_of(parts: Iterable[str | torch.Tensor]) -> str:
    """Return a key of texts and tensors on the CPU, in their order: 64 letters and digits."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(f"{len(part)}:{part}".encode())
        else:
            # Without shape and dtype, different tensors may have the same bytes.
            digest.update(f"{tuple(part.shape)}{part.dtype}".encode())
            digest.update(_bytes_of(part).data)
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    content: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return content
