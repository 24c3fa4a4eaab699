"""Which of MPS's kernels are known to compute wrongly, in which releases, and for which arguments.

Left out are faults that no call shows: those of compiled modules (pytorch#191976), of some values
only, such as NaN in fully masked rows of nn.MultiheadAttention (#151667) or tiny variances in layer
norm (#186367, #190491), of copies between CPU and GPU (#189563, #189690, #197715), and of nightly
builds alone (#186278). ``finetune doctor --parity`` compares what a device computes.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Args:
        operator: Its name, such as ``aten::bmm``.
        arguments: By the names of the operator's schema; those left to their defaults are missing.
    """

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
        """Return an argument that is a tensor."""
        return cast(torch.Tensor, self.arguments[name])

    def tensors(self) -> list[torch.Tensor]:
        """Return the arguments that are tensors, in the schema's order."""
        return [one for one in self.arguments.values() if isinstance(one, torch.Tensor)]


@dataclass(frozen=True)
class KnownFault:
    """Operators that give wrong results on MPS under some condition.

    Args:
        source: The reports, or the changes that ended it.
        operators: Names of those that are hit, without ``aten::``, by spaces.
        effect: What goes wrong, and when.
        remedy: How to keep clear of it.
        is_met: Whether a call is hit.
        fixed: First release without it, or None if there is none yet.
    """

    source: str
    operators: str
    effect: str
    remedy: str
    is_met: Callable[[Call], bool]
    fixed: str | None = None

    def is_in(self, torch_version: str) -> bool:
        """Return whether a release of PyTorch, such as ``2.13.0+cpu``, has the fault."""
        return self.fixed is None or TorchVersion(torch_version) < self.fixed


def known_faults(call: Call, *, torch_version: str) -> Iterator[KnownFault]:
    """Yield the faults that a call meets in a release of PyTorch."""
    for fault in _faults_by_operator(torch_version).get(call.operator, ()):
        if fault.is_met(call):
            yield fault


@functools.cache
def _faults_by_operator(torch_version: str) -> dict[str, list[KnownFault]]:
    faults: defaultdict[str, list[KnownFault]] = defaultdict(list)
    for fault in _KNOWN_FAULTS:
        if fault.is_in(torch_version):
            for operator in fault.operators.split():
                faults[f"aten::{operator}"].append(fault)
    return dict(faults)


# The most products in a sum on M1 and M2: beyond, the kernel reads past its operands if both sides
# of the result are tiled (pytorch#195163).
_LONGEST_SUM = 32_766
_SMALLEST_TILED_SIDE = 16
_MOST_ELEMENTS = 2**32
# 8 × 1024 × 50304 outputs were right, 9 × 1024 × 50304 were not (pytorch#109457).
_MOST_LINEAR_OUTPUTS = 8 * 1024 * 50_304
# 10 × 12416 × 12416 probabilities were NaN (pytorch#96602).
_SOFTMAX_NAN_OUTPUTS = 10 * 12_416**2
_MOST_MATRICES = 65_536
_VECTOR_HEAD_SIZES = (64, 96, 128)
_MOST_VECTOR_QUERIES = 8
_VECTOR_BLOCK = 32
_HALF = (torch.float16, torch.bfloat16)


def _is_small_attention(call: Call) -> bool:
    *_, queries, head_size = call.tensor("query").shape
    return queries <= _MOST_VECTOR_QUERIES and head_size in _VECTOR_HEAD_SIZES


def _is_small_permuted_attention(call: Call) -> bool:
    query = call.tensor("query")
    return _is_small_attention(call) and query.shape[0] > 1 and not query.is_contiguous()


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
        terms > _LONGEST_SUM and min(rows, columns) >= _SMALLEST_TILED_SIDE
        for rows, terms, columns in products
    )


def _has_many_elements(call: Call) -> bool:
    left, right = call.tensor("self"), call.tensor("mat2")
    outputs = left.shape[0] * left.shape[1] * right.shape[2]
    return max(left.numel(), right.numel(), outputs) > _MOST_ELEMENTS


def _has_many_outputs(call: Call) -> bool:
    return _vectors(call.tensor("input")) * len(call.tensor("weight")) > _MOST_LINEAR_OUTPUTS


def _has_many_matrices(call: Call) -> bool:
    shape = call.tensor("input").shape
    return call.has("bias") and len(shape) > 2 and shape[-3] > _MOST_MATRICES


def _adds_bias_to_single_vectors(call: Call) -> bool:
    return call.has("bias") and call.tensor("input").shape[-2:-1] == (1,)


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


def _mixes_formats(call: Call) -> bool:
    return call.has("weight") and call.tensor("weight").dtype != call.tensor("input").dtype


def _unscales_halves(call: Call) -> bool:
    gradients = cast(Sequence[torch.Tensor], call.arguments["self"])
    return any(one.dtype in _HALF for one in gradients)


def _vectors(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


_ATTENTION = "_scaled_dot_product_attention_math_for_mps"
_UPDATE = "update PyTorch"
_SMALLER_BATCH = "lower --batch-size: what counts is examples times padded length"

# Of PyTorch 2.11 and newer, from reports up to November 2026. A release with a fix is named by its
# report, or was found by comparing the kernels in PyTorch's wheels for macOS (pytorch#181133,
# #186360), or follows from the date of the change. Where none is known, all count as hit.
_KNOWN_FAULTS = (
    KnownFault(
        "pytorch#181133",
        _ATTENTION,
        "is wrong for permuted inputs of at most 8 tokens and heads of 64 numbers or more",
        f"pad to more than 8 tokens, or {_UPDATE}",
        _is_small_permuted_attention,
        fixed="2.12",
    ),
    KnownFault(
        "pytorch#169222",
        _ATTENTION,
        "may read out of bounds for at most 8 tokens and heads of 64 numbers or more",
        "pad to more than 8 tokens",
        lambda call: (
            _is_small_attention(call) and call.tensor("key").shape[-2] % _VECTOR_BLOCK != 0
        ),
    ),
    KnownFault(
        "pytorch#182285, #184180",
        _ATTENTION,
        "misreads the mask for at most 8 tokens and heads of 64 numbers or more",
        f"pad to more than 8 tokens, or {_UPDATE}",
        lambda call: _is_small_attention(call) and call.has("attn_mask"),
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#96602, open",
        "_softmax",
        "was seen to give NaN from 1,500 million numbers on, in 2026 on an M5 Max",
        _SMALLER_BATCH,
        lambda call: call.tensor("self").numel() >= _SOFTMAX_NAN_OUTPUTS,
    ),
    KnownFault(
        "pytorch#109457",
        "linear",
        "was seen to be wrong from 464 million outputs on; the report is closed and names no fix",
        _SMALLER_BATCH,
        _has_many_outputs,
    ),
    KnownFault(
        "pytorch#189495",
        "linear",
        "with a bias writes over other outputs if an input has more than 65,536 matrices",
        _SMALLER_BATCH,
        _has_many_matrices,
        fixed="2.14",
    ),
    KnownFault(
        "pytorch#188438",
        "linear",
        "leaves out the bias of single vectors, on M1 with macOS 26",
        f"{_UPDATE} or macOS, or give the layer an input of shape [examples, features]",
        _adds_bias_to_single_vectors,
        fixed="2.14",
    ),
    KnownFault(
        "pytorch#180776, #181936",
        "linear linear_backward",
        "gives other results at each call in 16 bits, on M5",
        f"{_UPDATE}, or use --precision fp32",
        _multiplies_halves_in_batches,
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#180201",
        "mm addmm bmm baddbmm linear linear_backward",
        "gives rows of zeros for expanded tensors, on macOS 15 to 26.3",
        f"{_UPDATE} or macOS, or call contiguous() on the tensor",
        _is_expanded,
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#197636",
        "bmm",
        "is wrong above 2³² elements, forward or backward",
        _SMALLER_BATCH,
        _has_many_elements,
    ),
    KnownFault(
        "pytorch#177116, #195163",
        "mm addmm bmm baddbmm linear linear_backward",
        "adds foreign memory to sums of 32,767 products and more, on M1 and M2; from PyTorch 2.14 "
        "on, of 32,767 and 32,768 alone except in bmm and baddbmm",
        _SMALLER_BATCH,
        _has_long_sum,
    ),
    KnownFault(
        "pytorch#186360",
        "_fused_adamw_",
        "steps although fp16's scaled gradients are infinite, after which all is NaN",
        f"{_UPDATE}, or use --precision fp32 or bf16",
        lambda call: call.has("found_inf"),
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#184286",
        "_amp_foreach_non_finite_check_and_unscale_",
        "sets gradients in 16 bits to zero",
        f"{_UPDATE}, or keep the weights in fp32",
        _unscales_halves,
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#183825",
        "native_layer_norm_backward",
        "gives random gradients to a norm that trains on top of frozen layers",
        f"{_UPDATE}, train all of the model, or the last linear layer alone: --head classifier",
        _has_frozen_input,
        fixed="2.13",
    ),
    KnownFault(
        "pytorch#190054",
        "native_layer_norm",
        "misreads parameters in fp32 if its input is in 16 bits",
        "give the norm its input in fp32, as autocast does",
        _mixes_formats,
    ),
    KnownFault(
        "pytorch#185119",
        "embedding_dense_backward",
        "gives a gradient to the embedding of the padding token",
        f"{_UPDATE}; masked padding has none in any case",
        lambda call: cast(int, call.arguments["padding_idx"]) >= 0,
        fixed="2.13",
    ),
)
