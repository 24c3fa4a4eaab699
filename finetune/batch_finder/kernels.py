"""What the kernels of other devices keep for the backward pass, on fake tensors of the CPU.

A PyTorch built for the CPU alone can't make modules on fake tensors of a GPU; and which kernels run
decides how much of an update's memory stays alive.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

Attention = Literal["processor", "fused", "matrix"]


@dataclass(frozen=True)
class Kernels:
    """Where the kernels of devices differ in what they keep.

    As read in PyTorch's attention.cpp, Dropout.cpp and autocast_mode.cpp, without a Mac to try it.

    Args:
        attention: ``matrix`` makes the attention of each token to each token; ``fused`` never does
            and keeps a number a token and head; the ``processor`` fuses where nothing is dropped.
        has_packed_dropout: Dropout keeps a byte a number instead of another number.
        has_fp32_norms: Autocast computes layer norms in fp32.
    """

    attention: Attention
    has_packed_dropout: bool
    has_fp32_norms: bool


@contextmanager
def imitate_kernels(kernels: Kernels, *, is_autocast: bool) -> Iterator[None]:
    """Let operations on fake tensors of the CPU keep what a device's kernels would.

    Args:
        kernels: Of the device.
        is_autocast: Whether the arithmetic is in 16 bits.
    """
    makes_matrix = kernels.attention == "matrix"
    attention = sdpa_kernel(SDPBackend.MATH) if makes_matrix else nullcontext()
    with attention, _Imitation(kernels, is_autocast=is_autocast):
        yield


class _Imitation(TorchFunctionMode):
    def __init__(self, kernels: Kernels, *, is_autocast: bool) -> None:
        super().__init__()
        self._replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            # Tensors without contents are as close as their shapes are, and any number is theirs.
            torch.allclose: lambda *_, **__: True,
            torch.Tensor.item: lambda _: 1.0,
        }
        if kernels.attention == "fused":
            self._replacements[functional.scaled_dot_product_attention] = _attend_without_dropout
        if kernels.has_packed_dropout:
            self._replacements[functional.dropout] = _drop_by_packed_mask
        if kernels.has_fp32_norms and is_autocast:
            self._replacements[functional.layer_norm] = _normalize_in_fp32

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._replacements.get(func, func)(*args, **(kwargs or {}))


def _attend_without_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Attend by the processor's fused kernel, which has no dropout; others drop within theirs."""
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **options)


def _drop_by_packed_mask(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return tensor
    dropped, _ = torch.native_dropout(tensor, p, train=True)
    return dropped


def _normalize_in_fp32(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return functional.layer_norm(tensor.float(), *args, **kwargs)
