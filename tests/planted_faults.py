"""Known faults of devices, planted where PyTorch dispatches operators to a device."""

import math
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from finetune.training.trainer import Trainer


class _Attention(TorchFunctionMode):
    """Replaces the result of attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self.attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        """Return the attention's output."""
        raise NotImplementedError


class IgnoredMask(_Attention):
    """Attention that ignores the padding mask."""

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        options["attn_mask"] = None
        return nn.functional.scaled_dot_product_attention(query, *others, **options)


class WrongShortAttention(_Attention):
    """Attention that is wrong for at most 8 tokens without gradients (as in pytorch#181133)."""

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        output = nn.functional.scaled_dot_product_attention(query, *others, **options)
        is_hit = query.shape[-2] <= 8 and not torch.is_grad_enabled()
        return output.flip(-2) if is_hit else output


class _Linear(TorchFunctionMode):
    """Replaces the output of linear layers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **kwargs or {})
        return self.spoil(output, args[0]) if func is nn.functional.linear else output

    def spoil(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return a wrong output for a layer with this input."""
        raise NotImplementedError


class ZeroRows(_Linear):
    """Products with rows of zeros (as in pytorch#180201)."""

    def spoil(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:-1], torch.zeros_like(output[-1:])])


class RandomInputGradients(_Linear):
    """Linear layers with a wrong gradient of the input (as in pytorch#181936)."""

    def spoil(self, output: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if given.requires_grad and not given.is_leaf:
            given.register_hook(lambda gradient: gradient.flip(-1))
        return output


class NotANumber(_Attention):
    """Attention that is NaN for one text without gradients (as in pytorch#156707)."""

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        output = nn.functional.scaled_dot_product_attention(query, *others, **options)
        if torch.is_grad_enabled():
            return output
        return torch.cat([output[:-1], output[-1:] * math.nan])


class WrongNormGradients(TorchFunctionMode):
    """Layer norms with a wrong gradient of the weights (as in pytorch#183825)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func is nn.functional.layer_norm and torch.is_grad_enabled():
            options["weight"] = options["weight"] * 1.0
            options["weight"].register_hook(lambda gradient: gradient.flip(0))
        return func(*args, **options)


def plant(trainer: Trainer, fault: TorchFunctionMode) -> None:
    """Run forwards of a model under a fault, but not forwards of its copies."""
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
