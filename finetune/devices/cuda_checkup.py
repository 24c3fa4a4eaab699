"""What ``finetune doctor`` says of NVIDIA GPUs that can be used."""

import subprocess
from collections.abc import Iterator

import torch

from finetune.devices.base import gibibytes
from finetune.devices.check import ROOM_FOR_BERT_BASE_BYTES, Check


def describe_gpus() -> Iterator[Check]:
    """Yield the driver, and a line for each GPU."""
    built = f"PyTorch is built for CUDA {torch.version.cuda}"
    yield Check("cuda", "ok", f"usable: {built}, the driver is {_read_driver()}")
    for index in range(torch.cuda.device_count()):
        yield _check_gpu(index)


def _check_gpu(index: int) -> Check:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    finding = (
        f"{properties.name}, capability {properties.major}.{properties.minor}, "
        f"{gibibytes(free_bytes)} of {gibibytes(total_bytes)} free"
    )
    remedy = "see nvidia-smi for what occupies it, or choose another with CUDA_VISIBLE_DEVICES"
    has_room = free_bytes >= ROOM_FOR_BERT_BASE_BYTES
    return Check.warn_unless(has_room, f"cuda_{index}", finding, remedy)


def _read_driver() -> str:
    """Return the driver's version, which PyTorch does not report."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "of unknown version: nvidia-smi does not answer"
    return answer.stdout.partition("\n")[0]
