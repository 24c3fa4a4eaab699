"""AdamW, its state, learning rate and gradients."""

from collections.abc import Iterable, Sequence, Set
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finetune.devices.base import Device
from finetune.devices.private import copy_each
from finetune.training.plan import Plan

# Biases and norms are smaller: most tensors of a model, but few of its values.
_SMALL_NUMBERS = 2**16


def build_optimizer(
    model: nn.Module, plan: Plan, *, head: Set[str], device: Device
) -> torch.optim.AdamW:
    """Build AdamW over the parameters that require gradients.

    Biases and norms have no weight decay. Head parameters have their own learning rate.
    """
    groups: list[dict[str, Any]] = []
    for is_head, is_matrix in product((False, True), (True, False)):
        parameters = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
            and (name in head) == is_head
            and (parameter.ndim >= 2) == is_matrix
        ]
        if not parameters:
            continue
        decay = plan.weight_decay if is_matrix else 0.0
        multiplier = plan.head_lr_multiplier if is_head else 1.0
        group = {"params": parameters, "weight_decay": decay, "lr_multiplier": multiplier}
        if device.captures:
            # A captured step rereads the learning rate each time.
            group["lr"] = torch.zeros((), device=device.torch_device)
        groups.append(group)
    return torch.optim.AdamW(groups, fused=True, capturable=device.captures)


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer changes."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer state that the first step would create, if it is missing.

    If memory runs out, each parameter has either all of its state or none.
    """
    for parameter in trained_by(optimizer):
        if parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rates of the encoder and, scaled by its multiplier, of the head."""
    for group in optimizer.param_groups:
        group_rate = rate * group["lr_multiplier"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(group_rate)
        else:
            group["lr"] = group_rate


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of the parameters that an optimizer changes."""
    return [weight.grad for weight in trained_by(optimizer) if weight.grad is not None]


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, *, device: Device) -> None:
    """Clip gradients to a norm, if possible within the kernel of the optimizer."""
    norm = total_norm(gradients_of(optimizer))
    if device.fused_adamw_scales_gradients:
        # The fused kernel divides gradients by this value, like by a GradScaler's scale.
        optimizer.grad_scale = (norm / max_norm).clamp(min=1)  # type: ignore[attr-defined]
    else:
        clip_grads_with_norm_(trained_by(optimizer), max_norm, norm)


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all tensors as one vector: a scalar on their device, not yet read.

    Concatenate small tensors first, because MPS needs one operation per tensor norm.
    """
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    for tensor in tensors:
        (small if tensor.numel() <= _SMALL_NUMBERS else large).append(tensor)
    joined = [torch.cat([tensor.reshape(-1) for tensor in small])] if small else []
    return get_total_norm(joined + large)


def flatten(tensors: list[torch.Tensor], *, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate copies of all tensors, of shape [values], for a single all-reduce."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    copy_each(_views(flat, tensors), tensors)
    return flat


def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy the values of ``flatten`` back into the tensors."""
    copy_each(tensors, _views(flat, tensors))


def _views(flat: torch.Tensor, shaped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in shaped])
    return [part.view_as(tensor) for part, tensor in zip(parts, shaped, strict=True)]
