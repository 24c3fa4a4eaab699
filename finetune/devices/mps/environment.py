"""PyTorch's environment variables for MPS; free of torch."""

import os
import re

from finetune.devices.check import Check

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it refuses memory. PyTorch itself says which values it does not take.
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULT_HIGH = 1.7


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
    """Say whether operators that MPS lacks would run on the CPU without an error.

    On a Mac, PyTorch ends the process if the variable is not a number (``MPSFallback.mm``).
    """
    name, value, remedy = "mps_fallback", os.environ.get(FALLBACK, "0"), f"unset {FALLBACK}"
    number = re.match(r"\s*[+-]?\d+", value)
    if number is None:
        finding = f"{FALLBACK}={value} ends PyTorch on a Mac: it is not a number"
        return Check(name, "failure", finding, remedy)
    if int(number[0]) == 0:
        return Check(name, "ok", f"{FALLBACK}=0: an operator that MPS lacks is an error")
    finding = f"{FALLBACK}={value} hides operators that run slowly on the CPU"
    return Check(name, "warning", finding, remedy)
