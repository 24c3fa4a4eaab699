"""The precision of forwards and of matrix products."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from finetune.devices.base import Device

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: Device, *, precision: str) -> AbstractContextManager[None]:
    """Return the context in which a forward computes in ``fp32``, ``bf16`` or ``fp16``."""
    context: AbstractContextManager[None] = torch.autocast(
        device.torch_device.type, dtype=_DTYPES[precision], enabled=precision != "fp32"
    )
    return context


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let no device round the factors of products in fp32, for a while.

    PyTorch leaves matrices alone by default, but lets NVIDIA's convolutions keep 10 bits of 23.
    """
    of_matrices = torch.get_float32_matmul_precision()
    of_convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(of_matrices)
        torch.backends.cudnn.allow_tf32 = of_convolutions
