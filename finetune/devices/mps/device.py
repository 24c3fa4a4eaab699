"""The GPU of a Mac with Apple silicon as a device."""

from collections.abc import Sequence

import psutil
import torch
from torch.torch_version import TorchVersion

from finetune.devices.base import BatchShapes, Device, gibibytes, round_up_to_8
from finetune.devices.host import cpu_name, macos_major
from finetune.devices.mps.chips import generation, max_tokens
from finetune.devices.mps.memory import MpsMemory

# Before it, fused AdamW ignores the gradients' scale and steps although some are infinite
# (pytorch#186360), and an M5 computes linear layers at random in 16 bits (pytorch#180776, #181936).
_FIRST_WITH_16_BITS = "2.13"
# Before it, an M1 with macOS 26 drops the bias of single vectors (pytorch#188438).
_FIRST_WITH_BIAS_OF_VECTORS = "2.14"
_MACOS_WITHOUT_BIAS_OF_VECTORS = 26
# Attention reads out of bounds with 8 or fewer queries (pytorch#169222).
_SMALLEST_PADDED_LENGTH = 16


class MpsDevice(Device):
    """The GPU of this Mac, or of one with another ``chip``, such as ``m1-pro``."""

    name = "mps"
    torch_device = torch.device("mps")
    has_foreach = False

    def __init__(self, *, chip: str | None = None) -> None:
        chip = cpu_name() if chip is None else chip
        memory = gibibytes(psutil.virtual_memory().total)
        self.description = f"{chip or 'Apple'} GPU, {memory} unified memory"
        self.memory = MpsMemory()
        # bf16 needs macOS 14, without which the device is not usable at all.
        self.precisions = ("fp32", "bf16", "fp16")
        if TorchVersion(torch.__version__) < _FIRST_WITH_16_BITS:
            self.fused_adamw_scales_gradients = False
            self.precisions = ("fp32",) if (generation(chip) or 0) >= 5 else ("fp32", "bf16")
        drops_bias_of_vectors = (
            generation(chip) == 1
            and macos_major() == _MACOS_WITHOUT_BIAS_OF_VECTORS
            and TorchVersion(torch.__version__) < _FIRST_WITH_BIAS_OF_VECTORS
        )
        self.shapes = FewShapes(
            pads_batches=True,
            max_tokens=max_tokens(chip),
            min_examples=2 if drops_bias_of_vectors else 1,
        )


class FewShapes(BatchShapes):
    """Few padded lengths, and every batch with all its examples.

    The graphs compiled for a shape are never dropped: a run over many shapes held 72 GB within five
    updates (kyutai-labs/pocket-tts#255). Training and evaluation have a batch size each, which
    makes six shapes per run.
    """

    def padded_lengths(self, longest_tokens: int) -> Sequence[int]:
        """Return the longest length, its half and its quarter, as multiples of 8 from 16 on.

        Halves, because lengths are skewed: most texts are much shorter than the longest, and none
        longer than a quarter of it is padded to twice its length or more, but for the rounding.
        """
        parts = (round_up_to_8(-(-longest_tokens // divisor)) for divisor in (4, 2, 1))
        return sorted({max(_SMALLEST_PADDED_LENGTH, length) for length in parts})
