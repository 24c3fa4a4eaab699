"""Whether operators that MPS lacks run on the CPU, by the environment; free of torch."""

import os
import re

from finetune.devices.check import Check, Status

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


def check_fallback() -> Check:
    """Say whether operators that MPS lacks would run on the CPU without an error.

    PyTorch reads the variable with ``std::stoi`` while it is loaded (``MPSFallback.mm``), so that
    on a Mac anything but a number ends the process at ``import torch``.
    """
    value = os.environ.get(FALLBACK)
    if value is None:
        return _check("ok", "not set: an operator that MPS lacks is an error, never a slow detour")
    number = re.match(r"\s*[+-]?\d+", value)
    if number is None:
        return _check("failure", f"{FALLBACK}={value} ends PyTorch on a Mac: it is not a number")
    if int(number[0]) == 0:
        return _check("ok", f"{FALLBACK}={value}: an operator that MPS lacks is an error")
    return _check("warning", f"{FALLBACK}={value} hides operators that run slowly on the CPU")


def _check(status: Status, finding: str) -> Check:
    return Check("mps_fallback", status, finding, "" if status == "ok" else f"unset {FALLBACK}")
