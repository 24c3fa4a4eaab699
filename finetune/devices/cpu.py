"""The CPU."""

import os
import platform
import re
import resource
from functools import cache
from pathlib import Path

import psutil
import torch

from finetune.devices import host
from finetune.devices.base import BatchShapes, Device, DeviceMemory
from finetune.devices.host import gibibytes

# A margin: the memory of two identical runs differs by 1 or 2%, and a batch size that fit once must
# fit again.
_STEADY_SHARE = 0.98
# Some sandboxes lack these Linux files.
_STATUS = Path("/proc/self/status")
# Writing to this file resets the process's peak memory.
_CLEAR = Path("/proc/self/clear_refs")


class CpuDevice(Device):
    """The CPU, with host memory."""

    name = "cpu"
    torch_device = torch.device("cpu")
    # bf16 works on every CPU, but isn't always faster. fp16 would need gradient scaling.
    precisions = ("fp32", "bf16")
    is_reference = True
    times_bf16 = True

    def __init__(self) -> None:
        memory, threads = gibibytes(psutil.virtual_memory().total), torch.get_num_threads()
        self.description = f"{threads} CPU thread{'s' if threads > 1 else ''}, {memory}"
        self.memory = CpuMemory()
        # No limits: new shapes are free on a CPU, and padding is not.
        self.shapes = BatchShapes()


class CpuMemory(DeviceMemory):
    """Host memory, as counted by the system for this process."""

    is_shared = True
    # Messages of PyTorch and oneDNN, and of C++ and the thread library, which end the process.
    out_of_memory_texts = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
        "could not create a primitive",
        "std::bad_alloc",
        "libgomp: Out of memory",
    )

    def __init__(self) -> None:
        self._reserved_bytes: int | None = None
        # If no limit can be set, allocations beyond the budget are swapped.
        self.swaps = not _CLEAR.exists()

    def allocated_bytes(self) -> int:
        return int(_process(os.getpid()).memory_info().rss)

    def peak_bytes(self) -> int | None:
        if _is_linux():
            # gVisor doesn't report the peak.
            return _read_status().get("VmHWM")
        # In bytes on macOS. On Linux it starts at the memory of the parent process.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def reset_peak(self) -> None:
        if _CLEAR.exists():
            _CLEAR.write_text("5")

    def reserved_bytes(self) -> int:
        return self.allocated_bytes()

    def peak_reserved_bytes(self) -> int | None:
        return self.peak_bytes() if _CLEAR.exists() else None

    def budget_bytes(self, limit_bytes: int | None) -> int:
        free_bytes = host.process_bytes(os.getpid()) + host.available_bytes()
        max_bytes = free_bytes if limit_bytes is None else min(free_bytes, limit_bytes)
        return int(_STEADY_SHARE * max_bytes)

    def set_memory_limit(self, budget_bytes: int) -> None:
        """On Linux, make allocations beyond a resident-memory budget fail."""
        if not (_is_linux() and _STATUS.is_file()):
            return
        # Run a multi-threaded operation first, because it maps thread stacks.
        torch.ones(2**20).exp_()
        if self._reserved_bytes is None:
            status = _read_status()
            self._reserved_bytes = status["VmData"] - status["VmRSS"]
        limit_bytes = max(0, budget_bytes + self._reserved_bytes)
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        if hard_limit != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard_limit))

    def release(self) -> None:
        # PyTorch has no CPU cache, but the C library keeps freed memory.
        host.return_freed_memory()


@cache  # creating the object is slower than querying it
def _process(process_id: int) -> psutil.Process:
    return psutil.Process(process_id)


def _is_linux() -> bool:
    return platform.system() == "Linux"


def _read_status() -> dict[str, int]:
    """Return the sizes that Linux reports for this process, such as ``VmRSS``, in bytes."""
    text = _STATUS.read_text() if _STATUS.is_file() else ""
    return {name: int(size) * 1024 for name, size in re.findall(r"(\w+):\s+(\d+) kB", text)}
