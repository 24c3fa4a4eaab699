"""Is this machine ready? All checks, one after the other."""

from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from finetune.devices.check import Check
from finetune.devices.mps.fallback import check_fallback
from finetune.devices.mps.watermarks import check_watermarks
from finetune.doctor.machine import check_bf16, check_cpu, check_memory, check_system
from finetune.doctor.network import check_hub
from finetune.doctor.packages import check_packages, check_python
from finetune.doctor.storage import check_disk


def check_machine(*, device: str) -> Iterator[Check]:
    """Yield one check after the other, as soon as its result is there.

    What needs no PyTorch comes first, so that it is shown even where PyTorch ends the process. The
    last check is called ``device``, and a failure if ``device``, one of ``DEVICE_NAMES``, can't be
    used.
    """
    yield check_cpu()
    yield check_system()
    yield check_python()
    yield from check_packages()
    yield check_memory()
    yield check_bf16()
    yield check_disk(
        "run_disk", Path.cwd(), remedy="make room, or give an --output-dir on another disk"
    )
    yield check_disk(
        "hub_disk",
        Path(constants.HF_HUB_CACHE),
        remedy="make room, or set HF_HOME to a folder on another disk",
    )
    yield check_hub()
    yield check_watermarks()
    yield check_fallback()
    yield from _check_devices(device)


def _check_devices(asked: str) -> Iterator[Check]:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        yield Check(
            "device",
            "failure",
            f"PyTorch can't be imported: {reason}",
            "pip install --force-reinstall torch, by a Python that the lines above approve of",
        )
        return
    from finetune.devices.checkup import check_device, check_gpus

    yield from check_gpus()
    yield check_device(asked)
