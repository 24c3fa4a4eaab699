"""The machine's own memory: what is left of it, what a process holds, and when it runs short."""

from pathlib import Path

import psutil

from finetune.devices import host, macos
from finetune.devices.base import gibibytes
from finetune.devices.cgroups import group_limits

# What is left to the rest of the machine or control group, as a share of its memory. Below half of
# it, memory runs short.
_RESERVE_SHARE = 0.05
# Systems move single pages to the disk at any time; this is more than that.
_MOST_SWAP_GROWTH_BYTES = 128 * 2**20
_KERNEL_COUNTS = Path("/proc/vmstat")
_PRESSURE_NAMES = {1: "normal", 2: "warning", 4: "critical"}


def spare_bytes() -> int:
    """Return how much more memory processes may take, by the machine and by control groups.

    The least of what is free of each, less a reserve of a twentieth of its memory.
    """
    memory = psutil.virtual_memory()
    spare = [memory.available - memory.total * _RESERVE_SHARE]
    spare += [
        group.limit_bytes * (1 - _RESERVE_SHARE) - group.used_bytes for group in group_limits()
    ]
    return max(0, int(min(spare)))


def process_bytes(process_id: int) -> int:
    """Return the memory that a process holds; 0 if it has ended.

    Resident memory, and on macOS the footprint, which counts a GPU's tensors as well.
    """
    try:
        if host.is_mac():
            return macos.footprint_bytes(process_id)
        return int(psutil.Process(process_id).memory_info().rss)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0


class HostWatch:
    """Notices when the machine runs short of memory, by what has changed since the watch began."""

    def __init__(self) -> None:
        self._swapped_bytes = psutil.swap_memory().used
        self._pressure = _pressure()
        self._kills = _count_kills()

    def why_short(self) -> str | None:
        """Return why the machine counts as short of memory, or None if it is not."""
        memory = psutil.virtual_memory()
        if memory.available < memory.total * _RESERVE_SHARE / 2:
            return f"the machine has {gibibytes(memory.available)} of memory left"
        growth_bytes = psutil.swap_memory().used - self._swapped_bytes
        if growth_bytes > _MOST_SWAP_GROWTH_BYTES:
            return f"the machine swapped {gibibytes(growth_bytes)}"
        pressure = _pressure()
        if pressure > self._pressure:
            return f"memory pressure went up to {_PRESSURE_NAMES.get(pressure, pressure)}"
        return None

    def has_killed(self) -> bool:
        """Return whether the system, where it counts them, has killed a process for its memory."""
        return _count_kills() > self._kills


def _count_kills() -> int:
    """Return how many processes Linux has killed for memory; 0 where that is not known."""
    if not _KERNEL_COUNTS.is_file():
        return 0
    counts = dict(line.split() for line in _KERNEL_COUNTS.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def _pressure() -> int:
    return macos.pressure_level() if host.is_mac() else 1
