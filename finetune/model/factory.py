"""A user's own module with a batch for it, from ``package.module:function``."""

import importlib
from typing import Any

import torch
from torch import nn

from finetune.devices.private import tree_iter
from finetune.errors import UsageError


def load_factory(name: str) -> tuple[nn.Module, dict[str, object]]:
    """Return the module and its keyword arguments that ``package.module:function`` returns."""
    module_name, _, function_name = name.partition(":")
    try:
        result = getattr(importlib.import_module(module_name), function_name)()
    # Code of the user may raise anything, or exit.
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name} can't be called: {type(error).__name__}: {error}",
            remedy="use package.module:function such that python -c 'import package.module' works; "
            "--debug shows where it fails",
        ) from error
    match result:
        case (nn.Module() as module, dict() as batch):
            return module, batch
    raise UsageError(
        f"{name} does not return a module and a batch",
        remedy="return (module, batch), the batch as a dict of keyword arguments",
    )


def loss_of(output: Any) -> torch.Tensor:
    """Return the ``loss`` of a module's output, or the sum of all its floating-point tensors."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = (tensor for tensor in tree_iter(output) if isinstance(tensor, torch.Tensor))
    sums = [tensor.sum() for tensor in tensors if tensor.is_floating_point()]
    if not sums:
        raise UsageError(
            "the module's output has no loss and no floating-point tensor",
            remedy="let its forward return one",
        )
    return torch.stack(sums).sum()
