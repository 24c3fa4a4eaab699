"""An update up to the optimizer's step: forward, backward, clip."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from finetune.training.accelerator import Accelerator
from finetune.training.micro_batches import MicroBatch

# Logits in fp32, [examples, outputs], and labels give the loss of each example: fp32, [examples].
Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accumulate_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[MicroBatch],
    *,
    losses: Losses,
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
        losses: Returns the loss of each example.
        accelerator: Runs the backward pass and the clipping.
        max_grad_norm: Largest norm of the gradients.

    Returns:
        The effective batch's loss: a scalar on the device, not yet read.
    """
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro_batch in micro_batches:
        loss = weighted_loss(model(**micro_batch.inputs).logits, micro_batch, losses)
        accelerator.backward(loss)
        parts.append(loss.detach())
    accelerator.clip_gradients(optimizer, max_norm=max_grad_norm)
    return torch.stack(parts).sum()


def weighted_loss(logits: torch.Tensor, micro_batch: MicroBatch, losses: Losses) -> torch.Tensor:
    """Return the losses of the examples, weighted by their shares: a scalar in fp32."""
    return (losses(logits.float(), micro_batch.labels) * micro_batch.shares).sum()
