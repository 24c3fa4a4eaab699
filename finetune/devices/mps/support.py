"""Whether this machine's GPU can be used through MPS, and what to do if not."""

import platform
import subprocess

import torch

from finetune.devices.base import Unusable, why_operation_fails

_OLDEST_MACOS = 14
_USE_CPU = "use --device cpu"


def why_not_usable() -> Unusable | None:
    """Return why the GPU can't be used, or None if a small operation on it works."""
    return (
        _why_not_this_processor()
        or _why_not_this_macos()
        or _why_not_this_torch()
        or _why_it_fails()
    )


def read_sysctl(name: str) -> str | None:
    """Return a value of macOS's kernel, such as that of ``hw.optional.arm64``, or None."""
    answer = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else None


def _why_not_this_processor() -> Unusable | None:
    if platform.system() != "Darwin":
        reason = f"MPS needs a Mac, and this is {platform.system()}"
        return Unusable(reason, remedy=_USE_CPU, is_absent=True)
    if platform.machine() == "arm64":
        return None
    # Rosetta's own flag for a process that it translates, and the hardware's, which such a process
    # sees as well.
    if "1" in (read_sysctl("sysctl.proc_translated"), read_sysctl("hw.optional.arm64")):
        return Unusable(
            "this Python is built for Intel and runs under Rosetta, which hides the GPU",
            remedy="install a Python for arm64; with conda: "
            "CONDA_SUBDIR=osx-arm64 conda create -n finetune python=3.11",
        )
    reason = "MPS needs Apple silicon, and this Mac has an Intel processor"
    return Unusable(reason, remedy=_USE_CPU, is_absent=True)


def _why_not_this_macos() -> Unusable | None:
    version = platform.mac_ver()[0]
    if int(version.partition(".")[0]) >= _OLDEST_MACOS:
        return None
    # PyTorch's own text still says 13 (pytorch#162921).
    return Unusable(
        f"MPS needs macOS {_OLDEST_MACOS} or newer, and this is {version}",
        remedy=f"update macOS, or {_USE_CPU}",
    )


def _why_not_this_torch() -> Unusable | None:
    if not torch.backends.mps.is_built():
        return Unusable(
            f"PyTorch {torch.__version__} is built without MPS",
            remedy="install it from PyPI: pip install --force-reinstall torch",
        )
    if not torch.backends.mps.is_available():
        return Unusable(
            "Metal shows no GPU to this process",
            remedy=f"run it outside sandboxes and containers, or {_USE_CPU}",
        )
    return None


def _why_it_fails() -> Unusable | None:
    # On virtual Macs, such as GitHub's runners, MPS is available and yet every allocation fails
    # (actions/runner-images#9918, #11899).
    failure = why_operation_fails(torch.device("mps"))
    if failure is None:
        return None
    return Unusable(
        f"an operation on the GPU fails: {failure}",
        remedy=f"{_USE_CPU}; the GPU of a virtual Mac can't be used, whatever the text says of "
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    )
