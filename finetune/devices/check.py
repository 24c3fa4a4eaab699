"""Checks of the machine that need no torch: PyTorch's environment variables for MPS."""

import os
from dataclasses import dataclass
from typing import Literal

# Twice BERT-base's 110 million weights, as many gradients, and AdamW's two moments, in fp32. In
# memory, activations take about as much again. On a disk, a checkpoint holds three of the four
# parts, and a second one is written before the first is deleted.
ROOM_FOR_BERT_BASE_BYTES = 2 * 110_000_000 * 4 * 4

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it refuses memory. PyTorch itself says which values it does not take.
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULT_HIGH = 1.7


@dataclass(frozen=True)
class Check:
    """One line of ``finetune doctor``; its status is ``failure`` if something can't work."""

    name: str
    status: Literal["ok", "n/a", "warning", "failure"]
    finding: str
    remedy: str = ""

    @classmethod
    def warn_unless(cls, is_fine: bool, name: str, finding: str, remedy: str) -> "Check":
        """Return a check that is ok or a warning."""
        return cls(name, "ok", finding) if is_fine else cls(name, "warning", finding, remedy)


def high_ratio() -> float:
    """Return the factor above which PyTorch refuses memory; 0 is no limit."""
    try:
        return float(os.environ.get(HIGH, _DEFAULT_HIGH))
    except ValueError:
        return 0.0


def check_watermarks() -> Check:
    """Say whether PyTorch's limit still protects the Mac."""
    finding = f"{HIGH}={os.environ.get(HIGH, f'{_DEFAULT_HIGH} by default')}"
    lifted = f"{finding} lifts PyTorch's limit: a Mac swaps until it freezes (pytorch#79840)"
    is_limit = high_ratio() > 0
    return Check.warn_unless(
        is_limit, "mps_watermarks", finding if is_limit else lifted, f"unset {HIGH}"
    )


def check_fallback() -> Check:
    """Say whether operators that MPS lacks would run on the CPU without an error."""
    value = os.environ.get(FALLBACK, "0")
    if value == "0":
        return Check("mps_fallback", "ok", f"{FALLBACK}=0: an operator that MPS lacks is an error")
    finding = f"{FALLBACK}={value} hides operators that run slowly on the CPU"
    return Check("mps_fallback", "warning", finding, f"unset {FALLBACK}")
