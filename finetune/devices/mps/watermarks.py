"""PyTorch's limits for the memory of MPS, as the environment sets them; free of torch.

Both are factors of the recommended working set: above the low one the allocator collects garbage,
above the high one it refuses memory. The rules are those of PyTorch's ``MPSAllocator.mm``.
"""

import os
import re

from finetune.devices.check import Check

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULTS = {HIGH: 1.7, LOW: 1.4}
_LARGEST = 2.0
_NUMBER = re.compile(r"\s*[+-]?(inf|nan|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)


def high_ratio() -> float:
    """Return the factor above which PyTorch refuses memory; 0 is no limit."""
    return _ratio(HIGH)


def check_watermarks() -> Check:
    """Say whether PyTorch accepts the two variables, and whether they still protect the Mac."""
    for name in (HIGH, LOW):
        if _NUMBER.fullmatch(_text(name)) is None:
            return _failure(
                f"{name}={_text(name)} is not a number, and PyTorch reads {_ratio(name):g} in it, "
                "where 0 is no limit",
                f"set it to a number such as {_DEFAULTS[name]}, or unset it",
            )
    high, low = _ratio(HIGH), _ratio(LOW)
    if not 0 <= high <= _LARGEST:
        return _failure(
            f"PyTorch refuses {HIGH}={high:g}: it takes 0 to {_LARGEST:g}", f"unset {HIGH}"
        )
    highest_low = high or _LARGEST
    if not 0 <= low <= highest_low:
        return _failure(
            f"PyTorch refuses the low watermark {low:g}{_origin(LOW)}: beside the high one, "
            f"{high:g}{_origin(HIGH)}, it takes 0 to {highest_low:g}",
            f"set {LOW} to at most {highest_low:g}, or unset both",
        )
    if high == 0:
        return Check(
            "mps_watermarks",
            "warning",
            f"{HIGH}=0 lifts PyTorch's limit: a Mac then swaps until it freezes (pytorch#79840)",
            f"unset {HIGH}",
        )
    return Check("mps_watermarks", "ok", f"high {high:g}{_origin(HIGH)}, low {low:g}{_origin(LOW)}")


def _ratio(name: str) -> float:
    """Return a variable's value as C's ``strtod`` reads it: the number in front, or 0."""
    number = _NUMBER.match(_text(name))
    return float(number[0]) if number else 0.0


def _text(name: str) -> str:
    return os.environ.get(name, str(_DEFAULTS[name]))


def _origin(name: str) -> str:
    return " as set" if name in os.environ else " by default"


def _failure(finding: str, remedy: str) -> Check:
    return Check("mps_watermarks", "failure", finding, remedy)
