"""Checks that what should train has changed and that what is frozen has not.

On MPS an optimizer's operations once failed silently on tensors of some layouts: an encoder stayed
frozen though it should have trained, and nothing said so (pytorch#118115).
"""

import torch
from torch import nn

from finetune.errors import WrongParametersChanged

# AdamW's epsilon: what is smaller moves a number by less than the learning rate, at last by less
# than fp32 shows, as in layers whose attention is still even.
_MIN_GRADIENT = 1e-8


class ParameterGuard:
    """Remembers a model's parameters, in eight bytes each, to compare them after some steps."""

    def __init__(self, model: nn.Module) -> None:
        self._before = _fingerprints(model)
        self._has_gradient: dict[str, torch.Tensor] = {}

    def note_gradients(self, model: nn.Module) -> None:
        """Remember which parameters have a gradient after the first step; done once.

        A captured step leaves no gradients behind, but the first is never captured.
        """
        if not self._has_gradient:
            self._has_gradient = _have_gradient(model)

    def check(self, model: nn.Module) -> None:
        """Compare with the parameters now; waits for the device.

        Args:
            model: The same model after some steps. A trained parameter that had no gradient, or
                next to none, when gradients were noted may be unchanged.

        Raises:
            WrongParametersChanged: Naming the parameters.
        """
        after = _fingerprints(model)
        self.note_gradients(model)
        found = (
            torch.stack(list(self._has_gradient.values())).tolist() if self._has_gradient else []
        )
        has_gradient = dict(zip(self._has_gradient, found, strict=True))
        wrong_by_fault: dict[str, list[str]] = {
            "frozen but changed": [],
            "trained but the same": [],
        }
        for name, parameter in model.named_parameters():
            changed = after[name] != self._before[name]
            if changed and not parameter.requires_grad:
                wrong_by_fault["frozen but changed"].append(name)
            if not changed and has_gradient.get(name, False):
                wrong_by_fault["trained but the same"].append(name)
        for fault, names in wrong_by_fault.items():
            if names:
                raise WrongParametersChanged(
                    f"{fault} after the first steps: {_shorten(names)}",
                    remedy="the device computes wrongly: try --device cpu, or another torch",
                )


def _shorten(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more parameters"


def _fingerprints(model: nn.Module) -> dict[str, int]:
    """Sum each parameter's bits as integers: equal tensors give equal sums, in any order."""
    names = [name for name, _ in model.named_parameters()]
    sums = [_sum_bits(parameter.detach()) for parameter in model.parameters()]
    return dict(zip(names, torch.stack(sums).tolist(), strict=True))


def _sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().reshape(-1).view(torch.int32)
    # Two numbers at a time: a sum of narrower integers would first widen them all, in a copy.
    pairs = bits[: len(bits) // 2 * 2]
    if pairs.storage_offset() % 2:
        pairs = pairs.clone()
    return pairs.view(torch.int64).sum() + bits[len(pairs) :].sum()


def _have_gradient(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return whether gradients can move numbers, by name, as tensors that need not be read yet."""
    return {
        name: (parameter.grad.abs() > _MIN_GRADIENT).any()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
