"""Whether this machine's GPU can be used through MPS, and what to do if not."""

import platform

import torch

from finetune.devices import host
from finetune.devices.base import Unusable, why_operation_fails
from finetune.devices.mps.environment import HIGH, LOW

_USE_CPU = "use --device cpu"

# By what PyTorch says when the first operation on the GPU fails.
_REMEDIES = {
    # Whatever is not between the bounds of the two (kohya-ss/sd-scripts#603).
    "watermark ratio": f"unset {HIGH} and {LOW}",
    # On virtual Macs, such as GitHub's runners, MPS is available and yet every allocation fails
    # (actions/runner-images#9918, #11899).
    "MPS backend out of memory": f"{_USE_CPU}; the GPU of a virtual Mac can't be used, whatever "
    f"the text says of {HIGH}",
    # Whatever else.
    "": f"{_USE_CPU}, and look the text up in github.com/pytorch/pytorch/issues",
}


def why_not_usable() -> Unusable | None:
    """Return why the GPU can't be used, or None if a small operation on it works."""
    return _why_not_this_cpu() or _why_not_this_macos() or _why_not_this_torch() or _why_it_fails()


def _why_not_this_cpu() -> Unusable | None:
    if not host.is_mac():
        reason = f"MPS needs a Mac, and this is {platform.system()}"
        return Unusable(reason, remedy=_USE_CPU, is_absent=True)
    if platform.machine() == "arm64":
        return None
    if host.is_under_rosetta():
        return Unusable(
            "this Python runs as an Intel program under Rosetta, which hides the GPU",
            remedy=host.way_out_of_rosetta(),
        )
    reason = "MPS needs Apple silicon, and this Mac has an Intel CPU"
    return Unusable(reason, remedy=_USE_CPU, is_absent=True)


def _why_not_this_macos() -> Unusable | None:
    if not host.is_macos_too_old():
        return None
    # PyTorch's own text still says 13 (pytorch#162921).
    return Unusable(
        f"MPS needs macOS {host.OLDEST_MACOS} or newer, and this is {host.macos_version()}",
        remedy=f"{host.way_to_newer_macos()}, or {_USE_CPU}",
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
    failure = why_operation_fails(torch.device("mps"))
    if failure is None:
        return None
    return Unusable(
        f"MPS is built and available, but an operation on it fails: {failure}",
        remedy=next(remedy for text, remedy in _REMEDIES.items() if text in failure),
    )
