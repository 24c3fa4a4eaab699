"""Makes the processor dispatch what MPS would, so that it can be recorded without a Mac.

Most operators are the same on both: PyTorch chooses the device's kernel below them. These differ,
as read in PyTorch 2.13:

    what                 on the processor           on MPS
    attention, without   …_flash_attention_for_cpu  …_attention_math_for_mps
      gradient, dropout
    attention, with      …_flash_attention_for_cpu  in pieces: matmul, softmax and others
    linear layer         addmm, mm, t, view         linear, linear_backward
    autocast             in 16 bits: norms, sums    in fp32
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_RUNS_AS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (
        "aten::_scaled_dot_product_attention_math_for_mps"
    ),
}
# Of the operators that autocast keeps in fp32 on MPS alone, those that encoders use.
_IN_FP32_ON_MPS = (
    _aten.layer_norm.default,
    _aten.softmax.int,
    _aten.log_softmax.int,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.cumsum.default,
    _aten.exp.default,
    _aten.log.default,
    _aten.pow.Tensor_Scalar,
    _aten.rsqrt.default,
)


@contextmanager
def dispatching_as_mps() -> Iterator[None]:
    """Let the processor's tensors dispatch what MPS's would, in the whole process for a while."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("linear", _linear, "AutogradCPU")
    for operator in _IN_FP32_ON_MPS:
        library.impl(operator, _in_fp32(operator), "AutocastCPU")
    try:
        with _AttentionInPieces():
            yield
    finally:
        library._destroy()


def name_on_mps(operator: torch._ops.OpOverload) -> str:
    """Return the name of what MPS dispatches in an operator's place, such as ``aten::addmm``."""
    name: str = operator.name()  # type: ignore[no-untyped-call]
    return _RUNS_AS.get(name, name)


def run_on_processor(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an operator, also one for which only MPS has a kernel."""
    if operator is _aten.linear_backward.default:
        return _linear_backward(*args)
    return operator(*args, **kwargs)


def run_composite(operator: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel that MPS shares with other devices, with tensors of the processor.

    Args:
        operator: One that is made of others, and dispatches them in turn.
        *args: Its arguments.
        **kwargs: Its arguments by name.
    """
    return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.MPS), *args, **kwargs)


class _AttentionInPieces(TorchFunctionMode):
    """Keeps attention that takes part in a backward from the processor's own kernel."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and torch.is_grad_enabled():
            tensors = (*args, *kwargs.values())
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in tensors):
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _in_fp32(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*tree_map_only(torch.Tensor, _to_fp32, args), **kwargs)

    return run


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer as one operator forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        # Further up, linear would be taken apart.
        with torch._C._AutoDispatchBelowAutograd():
            output: torch.Tensor = _aten.linear.default(inputs, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return _aten.linear_backward.default(inputs, gradient, weight, ctx.needs_input_grad)


def _linear_backward(
    inputs: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, needed: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    rows = gradient.flatten(0, -2)
    return (
        gradient @ weight if needed[0] else None,
        rows.T @ inputs.flatten(0, -2) if needed[1] else None,
        rows.sum(0) if needed[2] else None,
    )
