"""The machine's own memory: what is left of it, what a process holds, and when it runs short."""

import ctypes
from pathlib import Path

import psutil

from finetune.devices import host
from finetune.devices.base import gibibytes
from finetune.devices.cgroups import group_limits

# What is left to the rest of the machine or control group, as a share of its memory. Below half of
# it, memory runs short.
_RESERVE_SHARE = 0.05
# Systems move single pages to the disk at any time; this is more than that.
_MAX_SWAP_GROWTH_BYTES = 128 * 2**20
_KERNEL_COUNTS = Path("/proc/vmstat")
_PRESSURE_NAMES = {1: "normal", 2: "warning", 4: "critical"}
# Of macOS: the position of ri_phys_footprint among the 64-bit numbers of rusage_info_v0, after the
# two of ri_uuid, and room for what a later system may write behind it (sys/resource.h).
_FOOTPRINT_INDEX = 9
_USAGE_NUMBERS = 64
_USAGE_VERSION = 0


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
            return footprint_bytes(process_id)
        return int(psutil.Process(process_id).memory_info().rss)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return 0


def footprint_bytes(process_id: int) -> int:
    """Return the memory that a process takes of a Mac.

    Resident memory leaves out most of a GPU's tensors: 4.1 GB of 62.7 GB has been seen.

    Raises:
        ProcessLookupError: If there is no such process.
    """
    usage = (ctypes.c_uint64 * _USAGE_NUMBERS)()
    if ctypes.CDLL(None).proc_pid_rusage(process_id, _USAGE_VERSION, ctypes.byref(usage)) != 0:
        raise ProcessLookupError(process_id)
    return int(usage[_FOOTPRINT_INDEX])


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
        if growth_bytes > _MAX_SWAP_GROWTH_BYTES:
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
    """Return how short of memory a Mac is: 1 for not at all, 2 for a warning, 4 for critical."""
    if not host.is_mac():
        return 1
    return int(host.read_sysctl("kern.memorystatus_vm_pressure_level") or 1)
