"""Gradients of a step: forward, backward, and their sum over several processes."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from finetune.distributed.processes import Processes
from finetune.training.accelerator import Accelerator
from finetune.training.micro_batches import StepPart
from finetune.training.windows import WindowBatch

# Logits in fp32, [examples, outputs], and labels give the loss of each example: fp32, [examples].
Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accumulate_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[StepPart],
    *,
    losses: Losses,
    accelerator: Accelerator,
) -> torch.Tensor:
    """Give the trained parameters the gradients of all of this process's micro-batches together.

    Nothing here synchronizes with the device, and no parameter changes.

    Args:
        model: In training mode, on its device.
        optimizer: Over its parameters. The gradients stay until the next step.
        micro_batches: Of one effective batch.
        losses: Returns the loss of each example.
        accelerator: Runs the backward pass.

    Returns:
        This process's share of the effective batch's loss: a scalar on the device, not yet read.
    """
    optimizer.zero_grad(set_to_none=True)
    parts = []
    for micro_batch in micro_batches:
        if isinstance(micro_batch, WindowBatch) and len(micro_batch.slice_sizes) > 1:
            loss = _backward_by_slices(model, micro_batch, losses, accelerator=accelerator)
        else:
            [inputs] = micro_batch.slices()
            loss = weighted_loss(model(**inputs).logits, micro_batch, losses)
            accelerator.backward(loss)
        parts.append(loss.detach())
    return torch.stack(parts).sum()


def copy_gradients(optimizer: torch.optim.Optimizer, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of all gradients end to end, of shape [numbers], to be added up."""
    own = _gradients(optimizer)
    flat = own[0].new_empty(sum(one.numel() for one in own), dtype=dtype)
    torch._foreach_copy_(_views(flat, own), own)
    return flat


def add_up_gradients(
    optimizer: torch.optim.Optimizer, flat: torch.Tensor, processes: Processes
) -> None:
    """Give the parameters the sum of all processes' gradients.

    Args:
        optimizer: Whose gradients ``copy_gradients`` has copied.
        flat: What it returned; changed in place.
        processes: Those that add up.
    """
    processes.all_reduce_sum(flat)
    own = _gradients(optimizer)
    torch._foreach_copy_(own, _views(flat, own))


def _gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    trained = (one for group in optimizer.param_groups for one in group["params"])
    return [one.grad for one in trained if one.grad is not None]


def _views(flat: torch.Tensor, shaped: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [one.numel() for one in shaped])
    return [piece.view_as(one) for piece, one in zip(pieces, shaped, strict=True)]


def weighted_loss(logits: torch.Tensor, micro_batch: StepPart, losses: Losses) -> torch.Tensor:
    """Return the losses of the examples, weighted by their shares: a scalar in fp32."""
    pooled = micro_batch.pool(logits.float())
    return (losses(pooled, micro_batch.labels) * micro_batch.shares).sum()


def _backward_by_slices(
    model: nn.Module, batch: WindowBatch, losses: Losses, *, accelerator: Accelerator
) -> torch.Tensor:
    """Go backward through an example slice by slice, in the memory of one; return its loss.

    The first pass gives the logits of all windows, and so the gradient of the loss by each logit,
    with which the second goes backward. Both draw the same random numbers, and so the same dropout.
    """
    random_state = batch.device.random_state()
    # With a graph, of which nothing is kept: the second pass is to have the same kernels.
    logits = torch.cat([model(**inputs).logits.float().detach() for inputs in batch.slices()])
    loss = weighted_loss(logits.requires_grad_(), batch, losses)
    [gradient] = torch.autograd.grad(loss, [logits])
    batch.device.set_random_state(random_state)
    for inputs, part in zip(batch.slices(), torch.split(gradient, batch.slice_sizes), strict=True):
        accelerator.backward((model(**inputs).logits.float() * part).sum())
    return loss
