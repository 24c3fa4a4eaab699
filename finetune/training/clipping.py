"""The norm of a step's gradients, and its limit, in few operations."""

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

# Biases and norms: most of a model's tensors, and next to none of its numbers.
_SMALL_NUMBERS = 2**16


def clip_gradients(
    optimizer: torch.optim.Optimizer, *, max_norm: float, scales_in_step: bool
) -> None:
    """Scale gradients down to a norm of at most ``max_norm``.

    Args:
        optimizer: Over the parameters with the gradients.
        max_norm: Largest norm of all gradients together.
        scales_in_step: Leave the scaling to the optimizer's kernel, which reads the gradients
            anyway: until the step they stay as they are.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = total_norm(one.grad for one in trained if one.grad is not None)
    if scales_in_step:
        # Where GradScaler leaves its own scale to the optimizer; the kernel divides by it.
        optimizer.grad_scale = (norm / max_norm).clamp(min=1)  # type: ignore[attr-defined]
    else:
        clip_grads_with_norm_(trained, max_norm, norm)


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all tensors as one vector: a scalar on their device, not yet read.

    Small tensors are joined first, since MPS takes an operation for the norm of each tensor.
    """
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    for tensor in tensors:
        (small if tensor.numel() <= _SMALL_NUMBERS else large).append(tensor)
    joined = [torch.cat([one.reshape(-1) for one in small])] if small else []
    return get_total_norm(joined + large)
