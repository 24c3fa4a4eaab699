"""The private PyTorch names that this package needs, and the memory that MPS kernels keep.

No other module uses private names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map, tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensorMode",
    "TorchDispatchMode",
    "copy_each",
    "current_autograd_node",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

copy_each = torch._foreach_copy_
current_autograd_node = torch._C._current_autograd_node
_Function = Callable[..., Any]


@contextmanager
def keeping_memory_as(device: str) -> Iterator[None]:
    """Make fake CPU tensors keep as much memory for the backward pass as ``cpu`` or ``mps`` does.

    In PyTorch 2.13, the kernels differ in two ways. Attention with gradients is one operator on the
    CPU, and is composed of matrix products and a softmax on MPS. Autocast computes layer norms in
    16 bits on the CPU, and in fp32 on MPS.
    """
    functions: dict[_Function, _Function] = {
        # Fake tensors have no values, so comparisons succeed and any scalar is returned.
        torch.allclose: lambda *_, **__: True,
        torch.Tensor.item: lambda _: 1.0,
    }
    if device == "mps":
        functions[functional.scaled_dot_product_attention] = _attend_composed
    with _norms_in_fp32() if device == "mps" else nullcontext(), _Replacing(functions):
        yield


class _Replacing(TorchFunctionMode):
    def __init__(self, functions: Mapping[_Function, _Function]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: _Function, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def _attend_composed(*args: Any, **kwargs: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*args, **kwargs)


@contextmanager
def _norms_in_fp32() -> Iterator[None]:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("layer_norm", _layer_norm_in_fp32, "AutocastCPU")
    try:
        yield
    finally:
        del library  # which unregisters the function


def _layer_norm_in_fp32(*args: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return torch.ops.aten.layer_norm(*tree_map_only(torch.Tensor, torch.Tensor.float, args))
