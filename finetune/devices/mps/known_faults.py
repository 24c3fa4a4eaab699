"""Which of MPS's kernels are known to compute wrongly, in which releases, and for which arguments.

Left out are faults that no call shows: of compiled modules (pytorch#191976), of some values
(#151667, #186367, #190491), of copies (#189563, #189690, #197715) and of nightly builds (#186278).
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import cast

import torch
import yaml
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Call:
    """A call of an operator, such as ``aten::bmm``, with the arguments that are given, by name."""

    operator: str
    arguments: Mapping[str, object]

    @classmethod
    def of(
        cls,
        name: str,
        operator: torch._ops.OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> "Call":
        """Return the call of an operator, by the name that it has on MPS."""
        names = (argument.name for argument in operator._schema.arguments)
        return cls(name, dict(zip(names, args, strict=False)) | dict(kwargs))

    def has(self, name: str) -> bool:
        """Return whether an argument is given and not None."""
        return self.arguments.get(name) is not None

    def tensor(self, name: str) -> torch.Tensor:
        """Return one of the tensors."""
        return cast(torch.Tensor, self.arguments[name])

    def tensors(self) -> list[torch.Tensor]:
        """Return the arguments that are tensors, in the schema's order."""
        return [one for one in self.arguments.values() if isinstance(one, torch.Tensor)]


@dataclass(frozen=True)
class KnownFault:
    """Operators, without ``aten::``, that give wrong results before the release ``fixed``.

    ``condition``, one of ``_CONDITIONS``, says which of their calls are hit.
    """

    source: str
    operators: str
    condition: str
    effect: str
    remedy: str
    fixed: str | None = None


def known_faults(call: Call, *, torch_version: str) -> Iterator[KnownFault]:
    """Yield the faults that a call meets in a release of PyTorch, such as ``2.13.0+cpu``."""
    for fault in _read_faults():
        if (
            call.operator.removeprefix("aten::") in fault.operators.split()
            and (fault.fixed is None or TorchVersion(torch_version) < fault.fixed)
            and _CONDITIONS[fault.condition](call)
        ):
            yield fault


@functools.cache
def _read_faults() -> list[KnownFault]:
    text = (resources.files("finetune.devices.mps") / "known_faults.yaml").read_text("utf-8")
    return [KnownFault(**entry) for entry in yaml.safe_load(text)]


# The most products in a sum on M1 and M2: beyond, the kernel reads past its operands if both sides
# of the result are tiled (pytorch#195163).
_MAX_SUM = 32_766
_MIN_TILED_SIDE = 16
_MAX_ELEMENTS = 2**32
# 8 × 1024 × 50304 outputs were right, 9 × 1024 × 50304 were not (pytorch#109457).
_MAX_LINEAR_OUTPUTS = 8 * 1024 * 50_304
# 10 × 12416 × 12416 probabilities were NaN (pytorch#96602).
_SOFTMAX_NAN_OUTPUTS = 10 * 12_416**2
_MAX_MATRICES = 65_536
_VECTOR_HEAD_SIZES = (64, 96, 128)
_MAX_VECTOR_QUERIES = 8
_VECTOR_BLOCK = 32
_HALF = (torch.float16, torch.bfloat16)


def _is_small_attention(call: Call) -> bool:
    *_, queries, head_size = call.tensor("query").shape
    return queries <= _MAX_VECTOR_QUERIES and head_size in _VECTOR_HEAD_SIZES


def _vectors(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _has_long_sum(call: Call) -> bool:
    match call.operator:
        case "aten::linear":
            inputs = call.tensor("input")
            products = [(_vectors(inputs), inputs.shape[-1], len(call.tensor("weight")))]
        case "aten::linear_backward":
            outputs, features = call.tensor("weight").shape
            vectors = _vectors(call.tensor("self"))
            products = [(outputs, vectors, features), (vectors, outputs, features)]
        case _:
            # After the bias, if there is one.
            left, right = call.tensors()[-2:]
            products = [(left.shape[-2], left.shape[-1], right.shape[-1])]
    return any(
        terms > _MAX_SUM and min(rows, columns) >= _MIN_TILED_SIDE
        for rows, terms, columns in products
    )


def _has_many_elements(call: Call) -> bool:
    left, right = call.tensor("self"), call.tensor("mat2")
    outputs = left.shape[0] * left.shape[1] * right.shape[2]
    return max(left.numel(), right.numel(), outputs) > _MAX_ELEMENTS


def _has_many_matrices(call: Call) -> bool:
    shape = call.tensor("input").shape
    return call.has("bias") and len(shape) > 2 and shape[-3] > _MAX_MATRICES


def _multiplies_halves_in_batches(call: Call) -> bool:
    is_backward = call.operator == "aten::linear_backward"
    inputs = call.tensor("grad_output" if is_backward else "input")
    return inputs.dtype in _HALF and inputs.ndim > 2 and (is_backward or not call.has("bias"))


def _is_expanded(call: Call) -> bool:
    return any(
        stride == 0 and size > 1
        for one in call.tensors()
        for stride, size in zip(one.stride(), one.shape, strict=True)
    )


def _has_frozen_input(call: Call) -> bool:
    needs_input, *needs_parameters = cast(Sequence[bool], call.arguments["output_mask"])
    return not needs_input and any(needs_parameters)


_CONDITIONS: dict[str, Callable[[Call], bool]] = {
    "small permuted attention": lambda call: (
        _is_small_attention(call)
        and call.tensor("query").shape[0] > 1
        and not call.tensor("query").is_contiguous()
    ),
    "small attention to a partial block": lambda call: (
        _is_small_attention(call) and call.tensor("key").shape[-2] % _VECTOR_BLOCK != 0
    ),
    "small masked attention": lambda call: _is_small_attention(call) and call.has("attn_mask"),
    "large softmax": lambda call: call.tensor("self").numel() >= _SOFTMAX_NAN_OUTPUTS,
    "many outputs": lambda call: (
        _vectors(call.tensor("input")) * len(call.tensor("weight")) > _MAX_LINEAR_OUTPUTS
    ),
    "many matrices": _has_many_matrices,
    "single vectors with bias": lambda call: (
        call.has("bias") and call.tensor("input").shape[-2:-1] == (1,)
    ),
    "16 bits in batches": _multiplies_halves_in_batches,
    "expanded tensors": _is_expanded,
    "many elements": _has_many_elements,
    "long sum": _has_long_sum,
    "scaled gradients": lambda call: call.has("found_inf"),
    "gradients in 16 bits": lambda call: any(
        one.dtype in _HALF for one in cast(Sequence[torch.Tensor], call.arguments["self"])
    ),
    "frozen input": _has_frozen_input,
    "parameters of another format": lambda call: (
        call.has("weight") and call.tensor("weight").dtype != call.tensor("input").dtype
    ),
    "padding token": lambda call: cast(int, call.arguments["padding_idx"]) >= 0,
}
