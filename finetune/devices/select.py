"""Selects a device by name, and checks devices for ``finetune doctor``."""

from collections.abc import Iterator

import psutil
import torch

from finetune import events
from finetune.devices import host
from finetune.devices.base import Device
from finetune.devices.cpu import CpuDevice
from finetune.devices.cuda import CudaDevice
from finetune.devices.host import BERT_BASE_BYTES, Check, gibibytes
from finetune.devices.mps.device import MpsDevice
from finetune.devices.mps.facts import generation, known_faults
from finetune.errors import ConfigurationError, DeviceNotAvailableError, UsageError, reason_of
from finetune.events import emit, muted

# In the order in which "auto" tries them.
DEVICES: dict[str, type[Device]] = {kind.name: kind for kind in (CudaDevice, MpsDevice, CpuDevice)}
# On a Mac of this size, all of BERT-base trained at 512 tokens with a batch size of 1, but no
# larger.
_TOO_SMALL_BYTES = 8 * 2**30


def select_device(name: str) -> Device:
    """Return the named device or, for ``auto``, the first usable one of cuda, mps and cpu."""
    if name == "auto":
        return next(usable_devices())
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}", remedy=f"use auto, {', '.join(DEVICES)}")
    if unusable := DEVICES[name].why_not_usable():
        raise DeviceNotAvailableError(unusable.reason, remedy=unusable.remedy)
    return DEVICES[name]()


def usable_devices() -> Iterator[Device]:
    """Yield all usable devices of this machine, the CPU last. Each is tried lazily."""
    for kind in DEVICES.values():
        unusable = kind.why_not_usable()
        if unusable is None:
            yield kind()
        elif not unusable.is_absent:
            emit(events.WarningMessage(unusable.reason, remedy=unusable.remedy))


def check_precision(device: Device, precision: str) -> None:
    """Reject a precision that the device doesn't support."""
    if precision not in ("auto", *device.precisions):
        raise ConfigurationError(
            f"{device.name} can't compute in {precision} here",
            remedy=f"use --precision {' or '.join(device.precisions)}",
        )


def check_gpus() -> Iterator[Check]:
    """Yield a description of each kind of GPU, or why it can't be used."""
    for name, describe in (("mps", describe_mps), ("cuda", describe_cuda)):
        unusable = DEVICES[name].why_not_usable()
        if unusable is None:
            yield from describe()
        elif unusable.is_absent:
            yield Check(name, "n/a", unusable.reason)
        else:
            yield Check(name, "warning", unusable.reason, unusable.remedy)


def describe_choice(name: str) -> Check:
    """Report which device a run with this ``--device`` would use."""
    try:
        with muted():
            device = select_device(name)
    except DeviceNotAvailableError as error:
        return Check("device", "failure", error.message, error.remedy)
    precisions = ", ".join(device.precisions)
    finding = f"--device {name} uses {device.name} ({device.description}), with {precisions}"
    return Check("device", "ok", finding)


def describe_mps() -> Iterator[Check]:
    """Yield checks of a Mac's GPU, its memory, and known faults."""
    yield Check("mps", "ok", f"built, available and usable: {MpsDevice().description}")
    total_bytes = psutil.virtual_memory().total
    recommended_bytes = torch.mps.recommended_max_memory()
    finding = f"recommended working set {gibibytes(recommended_bytes)} of {gibibytes(total_bytes)}"
    remedy = "use --freeze-core, or small batches: --batch-size 8 --effective-batch-size 32"
    yield Check.warn_unless(total_bytes > _TOO_SMALL_BYTES, "mps_memory", finding, remedy)
    version = torch.__version__.partition("+")[0]
    chip = generation(host.cpu_name())
    yield from known_faults(torch_version=version, macos=host.macos_version(), chip=chip)


def describe_cuda() -> Iterator[Check]:
    """Yield the CUDA version, and a check of each NVIDIA GPU."""
    yield Check("cuda", "ok", f"usable: PyTorch is built for CUDA {torch.version.cuda}")
    remedy = "close programs that nvidia-smi shows, or choose another GPU with CUDA_VISIBLE_DEVICES"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        finding, free_bytes = f"{gpu.name}, capability {gpu.major}.{gpu.minor}", 0
        try:
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            finding += f", {gibibytes(free_bytes)} of {gibibytes(total_bytes)} free"
        except RuntimeError as error:
            finding += f", can't be used: {reason_of(error)}"
        has_room = free_bytes >= BERT_BASE_BYTES
        yield Check.warn_unless(has_room, f"cuda_{index}", finding, remedy)
