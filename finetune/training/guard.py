"""Checks that losses are finite, that trained parameters change and frozen ones do not.

On MPS an optimizer's operations once failed silently on tensors of some layouts: an encoder stayed
frozen although it should have trained, without an error (pytorch#118115).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from finetune.errors import FinetuneError, LossNotFiniteError
from finetune.tokenization.buckets import Batch
from finetune.training.optimizers import total_norm

# The first steps of Adam have the size of the learning rate. Weights of a norm start at 1, where
# the spacing of fp32 is 6e-8, so smaller steps may rightly change nothing.
MIN_VISIBLE_RATE = 1e-6
# Epsilon of AdamW. A smaller gradient changes a value by less than the learning rate, possibly by
# less than fp32 resolves, for example in layers with uniform attention.
_MIN_GRADIENT = 1e-8
_INTEGERS = {2: torch.int16, 4: torch.int32}
_NUMBERS_AT_ONCE = 2**22


def check_losses(losses: Sequence[float], batches: Sequence[Batch], *, last_step: int) -> None:
    """Raise ``LossNotFiniteError`` with step and examples of the first loss that isn't finite."""
    for index, (loss, batch) in enumerate(zip(losses, batches, strict=True)):
        if not math.isfinite(loss):
            raise LossNotFiniteError(
                f"the loss is {loss} at step {last_step - len(losses) + index + 1}",
                remedy="lower --learning-rate, use --precision fp32, or look at these texts",
                examples=batch.indices.tolist(),
            )


def check_parameters_finite(parameters: Mapping[str, nn.Parameter], *, step: int) -> None:
    """Reject a model that a step broke; the loss would show it only one step later."""
    if not total_norm(parameter.detach() for parameter in parameters.values()).isfinite():
        raise LossNotFiniteError(
            f"parameters are NaN or infinite after step {step}",
            remedy="lower --learning-rate, or use --precision fp32",
        )


class ParameterGuard:
    """Stores 8 bytes per parameter tensor, to detect changes after some steps."""

    def __init__(self, model: nn.Module) -> None:
        self._before = _fingerprints(model)
        self._has_gradient: dict[str, torch.Tensor] = {}

    def note_gradients(self, model: nn.Module) -> None:
        """Store which parameters have a gradient after the first step, without synchronizing."""
        # A captured step leaves no gradients behind, but the first is never captured.
        if not self._has_gradient:
            self._has_gradient = {
                name: (parameter.grad.abs() > _MIN_GRADIENT).any()
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }

    def check(self, model: nn.Module) -> None:
        """Raise ``FinetuneError`` if trained parameters are unchanged, or frozen ones changed.

        A trained parameter with a tiny gradient may be unchanged. This waits for the device.
        """
        self.note_gradients(model)
        after = _fingerprints(model)
        changed = {name for name, before in self._before.items() if after[name] != before}
        parameters = model.named_parameters()
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        flags = self._has_gradient.values()
        is_moved = torch.stack(list(flags)).tolist() if flags else []
        moved = {name for name, moves in zip(self._has_gradient, is_moved, strict=True) if moves}
        for fault, wrong in (
            ("frozen but changed", changed - trained),
            ("trained but the same", moved & trained - changed),
        ):
            names = [name for name in after if name in wrong]
            if names:
                more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
                raise FinetuneError(
                    f"{fault} after the first steps: {names[0]}{more}",
                    remedy="use --device cpu or another version of PyTorch: the device is faulty",
                )


def _fingerprints(model: nn.Module) -> dict[str, int]:
    """Sum each parameter's bits as integers: equal tensors give equal sums, in any order."""
    sums = {name: _sum_bits(parameter.detach()) for name, parameter in model.named_parameters()}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.itemsize])
    # In parts, because a sum of narrow integers may first copy them all to a wider type.
    return torch.stack([part.sum() for part in torch.split(bits, _NUMBERS_AT_ONCE)]).sum()
