"""The processor."""

import platform
import resource
from collections.abc import Mapping, Sequence

import psutil
import torch

from finetune.devices.base import gibibytes, mentions

# PyTorch's texts where the system has posix_memalign, and elsewhere.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class CpuDevice:
    """The processor, with the machine's memory."""

    name = "cpu"
    torch_device = torch.device("cpu")
    # Autocast to bf16 works on every processor, if not always faster; fp16 would need its
    # gradients scaled.
    precisions: tuple[str, ...] = ("fp32", "bf16")
    has_fused_adamw = True
    pads_rows = False

    def __init__(self) -> None:
        memory = gibibytes(psutil.virtual_memory().total)
        self.description = f"{torch.get_num_threads()} CPU threads, {memory}"

    def widths(self, longest_tokens: int) -> Sequence[int]:
        """Return every length: a new shape costs nothing, each padded token does."""
        return range(1, longest_tokens + 1)

    def synchronize(self) -> None:
        """Return at once: operations end before the next begins."""

    def used_bytes(self) -> int:
        """Return the process's resident memory."""
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        """Return the most resident memory that the process has had."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # getrusage(2) counts in bytes on macOS and in KiB on Linux.
        return peak if platform.system() == "Darwin" else peak * 1024

    def reset_peak(self) -> None:
        """Do nothing: the system counts from the start of the process."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether Python or PyTorch got no memory from the system."""
        return isinstance(error, MemoryError) or mentions(error, _OUT_OF_MEMORY)

    def release_memory(self) -> None:
        """Do nothing: PyTorch caches none of the processor's memory."""

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return what the random numbers to come depend on."""
        return {"cpu": torch.get_rng_state()}

    def set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the random numbers where the state was taken."""
        torch.set_rng_state(state["cpu"])
