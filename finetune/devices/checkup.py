"""What ``finetune doctor`` asks PyTorch: which devices can be used here, and if not, why."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from finetune.devices import cuda, cuda_checkup
from finetune.devices.base import Unusable
from finetune.devices.check import Check
from finetune.devices.mps import checkup as mps_checkup
from finetune.devices.mps import support
from finetune.devices.select import select_device
from finetune.errors import DeviceNotAvailable


class _Gpu(NamedTuple):
    why_not_usable: Callable[[], Unusable | None]
    describe: Callable[[], Iterator[Check]]


_GPUS = {
    "mps": _Gpu(support.why_not_usable, mps_checkup.describe_gpu),
    "cuda": _Gpu(cuda.why_not_usable, cuda_checkup.describe_gpus),
}


def check_gpus() -> Iterator[Check]:
    """Yield a description of each kind of GPU, or why it can't be used."""
    for name, gpu in _GPUS.items():
        unusable = gpu.why_not_usable()
        if unusable is None:
            yield from gpu.describe()
        elif unusable.is_absent:
            yield Check(name, "ok", unusable.reason)
        else:
            yield Check(name, "warning", unusable.reason, unusable.remedy)


def check_device(asked: str) -> Check:
    """Say which device a run with this ``--device``, one of ``DEVICE_NAMES``, takes."""
    try:
        device = select_device(asked, emit=lambda event: None)
    except DeviceNotAvailable as error:
        return Check("device", "failure", error.message, error.remedy)
    precisions = ", ".join(device.precisions)
    return Check(
        "device",
        "ok",
        f"--device {asked} takes {device.name} ({device.description}) and computes in {precisions}",
    )
