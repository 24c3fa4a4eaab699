"""From the name of a device to the device."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from finetune import events
from finetune.devices import cuda
from finetune.devices.base import Device, Unusable
from finetune.devices.cpu import CpuDevice
from finetune.devices.cuda import CudaDevice
from finetune.devices.mps import device as mps
from finetune.devices.mps.device import MpsDevice
from finetune.errors import ConfigurationInvalid, DeviceNotAvailable, UsageError
from finetune.events import Emit


class _Gpu(NamedTuple):
    why_not_usable: Callable[[], Unusable | None]
    make: Callable[[], Device]


# In the order in which "auto" tries them, before the CPU.
GPUS = {
    CudaDevice.name: _Gpu(cuda.why_not_usable, CudaDevice),
    MpsDevice.name: _Gpu(mps.why_not_usable, MpsDevice),
}


def select_device(name: str, *, emit: Emit) -> Device:
    """Return the device of that name; for ``auto`` the first of cuda, mps and cpu that works.

    Raises:
        UsageError: If there is no device of that name.
        DeviceNotAvailable: If the named device can't be used here.
    """
    if name == "auto":
        return next(usable_devices(emit=emit))
    if name == CpuDevice.name:
        return CpuDevice()
    if name not in GPUS:
        raise UsageError(f"there is no device {name}", remedy=f"use auto, {', '.join(GPUS)}, cpu")
    if unusable := GPUS[name].why_not_usable():
        raise DeviceNotAvailable(unusable.reason, remedy=unusable.remedy)
    return GPUS[name].make()


def usable_devices(*, emit: Emit) -> Iterator[Device]:
    """Yield every device that works on this machine, the CPU last; each is tried when asked."""
    for gpu in GPUS.values():
        unusable = gpu.why_not_usable()
        if unusable is None:
            yield gpu.make()
        elif not unusable.is_absent:
            emit(events.WarningMessage(unusable.reason, remedy=unusable.remedy))
    yield CpuDevice()


def check_precision(device: Device, precision: str) -> None:
    """Refuse a number format that the device can't compute in."""
    if precision not in ("auto", *device.precisions):
        raise ConfigurationInvalid(
            f"{device.name} can't compute in {precision} here",
            remedy=f"use --precision {' or '.join(device.precisions)}",
        )
