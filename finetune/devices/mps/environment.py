"""PyTorch's environment variables for MPS; free of torch."""

import os
import re

from finetune.devices.check import Check

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it refuses memory. The rules are those of PyTorch's MPSAllocator.mm.
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULTS = {HIGH: 1.7, LOW: 1.4}
_MAX_RATIO = 2.0


def high_ratio() -> float:
    """Return the factor above which PyTorch refuses memory; 0 is no limit."""
    try:
        return float(os.environ.get(HIGH, _DEFAULTS[HIGH]))
    except ValueError:
        # PyTorch reads the number in front of other text, such as 1.5 in 1.5x; here it counts as 0.
        return 0.0


def check_watermarks() -> Check:
    """Say whether PyTorch accepts the two ratios, and whether they still protect the Mac."""
    name = "mps_watermarks"
    values = {
        ratio: f"{ratio}={os.environ.get(ratio, f'{default} by default')}"
        for ratio, default in _DEFAULTS.items()
    }
    both = ", ".join(values.values())
    try:
        high, low = (float(os.environ.get(ratio, _DEFAULTS[ratio])) for ratio in (HIGH, LOW))
    except ValueError:
        finding = f"{both}: one is not a number, and PyTorch may read 0, no limit"
        return Check(name, "failure", finding, f"unset {HIGH} and {LOW}")
    if not 0 <= high <= _MAX_RATIO:
        finding = f"PyTorch refuses {values[HIGH]}: it takes 0 to {_MAX_RATIO:g}"
        return Check(name, "failure", finding, f"unset {HIGH}")
    max_low = high or _MAX_RATIO
    if not 0 <= low <= max_low:
        finding = f"PyTorch refuses {values[LOW]}: with {values[HIGH]} it takes 0 to {max_low:g}"
        remedy = f"set {LOW} to at most {max_low:g}, or unset both"
        return Check(name, "failure", finding, remedy)
    if high == 0:
        finding = f"{HIGH}=0 lifts PyTorch's limit: a Mac swaps until it freezes (pytorch#79840)"
        return Check(name, "warning", finding, f"unset {HIGH}")
    return Check(name, "ok", both)


def check_fallback() -> Check:
    """Say whether operators that MPS lacks would run on the CPU without an error.

    On a Mac, PyTorch ends the process if the variable is not a number (``MPSFallback.mm``).
    """
    name, value, remedy = "mps_fallback", os.environ.get(FALLBACK), f"unset {FALLBACK}"
    if value is None:
        return Check(name, "ok", "not set: an operator that MPS lacks is an error")
    number = re.match(r"\s*[+-]?\d+", value)
    if number is None:
        finding = f"{FALLBACK}={value} ends PyTorch on a Mac: it is not a number"
        return Check(name, "failure", finding, remedy)
    if int(number[0]) == 0:
        return Check(name, "ok", f"{FALLBACK}={value}: an operator that MPS lacks is an error")
    finding = f"{FALLBACK}={value} hides operators that run slowly on the CPU"
    return Check(name, "warning", finding, remedy)
