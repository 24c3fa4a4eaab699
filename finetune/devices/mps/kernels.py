"""Which of PyTorch's operators have a kernel on MPS, and which of those kernels are known to err.

The list is the ``native_functions.yaml`` from which PyTorch itself is generated. Its wheels ship
the file for every platform, so that the answer needs no Mac.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import torch
import yaml
from torch.torch_version import TorchVersion

Status = Literal["native", "composite", "missing"]

_COMPOSITES = {
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
}


def status_of(name: str) -> Status:
    """Return how MPS runs an operator.

    Args:
        name: As PyTorch's errors write it, such as ``aten::addmm`` or ``aten::sum.dim_IntList``.

    Returns:
        ``native`` if it has a kernel for MPS, ``composite`` if it is made of other operators, and
        ``missing`` if MPS raises NotImplementedError. That includes operators from outside
        PyTorch, which its list does not know.
    """
    return _statuses().get(name.removeprefix("aten::"), "missing")


@functools.cache
def _statuses() -> dict[str, Status]:
    """Return every operator of PyTorch's list with how MPS runs it."""
    packaged = resources.files("torchgen") / "packaged" / "ATen" / "native"
    # libyaml reads the 16,000 lines in 0.1 s, Python's own parser in ten times that.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load((packaged / "native_functions.yaml").read_text("utf-8"), Loader=loader)
    by_name = {entry["func"].partition("(")[0]: entry for entry in entries}
    statuses = {name: _status(entry, by_name) for name, entry in by_name.items()}
    for entry in entries:
        for variant in entry.get("autogen", "").split(","):
            # Generated from an operator that it then calls.
            statuses.setdefault(variant.strip(), "composite")
    return statuses


def _status(entry: dict[str, Any], by_name: dict[str, dict[str, Any]]) -> Status:
    # A structured operator runs the kernel of its variant that writes into a given tensor.
    if delegate := entry.get("structured_delegate"):
        return _status(by_name[delegate], by_name)
    keys = {key.strip() for listed in entry.get("dispatch", {}) for key in listed.split(",")}
    if "MPS" in keys:
        return "native"
    return "composite" if not keys or keys & _COMPOSITES else "missing"


@dataclass(frozen=True)
class KnownFault:
    """An operator that gives wrong results on MPS under some condition.

    Args:
        operators: Names of those that are hit.
        first: Oldest PyTorch release that has it, or None if all have.
        fixed: First release without it, or None if there is none yet.
        source: The report, or the change that ended it.
        effect: What goes wrong, and when.
        remedy: How to keep clear of it.
        is_met: Whether a call with these arguments, by name, is hit.
    """

    operators: frozenset[str]
    first: str | None
    fixed: str | None
    source: str
    effect: str
    remedy: str
    is_met: Callable[[Mapping[str, Any]], bool]

    def is_in(self, torch_version: str) -> bool:
        """Return whether a release of PyTorch, such as ``2.13.0+cpu``, has the fault."""
        release = TorchVersion(torch_version)
        return (self.first is None or release >= self.first) and (
            self.fixed is None or release < self.fixed
        )


@functools.cache
def known_faults(name: str, *, torch_version: str) -> tuple[KnownFault, ...]:
    """Return the faults of an operator, such as ``aten::bmm``, in a release of PyTorch."""
    return tuple(
        fault for fault in _KNOWN_FAULTS if name in fault.operators and fault.is_in(torch_version)
    )


# Above this, a sum of products reads beyond its operands on M1 and M2, if both sides of the result
# are tiled (pytorch#195163).
_LONGEST_SUM = 32_766
_SMALLEST_TILED_SIDE = 16
_MOST_ELEMENTS = 2**32
# 8 × 1024 × 50304 outputs were right, 9 × 1024 × 50304 were not (pytorch#109457).
_MOST_LINEAR_OUTPUTS = 8 * 1024 * 50_304
_VECTOR_HEAD_SIZES = (64, 96, 128)
_MOST_VECTOR_QUERIES = 8
_VECTOR_BLOCK = 32


def _writes_into_gaps(call: Mapping[str, Any]) -> bool:
    written: torch.Tensor = call["self"]
    return not written.is_contiguous()


def _is_small_attention(call: Mapping[str, Any]) -> bool:
    *_, queries, head_size = call["query"].shape
    return queries <= _MOST_VECTOR_QUERIES and head_size in _VECTOR_HEAD_SIZES


def _is_small_permuted_attention(call: Mapping[str, Any]) -> bool:
    query: torch.Tensor = call["query"]
    return _is_small_attention(call) and query.shape[0] > 1 and not query.is_contiguous()


def _is_small_ragged_attention(call: Mapping[str, Any]) -> bool:
    key: torch.Tensor = call["key"]
    return _is_small_attention(call) and key.shape[-2] % _VECTOR_BLOCK != 0


def _has_mask(call: Mapping[str, Any]) -> bool:
    return call.get("attn_mask") is not None


def _is_long_product(call: Mapping[str, Any]) -> bool:
    # After the bias, if there is one.
    left, right = [one for one in call.values() if isinstance(one, torch.Tensor)][-2:]
    return _reads_beyond(left.shape[-1], left.shape[-2], right.shape[-1])


def _is_long_linear(call: Mapping[str, Any]) -> bool:
    outputs, inputs = call["weight"].shape
    return _reads_beyond(inputs, math.prod(call["input"].shape[:-1]), outputs)


def _is_long_linear_backward(call: Mapping[str, Any]) -> bool:
    outputs, inputs = call["weight"].shape
    tokens = math.prod(call["self"].shape[:-1])
    return _reads_beyond(tokens, outputs, inputs) or _reads_beyond(outputs, tokens, inputs)


def _reads_beyond(terms: int, rows: int, columns: int) -> bool:
    return terms > _LONGEST_SUM and min(rows, columns) >= _SMALLEST_TILED_SIDE


def _is_large_product(call: Mapping[str, Any]) -> bool:
    left: torch.Tensor = call["self"]
    right: torch.Tensor = call["mat2"]
    outputs = left.shape[0] * left.shape[1] * right.shape[2]
    return max(left.numel(), right.numel(), outputs) > _MOST_ELEMENTS


def _is_large_linear(call: Mapping[str, Any]) -> bool:
    inputs: torch.Tensor = call["input"]
    weight: torch.Tensor = call["weight"]
    return math.prod(inputs.shape[:-1]) * weight.shape[0] > _MOST_LINEAR_OUTPUTS


def _has_frozen_input(call: Mapping[str, Any]) -> bool:
    needs_input, *needs_parameters = call["output_mask"]
    return not needs_input and any(needs_parameters)


def _mixes_formats(call: Mapping[str, Any]) -> bool:
    weight: torch.Tensor | None = call["weight"]
    return weight is not None and weight.dtype != call["input"].dtype


def _may_skip(call: Mapping[str, Any]) -> bool:
    return call.get("found_inf") is not None


_ATTENTION = frozenset({"aten::_scaled_dot_product_attention_math_for_mps"})
_SMALLER_BATCH = "keep rows × tokens of a micro-batch lower with --batch-size"

# From reports up to September 2026. A release with a fix is named by its report, or was found by
# comparing the kernels in PyTorch's wheels for macOS (pytorch#181133, #186360), or follows from the
# date of the change (pytorch#118115, #156707, #183825). Where none is known, all count as hit.
_KNOWN_FAULTS = (
    KnownFault(
        frozenset({"aten::addcmul_", "aten::addcdiv_"}),
        first=None,
        fixed="2.4",
        source="pytorch#118115",
        effect="leaves a tensor that is not contiguous unchanged, so that it does not train",
        remedy="update PyTorch, or call contiguous() on the tensor",
        is_met=_writes_into_gaps,
    ),
    KnownFault(
        _ATTENTION,
        first="2.8",
        fixed="2.12",
        source="pytorch#181133",
        effect="is wrong for permuted inputs of at most 8 tokens and heads of 64 numbers or more",
        remedy="pad to more than 8 tokens, or update PyTorch",
        is_met=_is_small_permuted_attention,
    ),
    KnownFault(
        _ATTENTION,
        first="2.8",
        fixed=None,
        source="pytorch#169222",
        effect="may read out of bounds for at most 8 tokens and heads of 64 numbers or more",
        remedy="pad to more than 8 tokens",
        is_met=_is_small_ragged_attention,
    ),
    KnownFault(
        _ATTENTION,
        first=None,
        fixed="2.9",
        source="pytorch#156707",
        effect="gives NaN for rows in which every token is masked",
        remedy="leave one token of each row unmasked, or update PyTorch",
        is_met=_has_mask,
    ),
    KnownFault(
        frozenset({"aten::linear"}),
        first=None,
        fixed=None,
        source="pytorch#109457",
        effect="was seen to be wrong from 464 million outputs on; the report is closed and names "
        "no fix",
        remedy=_SMALLER_BATCH,
        is_met=_is_large_linear,
    ),
    KnownFault(
        frozenset({"aten::bmm"}),
        first="2.4",
        fixed=None,
        source="pytorch#197636",
        effect="is wrong above 2³² elements, forward or backward",
        remedy=_SMALLER_BATCH,
        is_met=_is_large_product,
    ),
    KnownFault(
        frozenset({"aten::bmm", "aten::baddbmm"}),
        first="2.7",
        fixed=None,
        source="pytorch#195163",
        effect="adds foreign memory to sums of 32,767 products and more, on M1 and M2",
        remedy=_SMALLER_BATCH,
        is_met=_is_long_product,
    ),
    KnownFault(
        frozenset({"aten::mm", "aten::addmm"}),
        first="2.7",
        fixed="2.14",
        source="pytorch#177116",
        effect="adds foreign memory to sums of 32,767 products and more, on M1 and M2",
        remedy=_SMALLER_BATCH,
        is_met=_is_long_product,
    ),
    KnownFault(
        frozenset({"aten::linear"}),
        first="2.7",
        fixed="2.14",
        source="pytorch#177116",
        effect="adds foreign memory to sums of 32,767 products and more, on M1 and M2",
        remedy="choose a narrower layer",
        is_met=_is_long_linear,
    ),
    KnownFault(
        frozenset({"aten::linear_backward"}),
        first="2.7",
        fixed="2.14",
        source="pytorch#177116",
        effect="gives wrong gradients for 32,767 tokens and more in a micro-batch, on M1 and M2",
        remedy=_SMALLER_BATCH,
        is_met=_is_long_linear_backward,
    ),
    KnownFault(
        frozenset({"aten::_fused_adamw_"}),
        first=None,
        fixed="2.13",
        source="pytorch#186360",
        effect="steps although fp16's scaled gradients are infinite, after which all is NaN",
        remedy="update PyTorch, or use --precision fp32 or bf16",
        is_met=_may_skip,
    ),
    KnownFault(
        frozenset({"aten::native_layer_norm_backward"}),
        first=None,
        fixed="2.13",
        source="pytorch#183825",
        effect="gives random gradients to a norm that trains on top of what is frozen",
        remedy="update PyTorch, or use --mode full or classifier",
        is_met=_has_frozen_input,
    ),
    KnownFault(
        frozenset({"aten::native_layer_norm"}),
        first=None,
        fixed=None,
        source="pytorch#190054",
        effect="misreads parameters in fp32 if its input is in 16 bits",
        remedy="give the norm its input in fp32, as autocast does",
        is_met=_mixes_formats,
    ),
)
