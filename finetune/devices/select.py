"""From the name of a device to the device."""

from collections.abc import Iterator

from finetune import events
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.cuda import CudaDevice
from finetune.devices.mps.device import MpsDevice
from finetune.errors import ConfigurationInvalid, DeviceNotAvailable, UsageError
from finetune.events import Emit

# In the order in which "auto" tries them.
DEVICES: dict[str, type[Device]] = {one.name: one for one in (CudaDevice, MpsDevice, CpuDevice)}


def select_device(name: str, *, emit: Emit) -> Device:
    """Return the device of that name; for ``auto`` the first of cuda, mps and cpu that works."""
    if name == "auto":
        return next(usable_devices(emit=emit))
    if name not in DEVICES:
        raise UsageError(f"there is no device {name}", remedy=f"use auto, {', '.join(DEVICES)}")
    if unusable := DEVICES[name].why_not_usable():
        raise DeviceNotAvailable(unusable.reason, remedy=unusable.remedy)
    return DEVICES[name]()


def usable_devices(*, emit: Emit) -> Iterator[Device]:
    """Yield every device that works on this machine, the CPU last; each is tried when asked."""
    for kind in DEVICES.values():
        unusable = kind.why_not_usable()
        if unusable is None:
            yield kind()
        elif not unusable.is_absent:
            emit(events.WarningMessage(unusable.reason, remedy=unusable.remedy))


def check_precision(device: Device, precision: str) -> None:
    """Refuse a number format that the device can't compute in."""
    if precision not in ("auto", *device.precisions):
        raise ConfigurationInvalid(
            f"{device.name} can't compute in {precision} here",
            remedy=f"use --precision {' or '.join(device.precisions)}",
        )
