"""Mixed precision of forwards without gradients."""

from contextlib import AbstractContextManager

import torch

from finetune.devices.base import Device

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: Device, *, precision: str) -> AbstractContextManager[None]:
    """Return the context in which a forward on a device computes in a precision.

    Args:
        device: Where the model is.
        precision: ``fp32``, ``bf16`` or ``fp16``.
    """
    context: AbstractContextManager[None] = torch.autocast(
        device.torch_device.type, dtype=_DTYPES[precision], enabled=precision != "fp32"
    )
    return context
