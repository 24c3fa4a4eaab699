"""Gradient checkpointing: layers keep their inputs alone and run again in the backward pass."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.devices.base import Device
from finetune.errors import ModelUnsupportedError


def enable_gradient_checkpointing(model: PreTrainedModel, device: Device) -> None:
    """Let the layers of a model, in training mode, keep no more for the backward pass than inputs.

    The gradients stay the same, dropout included: PyTorch restores the random states of the CPU and
    of CUDA for the second run, but not that of MPS (pytorch#127676), so that the device does it.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelUnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing in transformers",
            remedy="leave out --gradient-checkpointing, or choose another model",
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _random_numbers_from(device, device.random_state())

    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    with warnings.catch_warnings():
        # From transformers 5.23 on it has another name, which the versions before do not know.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[no-untyped-call]
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # Else transformers warns that it can't have both.
    # Else there would be a graph of the frozen layers below those that train.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]


def has_gradient_checkpointing(model: nn.Module) -> bool:
    """Return whether ``enable_gradient_checkpointing`` has changed a model."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextmanager
def _random_numbers_from(device: Device, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    later_state = device.random_state()
    device.set_random_state(state)
    try:
        yield
    finally:
        device.set_random_state(later_state)
