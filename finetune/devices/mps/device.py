"""The GPU of a Mac with Apple silicon as a device."""

from collections.abc import Mapping, Sequence

import psutil
import torch

from finetune.devices.base import gibibytes, round_up_to_8
from finetune.devices.mps import memory
from finetune.devices.mps.support import read_sysctl

# Attention reads out of bounds with 8 or fewer queries (pytorch#169222).
_SMALLEST_WIDTH = 16


class MpsDevice:
    """The GPU of a Mac with Apple silicon, which shares the machine's memory."""

    name = "mps"
    torch_device = torch.device("mps")
    # bf16 needs macOS 14, without which the device is not usable at all.
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    # 8 to 10 times as fast as a loop over the parameters (pytorch#127242).
    has_fused_adamw = True
    pads_rows = True

    def __init__(self) -> None:
        chip = read_sysctl("machdep.cpu.brand_string") or "Apple"
        self.description = f"{chip} GPU, {gibibytes(psutil.virtual_memory().total)} unified memory"

    def widths(self, longest_tokens: int) -> Sequence[int]:
        """Return the longest length and its half, quarter and eighth, as multiples of 8 from 16 on.

        Few widths, because the graphs compiled for a shape are never dropped: a run over many
        shapes held 72 GB within five steps (kyutai-labs/pocket-tts#255). Halves, because lengths
        are skewed: most texts are much shorter than the longest, and none longer than an eighth of
        it is padded to twice its length or more, but for the rounding. Texts of the lengths of TREC
        (41 tokens at most) get 16, 24 and 48; those of 512, 64, 128, 256 and 512.
        """
        divisors = (8, 4, 2, 1)
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
