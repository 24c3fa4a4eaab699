"""PyTorch's environment variables for MPS; free of torch."""

import os
import re

from finetune.devices.check import Check, Status

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# Factors of the recommended working set: above the low one the allocator collects garbage, above
# the high one it refuses memory. The rules are those of PyTorch's MPSAllocator.mm.
HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
_DEFAULTS = {HIGH: 1.7, LOW: 1.4}
# What each does, by PyTorch's page of these variables and Metal's specification of its language.
_MATH = {
    "PYTORCH_MPS_FAST_MATH": "rounds less exactly and takes no account of NaN and infinity",
    "PYTORCH_MPS_PREFER_METAL": "multiplies matrices by other kernels than its default ones",
}
_LARGEST = 2.0


def high_ratio() -> float:
    """Return the factor above which PyTorch refuses memory; 0 is no limit."""
    try:
        return _ratio(HIGH)
    except ValueError:
        # PyTorch reads the number in front of other text, such as 1.5 in 1.5x; here it counts as 0.
        return 0.0


def check_watermarks() -> Check:
    """Say whether PyTorch accepts the two ratios, and whether they still protect the Mac."""
    return Check("mps_watermarks", *_find_watermarks())


def _find_watermarks() -> tuple[Status, str, str]:
    origins = {name: _origin(name) for name in _DEFAULTS}
    try:
        high, low = _ratio(HIGH), _ratio(LOW)
    except ValueError:
        finding = f"{origins[HIGH]} or {origins[LOW]} is not a number: PyTorch may read 0, no limit"
        remedy = (
            f"set them to numbers such as {_DEFAULTS[HIGH]} and {_DEFAULTS[LOW]}, or unset both"
        )
        return "failure", finding, remedy
    if not 0 <= high <= _LARGEST:
        finding = f"PyTorch refuses {origins[HIGH]}: it takes 0 to {_LARGEST:g}"
        return "failure", finding, f"unset {HIGH}"
    most = high or _LARGEST
    if not 0 <= low <= most:
        finding = f"PyTorch refuses {origins[LOW]}: with {origins[HIGH]} it takes 0 to {most:g}"
        return "failure", finding, f"set {LOW} to at most {most:g}, or unset both"
    if high == 0:
        finding = (
            f"{HIGH}=0 lifts PyTorch's limit: a Mac then swaps until it freezes (pytorch#79840)"
        )
        return "warning", finding, f"unset {HIGH}"
    return "ok", ", ".join(origins.values()), ""


def check_math() -> Check:
    """Say whether MPS computes otherwise than by default, for which its faults are known."""
    chosen = [name for name in _MATH if os.environ.get(name, "0") != "0"]
    findings = [f"with {name} MPS {_MATH[name]}" for name in chosen]
    remedy = f"unset {' and '.join(chosen)}, or see finetune doctor --parity --device mps"
    return Check.warn_unless(not chosen, "mps_math", "; ".join(findings) or "as by default", remedy)


def check_fallback() -> Check:
    """Say whether operators that MPS lacks would run on the CPU without an error.

    PyTorch reads the variable with ``std::stoi`` while it is loaded (``MPSFallback.mm``), so that
    on a Mac anything but a number ends the process at ``import torch``.
    """
    status, finding = _find_fallback(os.environ.get(FALLBACK))
    return Check("mps_fallback", status, finding, "" if status == "ok" else f"unset {FALLBACK}")


def _find_fallback(value: str | None) -> tuple[Status, str]:
    if value is None:
        return "ok", "not set: an operator that MPS lacks is an error, never a slow detour"
    number = re.match(r"\s*[+-]?\d+", value)
    if number is None:
        return "failure", f"{FALLBACK}={value} ends PyTorch on a Mac: it is not a number"
    if int(number[0]) == 0:
        return "ok", f"{FALLBACK}={value}: an operator that MPS lacks is an error"
    return "warning", f"{FALLBACK}={value} hides operators that run slowly on the CPU"


def _ratio(name: str) -> float:
    return float(os.environ.get(name, _DEFAULTS[name]))


def _origin(name: str) -> str:
    default = "" if name in os.environ else " by default"
    return f"{name}={os.environ.get(name, _DEFAULTS[name])}{default}"
