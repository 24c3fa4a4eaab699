"""How much memory the GPU's tensors take, and how running out of it reads."""

import torch

from finetune.devices.base import mentions

# The allocator's limit, and a single tensor above Metal's largest buffer (pytorch#141909). Both
# come as bare RuntimeErrors, not as torch.OutOfMemoryError (huggingface/accelerate#4226).
_OUT_OF_MEMORY = ("MPS backend out of memory", "Invalid buffer size: ")


def used_bytes() -> int:
    """Return the memory of live tensors.

    Metal counts more for the process: the allocator's pools and the compiled graphs.
    """
    return torch.mps.current_allocated_memory()


def peak_bytes() -> int | None:
    """Return the most memory that live tensors took, or None if the allocator does not count it."""
    return torch.accelerator.max_memory_allocated() if _counts_peak() else None


def reset_peak() -> None:
    """Count the peak from now on, if the allocator counts it."""
    if _counts_peak():
        torch.accelerator.reset_peak_memory_stats()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the allocator or Metal refused a tensor for its size."""
    return mentions(error, _OUT_OF_MEMORY)


def _counts_peak() -> bool:
    """Tell whether the allocator keeps statistics.

    It does from PyTorch 2.13 on (pytorch#186748); before, asking fails (pytorch#186430).
    """
    try:
        torch.accelerator.memory_stats()
    except RuntimeError as error:
        if "is not a DeviceAllocator" in str(error):
            return False
        raise
    return True
