"""How much memory the GPU's tensors take, and how running out of it reads."""

import os

import torch

from finetune.devices import host_memory
from finetune.devices.base import DeviceMemory
from finetune.devices.mps.environment import high_ratio

_MAX_OF_PEAK = 4
# 0 would lift the limit.
_MIN_FRACTION = 0.001


class MpsMemory(DeviceMemory):
    """The unified memory of a Mac, as PyTorch's allocator and the system count it."""

    is_shared = True
    # The allocator's own limit is above the memory of most Macs.
    swaps = True
    # The allocator's limit, and a single tensor above Metal's largest buffer (pytorch#141909). Both
    # come as bare RuntimeErrors (huggingface/accelerate#4226). The last is Metal's own.
    out_of_memory_texts = (
        "MPS backend out of memory",
        "Invalid buffer size: ",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    )

    def used_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    def held_bytes(self) -> int:
        """Return what Metal counts for the process: allocator pools and compiled graphs."""
        return torch.mps.driver_allocated_memory()

    def cache_exceeds_limit(self) -> bool:
        """Return whether pools and graphs take more than a run with few shapes needs.

        Buffers are kept for each shape: six padded lengths take three to four times what the
        longest does. Half of the recommended memory does no harm; beyond all of it the Mac swaps.
        """
        recommended_bytes = torch.mps.recommended_max_memory()
        needed_bytes = _MAX_OF_PEAK * (self.peak_bytes() or self.used_bytes())
        return self.held_bytes() > min(recommended_bytes, max(recommended_bytes // 2, needed_bytes))

    def peak_bytes(self) -> int | None:
        return torch.accelerator.max_memory_allocated() if _counts_peak() else None

    def reset_peak(self) -> None:
        if _counts_peak():
            torch.accelerator.reset_peak_memory_stats()

    def budget_bytes(self, limit_bytes: int | None) -> int:
        """Return the footprint that this process may have.

        Without it Macs swap or freeze before the allocator's limit, 1.7 times what Metal recommends
        (pytorch#79840).
        """
        recommended_bytes = torch.mps.recommended_max_memory()
        free_bytes = host_memory.process_bytes(os.getpid()) + host_memory.spare_bytes()
        # A ratio of 0 is no limit.
        allowed_bytes = int(recommended_bytes * (high_ratio() or 1))
        budget_bytes = min(recommended_bytes, free_bytes, allowed_bytes)
        return budget_bytes if limit_bytes is None else min(budget_bytes, limit_bytes)

    def set_memory_limit(self, budget_bytes: int) -> None:
        """Let the allocator refuse what would take the process's footprint beyond a budget.

        This moves the high watermark; the low one matters only where the environment sets it.
        """
        gpu_bytes = torch.mps.driver_allocated_memory()
        other_bytes = host_memory.process_bytes(os.getpid()) - gpu_bytes
        fraction = (budget_bytes - other_bytes) / torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(max(_MIN_FRACTION, fraction))

    def release(self) -> None:
        torch.mps.empty_cache()


def _counts_peak() -> bool:
    """Return whether the allocator keeps statistics: from PyTorch 2.13 on (pytorch#186748)."""
    try:
        torch.accelerator.memory_stats()
    except RuntimeError as error:
        if "is not a DeviceAllocator" in str(error):
            return False
        raise
    return True
