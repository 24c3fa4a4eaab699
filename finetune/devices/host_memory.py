"""Host memory: how much is free, how much a process uses, and when it runs short."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.devices import host
from finetune.devices.host import gibibytes

# Fraction of memory that is left to the rest of the machine or control group. Below half of
# it, memory runs short.
_RESERVE_SHARE = 0.05
# Systems move single pages to the disk at any time; this is more than that.
_MAX_SWAP_GROWTH_BYTES = 128 * 2**20
# On macOS: the index of ri_phys_footprint among the 64-bit numbers of rusage_info_v0, after the two
# of ri_uuid, and the size of a buffer that is large enough for later systems (sys/resource.h).
_FOOTPRINT_INDEX = 9
_USAGE_NUMBERS = 64
_USAGE_VERSION = 0


@dataclass(frozen=True)
class GroupLimit:
    """Memory limit and use of a Linux control group, without file cache that can be dropped."""

    limit_bytes: int
    used_bytes: int


def group_limits(
    *, process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[GroupLimit]:
    """Yield the memory limits of this process's control group and of each group around it."""
    if not process.is_file():
        return
    lines = process.read_text(encoding="utf-8").splitlines()
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if path is None:
        return
    # In a container, the root is the container's own group, whatever the path of the process.
    group = root / path if (root / path).is_dir() and ".." not in path else root
    while group.is_relative_to(root):
        # memory.high slows a group down long before memory.max kills.
        files = [group / name for name in ("memory.max", "memory.high")]
        texts = [file.read_text().strip() for file in files if file.is_file()]
        if limits := [int(text) for text in texts if text != "max"]:
            lines = (group / "memory.stat").read_text().splitlines()
            droppable_bytes = int(dict(line.split(" ", 1) for line in lines)["inactive_file"])
            used_bytes = int((group / "memory.current").read_text())
            yield GroupLimit(min(limits), used_bytes - droppable_bytes)
        group = group.parent


def available_bytes() -> int:
    """Return the memory that is free for programs, less a reserve of a twentieth."""
    memory = psutil.virtual_memory()
    spare = [memory.available - memory.total * _RESERVE_SHARE]
    spare += [
        group.limit_bytes * (1 - _RESERVE_SHARE) - group.used_bytes for group in group_limits()
    ]
    return max(0, int(min(spare)))


def process_bytes(process_id: int) -> int:
    """Return the memory that a process uses; 0 if the process ended."""
    # On macOS the footprint: resident memory leaves out most of a GPU's tensors.
    if host.is_mac():
        usage = (ctypes.c_uint64 * _USAGE_NUMBERS)()
        library = ctypes.CDLL(None)
        has_ended = library.proc_pid_rusage(process_id, _USAGE_VERSION, ctypes.byref(usage)) != 0
        return 0 if has_ended else int(usage[_FOOTPRINT_INDEX])
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def why_short(*, swapped_bytes: int) -> str | None:
    """Return why memory is short, given the swap in use before, or None if it is not."""
    memory = psutil.virtual_memory()
    if memory.available < memory.total * _RESERVE_SHARE / 2:
        return f"the machine has {gibibytes(memory.available)} of memory left"
    growth_bytes = psutil.swap_memory().used - swapped_bytes
    is_swapping = growth_bytes > _MAX_SWAP_GROWTH_BYTES
    return f"the machine swapped {gibibytes(growth_bytes)}" if is_swapping else None
