"""The GPU of a Mac with Apple silicon: capabilities, memory, and why it can't be used."""

import os
import platform
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import psutil
import torch
from torch.torch_version import TorchVersion

from finetune.devices import host
from finetune.devices.base import BatchShapes, Device, DeviceMemory, Unusable, why_operation_fails
from finetune.devices.host import HIGH, LOW, gibibytes, high_ratio
from finetune.devices.mps.facts import generation, max_tokens
from finetune.errors import UsageError

# Before this version, fused AdamW ignores the gradient scale and steps even if some are infinite
# (pytorch#186360), and an M5 computes linear layers at random in 16 bits (pytorch#180776, #181936).
_FIRST_WITH_16_BITS = "2.13"
# Before this version, an M1 with macOS 26 drops the bias of single vectors (pytorch#188438).
_FIRST_WITH_VECTOR_BIAS = "2.14"
_MACOS_WITHOUT_VECTOR_BIAS = 26

# Compiled graphs are never dropped: a run over many shapes held 72 GB within five steps
# (kyutai-labs/pocket-tts#255). Attention reads out of bounds with 8 or fewer queries
# (pytorch#169222).
FEW_SHAPES = BatchShapes(
    max_shapes=6, counts_evaluation=True, min_padded_length=9, pads_batches=True
)

# The cache can take this many times the peak of live tensors.
_MAX_PEAK_FACTOR = 4
# Not 0, because 0 means no limit.
_MIN_FRACTION = 0.001

_USE_CPU = "use --device cpu"


class MpsDevice(Device):
    """The GPU of this Mac, or of a Mac with another ``chip``, such as ``m1-pro``."""

    name = "mps"
    torch_device = torch.device("mps")
    # known_faults.yaml lists them by chip, system and PyTorch version.
    has_silent_faults = True

    @staticmethod
    def why_not_usable() -> Unusable | None:
        if host.is_under_rosetta():
            return Unusable(
                "this Python runs as an Intel program under Rosetta, which hides the GPU",
                remedy=host.ROSETTA_REMEDY,
            )
        if not host.is_mac() or platform.machine() != "arm64":
            system = f"{platform.system()} on {platform.machine()}"
            reason = f"MPS needs a Mac with Apple silicon, and this is {system}"
            return Unusable(reason, remedy=_USE_CPU, is_absent=True)
        if host.macos_major() < host.OLDEST_MACOS:
            # PyTorch's own message still says 13 (pytorch#162921).
            return Unusable(
                f"MPS needs macOS {host.OLDEST_MACOS} or newer, and this is {host.macos_version()}",
                remedy=f"{host.MACOS_REMEDY}, or {_USE_CPU}",
            )
        if not torch.backends.mps.is_available():
            return Unusable(
                "PyTorch finds no GPU: Metal shows none, or it is built without MPS",
                remedy="run it outside sandboxes and containers, install PyTorch from PyPI, or "
                f"{_USE_CPU}",
            )
        if failure := why_operation_fails(MpsDevice.torch_device):
            return Unusable(
                f"MPS is built and available, but an operation on it fails: {failure}",
                # Virtual Macs have a GPU without memory (actions/runner-images#9918, #11899).
                remedy=f"{_USE_CPU} if this is a virtual Mac, unset {HIGH} and {LOW} if they are "
                "set, or search github.com/pytorch/pytorch/issues for the message",
            )
        return None

    def __init__(self, *, chip: str | None = None) -> None:
        chip = host.cpu_name() if chip is None else chip
        memory = gibibytes(psutil.virtual_memory().total)
        self.description = f"{chip or 'Apple'} GPU, {memory} unified memory"
        self.memory = MpsMemory()
        self.precisions = ("fp32", "bf16", "fp16")
        version = TorchVersion(torch.__version__)
        if version < _FIRST_WITH_16_BITS:
            self.fused_adamw_scales_gradients = False
            self.precisions = ("fp32",) if (generation(chip) or 0) >= 5 else ("fp32", "bf16")
        drops_bias_of_vectors = (
            generation(chip) == 1
            and host.macos_major() == _MACOS_WITHOUT_VECTOR_BIAS
            and version < _FIRST_WITH_VECTOR_BIAS
        )
        self.shapes = replace(
            FEW_SHAPES, max_tokens=max_tokens(chip), min_examples=2 if drops_bias_of_vectors else 1
        )

    def make_group(self) -> NoReturn:
        raise UsageError(
            "the GPU of a Mac is one device: it trains in one process",
            remedy="start one process, or use --device cpu",
        )


class MpsMemory(DeviceMemory):
    """The unified memory of a Mac, as counted by PyTorch's allocator and the system."""

    is_shared = True
    # The allocator limit exceeds the memory of most Macs.
    swaps = True
    # The allocator limit, a tensor above Metal's largest buffer (pytorch#141909), and
    # Metal itself. All are plain RuntimeErrors (huggingface/accelerate#4226).
    out_of_memory_texts = (
        "MPS backend out of memory",
        "Invalid buffer size: ",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
    )

    def allocated_bytes(self) -> int:
        return torch.mps.current_allocated_memory()

    def reserved_bytes(self) -> int:
        """Return the memory that Metal reports for the process: pools and compiled graphs."""
        return torch.mps.driver_allocated_memory()

    def cache_exceeds_limit(self) -> bool:
        """Return whether cached buffers use more memory than a run with few shapes needs.

        MPS caches buffers per shape: six padded lengths use three to four times as much memory as
        the longest. Up to half of the recommended memory is harmless; above all of it, Macs swap.
        """
        recommended_bytes = torch.mps.recommended_max_memory()
        needed_bytes = _MAX_PEAK_FACTOR * (self.peak_bytes() or self.allocated_bytes())
        return self.reserved_bytes() > min(
            recommended_bytes, max(recommended_bytes // 2, needed_bytes)
        )

    def peak_bytes(self) -> int | None:
        # From PyTorch 2.13 on (pytorch#186748).
        try:
            return torch.accelerator.max_memory_allocated()
        except RuntimeError:
            return None

    def peak_reserved_bytes(self) -> None:
        return None

    def reset_peak(self) -> None:
        with suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats()

    def budget_bytes(self, limit_bytes: int | None) -> int:
        """Return the footprint that this process can have.

        Without this budget, Macs swap or freeze before the allocator limit, 1.7 times
        what Metal recommends (pytorch#79840).
        """
        recommended_bytes = torch.mps.recommended_max_memory()
        free_bytes = host.process_bytes(os.getpid()) + host.available_bytes()
        # A ratio of 0 means no limit.
        allowed_bytes = int(recommended_bytes * min(1, high_ratio() or 1))
        budget_bytes = min(free_bytes, allowed_bytes)
        return budget_bytes if limit_bytes is None else min(budget_bytes, limit_bytes)

    def set_memory_limit(self, budget_bytes: int) -> None:
        """Make the allocator reject allocations beyond a budget for the process."""
        gpu_bytes = torch.mps.driver_allocated_memory()
        other_bytes = host.process_bytes(os.getpid()) - gpu_bytes
        fraction = (budget_bytes - other_bytes) / torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(max(_MIN_FRACTION, fraction))

    def release(self) -> None:
        torch.mps.empty_cache()
