"""An update up to the optimizer's step: forward, backward, clip."""

from collections.abc import Iterable

import torch
from torch import nn

from finetune.training.accelerator import Accelerator
from finetune.training.micro_batches import MicroBatch


def accumulate_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[MicroBatch],
    *,
    accelerator: Accelerator,
    max_grad_norm: float,
) -> torch.Tensor:
    """Give the trained parameters the gradients of all micro-batches together.

    Nothing here synchronizes with the device, and no parameter changes.

    Args:
        model: In training mode, on its device.
        optimizer: Over its parameters, as the accelerator prepared it. The gradients stay until
            the next update.
        micro_batches: Of one effective batch.
        accelerator: Runs the backward pass and the clipping.
        max_grad_norm: Largest norm of the gradients.

    Returns:
        The effective batch's loss: a scalar on the device, not yet read.
    """
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for micro_batch in micro_batches:
        loss = weighted_loss(model, micro_batch)
        accelerator.backward(loss)
        losses.append(loss.detach())
    accelerator.clip_gradients(optimizer, max_norm=max_grad_norm)
    return torch.stack(losses).sum()


def weighted_loss(model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the cross-entropy of the examples, weighted by their shares: a scalar in fp32."""
    logits = model(**micro_batch.inputs).logits.float()
    losses = nn.functional.cross_entropy(logits, micro_batch.labels, reduction="none")
    return (losses * micro_batch.shares).sum()
