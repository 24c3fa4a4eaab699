"""Checks of environment variables of PyTorch for MPS, without torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

# Twice the 110 million weights of BERT-base, their gradients and the two moments of AdamW, in fp32.
# In memory, activations take about the same again. On disk, a checkpoint has three of the four
# parts, and a second checkpoint is written before the first is deleted.
BERT_BASE_BYTES = 2 * 110_000_000 * 4 * 4

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
PREFER_METAL = "PYTORCH_MPS_PREFER_METAL"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it rejects allocations. PyTorch itself reports invalid values.
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
    """Return the factor of the recommended memory that PyTorch may use; 0 means no limit."""
    try:
        return float(os.environ.get(HIGH, _DEFAULT_HIGH))
    except ValueError:
        return 0.0


def check_variables() -> Iterator[Check]:
    """Yield a check of each variable that makes the GPU of a Mac slow or harmful."""
    for name, variable, is_harmful, effect in (
        ("mps_watermarks", HIGH, high_ratio() <= 0, "lifts PyTorch's limit: a Mac swaps until it "
         "freezes (pytorch#79840)"),
        ("mps_fallback", FALLBACK, is_set(FALLBACK), "hides operators that run slowly on the CPU"),
        ("mps_prefer_metal", PREFER_METAL, is_set(PREFER_METAL), "takes 6 to 10 times as long for "
         "matrix products (pytorch#198182)"),
    ):  # fmt: skip
        finding = f"{variable}={os.environ.get(variable, '')}" + f" {effect}" * is_harmful
        yield Check.warn_unless(not is_harmful, name, finding, f"unset {variable}")


def is_set(variable: str) -> bool:
    """Return whether a variable of PyTorch switches something on."""
    return os.environ.get(variable, "0") not in ("", "0")
