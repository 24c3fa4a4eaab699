"""The GPU of a Mac with Apple silicon as a device."""

from collections.abc import Mapping, Sequence

import psutil
import torch
from torch.torch_version import TorchVersion

from finetune.devices.base import gibibytes, round_up_to_8
from finetune.devices.host import read_sysctl
from finetune.devices.mps import memory

# Before it, fused AdamW steps although gradient scaling found infinite gradients (pytorch#186360).
_FIRST_WITH_FP16 = "2.13"
# Attention reads out of bounds with 8 or fewer queries (pytorch#169222).
_SMALLEST_WIDTH = 16
# Before it, gradients are wrong on M1 and M2 once a batch has 32,767 tokens (pytorch#177116): the
# article's 64 rows of 512 tokens are one too many.
_FIRST_WITH_LARGE_BATCHES = "2.14"
_MOST_TOKENS = 32_766


class MpsDevice:
    """The GPU of a Mac with Apple silicon, which shares the machine's memory."""

    name = "mps"
    torch_device = torch.device("mps")
    # 8 to 10 times as fast as a loop over the parameters (pytorch#127242).
    has_fused_adamw = True
    pads_rows = True
    shares_host_memory = True

    def __init__(self) -> None:
        chip = read_sysctl("machdep.cpu.brand_string") or "Apple"
        self.description = f"{chip} GPU, {gibibytes(psutil.virtual_memory().total)} unified memory"
        # bf16 needs macOS 14, without which the device is not usable at all.
        self.precisions: tuple[str, ...] = (
            ("fp32", "bf16", "fp16")
            if TorchVersion(torch.__version__) >= _FIRST_WITH_FP16
            else ("fp32", "bf16")
        )
        is_right = TorchVersion(torch.__version__) >= _FIRST_WITH_LARGE_BATCHES
        self.most_tokens: int | None = None if is_right else _MOST_TOKENS

    def widths(self, longest_tokens: int) -> Sequence[int]:
        """Return the longest length, its half and its quarter, as multiples of 8 from 16 on.

        Few widths, because the graphs compiled for a shape are never dropped: a run over many
        shapes held 72 GB within five steps (kyutai-labs/pocket-tts#255). Training and evaluation
        have a batch size each, which makes six shapes a run. Halves, because lengths are skewed:
        most texts are much shorter than the longest, and none longer than a quarter of it is padded
        to twice its length or more, but for the rounding. Texts of the lengths of TREC (41 tokens
        at most) get 16, 24 and 48; those of 512, 128, 256 and 512.
        """
        divisors = (4, 2, 1)
        return sorted(
            {max(_SMALLEST_WIDTH, round_up_to_8(-(-longest_tokens // part))) for part in divisors}
        )

    def synchronize(self) -> None:
        """Wait until the GPU has done what it was given."""
        torch.mps.synchronize()

    def used_bytes(self) -> int:
        """Return the memory of live tensors."""
        return memory.used_bytes()

    def peak_bytes(self) -> int | None:
        """Return the most memory that live tensors took, or None before PyTorch 2.13."""
        return memory.peak_bytes()

    def reset_peak(self) -> None:
        """Count the peak from now on, from PyTorch 2.13 on."""
        memory.reset_peak()

    def held_bytes(self) -> int:
        """Return the memory of the allocator's pools and of the compiled graphs."""
        return memory.held_bytes()

    def is_cache_running_away(self) -> bool:
        """Tell whether pools and graphs have outgrown a run with few shapes."""
        return memory.is_cache_running_away()

    def held_peak_bytes(self) -> None:
        """Return None: the footprint counts against the budget, and has no peak to ask for."""

    def retried_allocations(self) -> int:
        """Return 0: the allocator does not count."""
        return 0

    def budget_bytes(self, limit_bytes: int | None) -> int:
        """Return the footprint that this process may have."""
        return memory.budget_bytes(limit_bytes)

    def cap_memory(self, budget_bytes: int) -> None:
        """Let the allocator refuse what would take the footprint beyond a budget."""
        memory.cap_memory(budget_bytes)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether the allocator or Metal refused a tensor for its size."""
        return memory.is_out_of_memory(error)

    def release_memory(self) -> None:
        """Give the allocator's free buffers back to Metal."""
        torch.mps.empty_cache()

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return what the random numbers to come depend on."""
        return {"cpu": torch.get_rng_state(), "device": torch.mps.get_rng_state()}

    def set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with the random numbers where the state was taken."""
        torch.set_rng_state(state["cpu"])
        # A checkpoint that the CPU wrote has no state of a GPU.
        if "device" in state:
            torch.mps.set_rng_state(state["device"])
