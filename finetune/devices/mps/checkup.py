"""What ``finetune doctor`` says of a Mac's GPU that can be used."""

from collections.abc import Iterator

import psutil
import torch

from finetune.devices.base import gibibytes
from finetune.devices.check import Check
from finetune.devices.mps.device import MpsDevice
from finetune.devices.mps.watermarks import high_ratio

# All of BERT-base trained there at 512 tokens with a batch size of 1 and no larger one.
_TOO_SMALL_BYTES = 8 * 2**30


def describe_gpu() -> Iterator[Check]:
    """Yield the GPU's description and its memory."""
    yield Check("mps", "ok", f"built, available and usable: {MpsDevice().description}")
    yield _check_memory()


def _check_memory() -> Check:
    total_bytes = psutil.virtual_memory().total
    recommended_bytes = torch.mps.recommended_max_memory()
    finding = (
        f"recommended working set {gibibytes(recommended_bytes)} of {gibibytes(total_bytes)}; "
        f"{_describe_limit(recommended_bytes, total_bytes=total_bytes)}"
    )
    remedy = "use --freeze-core, or small batches: --batch-size 8 --effective-batch-size 32"
    return Check.warn_unless(total_bytes > _TOO_SMALL_BYTES, "mps_memory", finding, remedy)


def _describe_limit(recommended_bytes: int, *, total_bytes: int) -> str:
    limit_bytes = int(high_ratio() * recommended_bytes)
    if limit_bytes == 0:
        return "PyTorch's limit is lifted"
    swaps = ", and the Mac swaps before" if limit_bytes > total_bytes else ""
    return f"PyTorch refuses more than {gibibytes(limit_bytes)}{swaps}"
