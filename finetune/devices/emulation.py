"""Runs on the CPU, also on fake tensors, what other devices would run.

``dispatching_as_mps`` dispatches MPS's operators, which can so be listed without a Mac;
``keeping_memory_as`` keeps for the backward pass what a device's kernels keep. Most operators are
the same on all devices. These differ, as read in PyTorch 2.13:

    what                 on the CPU                 on MPS
    attention, without   …_flash_attention_for_cpu  …_attention_math_for_mps
      gradient, dropout
    attention, with      …_flash_attention_for_cpu  composed of matmul, softmax and others
      gradient
    linear layer         addmm, mm, t, view         linear, linear_backward
    autocast             layer norms in 16 bits     in fp32
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_MPS_ATTENTION = "aten::_scaled_dot_product_attention_math_for_mps"
_NAMES_ON_MPS = {
    _CPU_ATTENTION: _MPS_ATTENTION,
    # What the CPU takes where it has no instructions for 16 bits.
    "aten::_slow_conv2d_forward": "aten::_mps_convolution",
    "aten::_slow_conv2d_backward.output_mask": "aten::mps_convolution_backward",
}
_Function = Callable[..., Any]


@contextmanager
def keeping_memory_as(device: str) -> Iterator[None]:
    """Let operations on fake tensors of the CPU keep as much memory as a device's kernels.

    ``device`` is cpu or mps. MPS keeps the attention scores of each token for each token, and its
    autocast computes layer norms in fp32.
    """
    functions: dict[_Function, _Function] = {
        # Fake tensors have no values: any two of one shape count as close, and any number will do.
        torch.allclose: lambda *_, **__: True,
        torch.Tensor.item: lambda _: 1.0,
    }
    if device == "mps":
        functions[functional.scaled_dot_product_attention] = _attend_composed
    with _norms_in_fp32() if device == "mps" else nullcontext(), _Replacing(functions):
        yield


@contextmanager
def dispatching_as_mps() -> Iterator[None]:
    """Let the CPU's tensors dispatch what MPS's would, in the whole process."""
    functions = {functional.scaled_dot_product_attention: _attend_as_mps}
    with _norms_in_fp32() as library, _Replacing(functions):
        library.impl("linear", _linear, "AutogradCPU")
        yield


def name_on_mps(operator: torch._ops.OpOverload) -> str:
    """Return the name of what MPS dispatches in an operator's place, such as ``aten::addmm``."""
    name: str = operator.name()  # type: ignore[no-untyped-call]
    return _NAMES_ON_MPS.get(name, name)


def run_on_cpu(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator, also one for which only MPS has a kernel."""
    if operator is _aten.linear_backward.default:
        return _linear_backward(*args)
    return operator(*args, **kwargs)


def run_composite(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that MPS shares with other devices, which dispatches other operators."""
    return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.MPS), *args, **kwargs)


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


def _attend_as_mps(*args: Any, **kwargs: Any) -> torch.Tensor:
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
    if torch.is_grad_enabled() and any(one.requires_grad for one in tensors):
        return _attend_composed(*args, **kwargs)
    return functional.scaled_dot_product_attention(*args, **kwargs)


@contextmanager
def _norms_in_fp32() -> Iterator[Any]:
    """Let the CPU's autocast compute layer norms in fp32; yield the library that does so."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("layer_norm", _layer_norm_in_fp32, "AutocastCPU")
    try:
        yield library
    finally:
        library._destroy()


def _layer_norm_in_fp32(*args: Any) -> Any:
    with torch.autocast("cpu", enabled=False):
        return _aten.layer_norm(*tree_map_only(torch.Tensor, torch.Tensor.float, args))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        # Above autograd, linear would be decomposed.
        with torch._C._AutoDispatchBelowAutograd():
            output: torch.Tensor = _aten.linear.default(inputs, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return _aten.linear_backward.default(inputs, gradient, weight, ctx.needs_input_grad)


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


def _linear_backward(
    inputs: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, needed: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    gradients = gradient.flatten(0, -2)
    return (
        gradient @ weight if needed[0] else None,
        gradients.T @ inputs.flatten(0, -2) if needed[1] else None,
        gradients.sum(0) if needed[2] else None,
    )
