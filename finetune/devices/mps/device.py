"""The GPU of a Mac with Apple silicon as a device."""

from dataclasses import dataclass
from typing import NoReturn

import psutil
import torch
from torch.torch_version import TorchVersion

from finetune.devices.base import BatchShapes, Device, gibibytes
from finetune.devices.host import cpu_name, macos_major
from finetune.devices.mps.attention import use_default_attention, use_training_attention
from finetune.devices.mps.chips import generation, max_tokens
from finetune.devices.mps.memory import MpsMemory
from finetune.errors import UsageError

# Before it, fused AdamW ignores the gradients' scale and steps although some are infinite
# (pytorch#186360), and an M5 computes linear layers at random in 16 bits (pytorch#180776, #181936).
_FIRST_WITH_16_BITS = "2.13"
# Before it, an M1 with macOS 26 drops the bias of single vectors (pytorch#188438).
_FIRST_WITH_BIAS_OF_VECTORS = "2.14"
_MACOS_WITHOUT_BIAS_OF_VECTORS = 26


class MpsDevice(Device):
    """The GPU of this Mac, or of one with another ``chip``, such as ``m1-pro``."""

    name = "mps"
    torch_device = torch.device("mps")
    # Of several chips, systems and versions of PyTorch: known_faults.yaml.
    has_silent_faults_in_16_bits = True

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
            max_tokens=max_tokens(chip),
            min_examples=2 if drops_bias_of_vectors else 1,
        )

    def make_group(self) -> NoReturn:
        """Refuse several processes: a Mac has one GPU.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "a Mac's GPU is one device: it trains in one process",
            remedy="start one process, or use --device cpu",
        )

    def choose_attention(self, *, longest_tokens: int | None) -> None:
        """Let training attend in few operations, whatever the length; None: as by default."""
        if longest_tokens is None:
            use_default_attention()
        else:
            use_training_attention(self.name)


@dataclass(frozen=True)
class FewShapes(BatchShapes):
    """Few padded lengths, and every batch with all its examples.

    The graphs compiled for a shape are never dropped: a run over many shapes held 72 GB within five
    steps (kyutai-labs/pocket-tts#255). Attention reads out of bounds with 8 or fewer queries
    (pytorch#169222).
    """

    max_shapes: int | None = 6
    counts_evaluation: bool = True
    least_padded_length: int = 9
    pads_batches: bool = True
