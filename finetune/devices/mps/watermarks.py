"""PyTorch's limits for the memory of MPS, as the environment sets them; free of torch.

Both are factors of the recommended working set: above the low one the allocator collects garbage,
above the high one it refuses memory. The rules are those of PyTorch's ``MPSAllocator.mm``.
"""

import os

from finetune.devices.check import Check

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULTS = {HIGH: 1.7, LOW: 1.4}
_LARGEST = 2.0


def high_ratio() -> float:
    """Return the factor above which PyTorch refuses memory; 0 is no limit."""
    try:
        return _ratio(HIGH)
    except ValueError:
        # PyTorch reads the number in front of other text, such as 1.5 in 1.5x; here it counts as 0.
        return 0.0


def check_watermarks() -> Check:
    """Say whether PyTorch accepts the two variables, and whether they still protect the Mac."""
    try:
        high, low = _ratio(HIGH), _ratio(LOW)
    except ValueError:
        return _failure(
            f"{_origin(HIGH)} or {_origin(LOW)} is not a number: PyTorch may read 0, no limit",
            f"set them to numbers such as {_DEFAULTS[HIGH]} and {_DEFAULTS[LOW]}, or unset both",
        )
    highest_low = high or _LARGEST
    if not 0 <= high <= _LARGEST:
        return _failure(
            f"PyTorch refuses {_origin(HIGH)}: it takes 0 to {_LARGEST:g}", f"unset {HIGH}"
        )
    if not 0 <= low <= highest_low:
        return _failure(
            f"PyTorch refuses {_origin(LOW)}: with {_origin(HIGH)} it takes 0 to {highest_low:g}",
            f"set {LOW} to at most {highest_low:g}, or unset both",
        )
    if high > 0:
        return Check("mps_watermarks", "ok", f"{_origin(HIGH)}, {_origin(LOW)}")
    finding = f"{HIGH}=0 lifts PyTorch's limit: a Mac then swaps until it freezes (pytorch#79840)"
    return Check("mps_watermarks", "warning", finding, f"unset {HIGH}")


def _ratio(name: str) -> float:
    return float(os.environ.get(name, _DEFAULTS[name]))


def _origin(name: str) -> str:
    default = "" if name in os.environ else " by default"
    return f"{name}={os.environ.get(name, _DEFAULTS[name])}{default}"


def _failure(finding: str, remedy: str) -> Check:
    return Check("mps_watermarks", "failure", finding, remedy)
