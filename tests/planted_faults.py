"""Known device faults, planted where PyTorch dispatches operators."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from finetune.training.trainer import Trainer

ATTENTION = nn.functional.scaled_dot_product_attention


class Fault(TorchFunctionMode):
    """Calls a faulty function instead of a PyTorch function."""

    def __init__(self, function: Callable[..., Any], faulty: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.faulty = function, faulty

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (self.faulty if func is self.function else func)(*args, **kwargs or {})


def ignore_mask(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention that ignores the padding mask."""
    return ATTENTION(*tensors, **options | {"attn_mask": None})


def flip_short(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention that is wrong for at most 8 tokens without gradients (as in pytorch#181133)."""
    output = ATTENTION(query, *others, **options)
    is_hit = query.shape[-2] <= 8 and not torch.is_grad_enabled()
    return output.flip(-2) if is_hit else output


def lose_last_text(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """Attention that is NaN for one text without gradients (as in pytorch#156707)."""
    output = ATTENTION(*tensors, **options)
    if torch.is_grad_enabled():
        return output
    return torch.cat([output[:-1], output[-1:] * math.nan])


def zero_last_row(*tensors: Any, **options: Any) -> torch.Tensor:
    """Linear layers whose last row is zero (as in pytorch#180201)."""
    output = nn.functional.linear(*tensors, **options)
    return torch.cat([output[:-1], torch.zeros_like(output[-1:])])


def flip_input_gradients(features: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Linear layers with a wrong gradient of the input (as in pytorch#181936)."""
    output = nn.functional.linear(features, *others, **options)
    if features.requires_grad and not features.is_leaf:
        features.register_hook(lambda gradient: gradient.flip(-1))
    return output


def flip_norm_gradients(*tensors: Any, **options: Any) -> torch.Tensor:
    """Layer norms with a wrong gradient of the weights (as in pytorch#183825)."""
    if torch.is_grad_enabled():
        options["weight"] = options["weight"] * 1.0
        options["weight"].register_hook(lambda gradient: gradient.flip(0))
    return nn.functional.layer_norm(*tensors, **options)


class SkipsOddLayouts(torch.optim.AdamW):
    """Skips noncontiguous tensors, as MPS once did (pytorch#118115)."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skipped = [
            (parameter, parameter.detach().clone())
            for group in self.param_groups
            for parameter in group["params"]
            if not parameter.is_contiguous()
        ]
        super().step(closure)
        for parameter, value in skipped:
            parameter.detach().copy_(value)


def plant(trainer: Trainer, fault: Fault) -> None:
    """Apply a fault to forward passes of a model, but not of its copies."""
    model = trainer.model
    last = list(model.parameters())[-1]

    def has_own_weights() -> bool:
        return list(model.parameters())[-1] is last

    def begin(*_: Any) -> None:
        if has_own_weights():
            fault.__enter__()

    def end(*_: Any) -> None:
        if has_own_weights():
            fault.__exit__(None, None, None)

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
