"""The GPU of a Mac with Apple silicon as a device."""

from collections.abc import Mapping, Sequence

import psutil
import torch
from torch.torch_version import TorchVersion

from finetune.devices.base import BatchShapes, gibibytes, round_up_to_8
from finetune.devices.host import read_sysctl
from finetune.devices.mps.memory import MpsMemory

# Before it, fused AdamW steps although gradient scaling found infinite gradients (pytorch#186360).
_FIRST_WITH_FP16 = "2.13"
# Attention reads out of bounds with 8 or fewer queries (pytorch#169222).
_SMALLEST_PADDED_LENGTH = 16
# Before it, gradients are wrong on M1 and M2 once a batch has 32,767 tokens (pytorch#177116): the
# article's 64 examples of 512 tokens are one too many.
_FIRST_WITH_LARGE_BATCHES = "2.14"
_MAX_TOKENS = 32_766


class MpsDevice:
    """The GPU of a Mac with Apple silicon, which shares the machine's memory."""

    name = "mps"
    torch_device = torch.device("mps")
    # 8 to 10 times as fast as a loop over the parameters (pytorch#127242).
    has_fused_adamw = True

    def __init__(self) -> None:
        chip = read_sysctl("machdep.cpu.brand_string") or "Apple"
        self.description = f"{chip} GPU, {gibibytes(psutil.virtual_memory().total)} unified memory"
        torch_version = TorchVersion(torch.__version__)
        # bf16 needs macOS 14, without which the device is not usable at all.
        self.precisions: tuple[str, ...] = (
            ("fp32", "bf16", "fp16") if torch_version >= _FIRST_WITH_FP16 else ("fp32", "bf16")
        )
        self.memory = MpsMemory()
        self.shapes = FewShapes(
            pads_batches=True,
            max_tokens=None if torch_version >= _FIRST_WITH_LARGE_BATCHES else _MAX_TOKENS,
        )

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        torch.mps.synchronize()

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return the states of the CPU's and the GPU's random generators."""
        return {"cpu": torch.get_rng_state(), "device": torch.mps.get_rng_state()}

    def set_random_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the random generators."""
        torch.set_rng_state(state["cpu"])
        # A checkpoint that the CPU wrote has no state of a GPU.
        if "device" in state:
            torch.mps.set_rng_state(state["device"])


class FewShapes(BatchShapes):
    """Few padded lengths, and every batch with all its examples.

    The graphs compiled for a shape are never dropped: a run over many shapes held 72 GB within five
    steps (kyutai-labs/pocket-tts#255). Training and evaluation have a batch size each, which makes
    six shapes a run.
    """

    def padded_lengths(self, longest_tokens: int) -> Sequence[int]:
        """Return the longest length, its half and its quarter, as multiples of 8 from 16 on.

        Halves, because lengths are skewed: most texts are much shorter than the longest, and none
        longer than a quarter of it is padded to twice its length or more, but for the rounding.
        Texts of the lengths of TREC (41 tokens at most) get 16, 24 and 48; those of 512, 128, 256
        and 512.
        """
        parts = (round_up_to_8(-(-longest_tokens // divisor)) for divisor in (4, 2, 1))
        return sorted({max(_SMALLEST_PADDED_LENGTH, length) for length in parts})
