"""Faults that devices have had, planted where PyTorch hands its operators to a device."""

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_IN_PLACE = (torch.ops.aten.addcmul_.default, torch.ops.aten.addcdiv_.default)
_LISTS_OF_FUSED_ADAMW = 6


class LeftOutGaps(TorchDispatchMode):
    """What an optimizer computes in place leaves tensors with gaps as they are (pytorch#118115)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _IN_PLACE and not args[0].is_contiguous():
            return args[0]
        if func is torch.ops.aten._fused_adamw_.default:
            kept = [number for number, one in enumerate(args[0]) if one.is_contiguous()]
            lists = args[:_LISTS_OF_FUSED_ADAMW]
            args = (*([one[number] for number in kept] if one else [] for one in lists),)
        return func(*args, **kwargs or {})


class _Attention(TorchFunctionMode):
    """Replaces attention by something else."""

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
    """Attention that sees the padding."""

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        options["attn_mask"] = None
        return nn.functional.scaled_dot_product_attention(query, *others, **options)


class WrongShortAttention(_Attention):
    """Attention that errs for at most 8 tokens without gradients (as in pytorch#181133)."""

    def attend(self, query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        output = nn.functional.scaled_dot_product_attention(query, *others, **options)
        is_hit = query.shape[-2] <= 8 and not torch.is_grad_enabled()
        return output.flip(-2) if is_hit else output
