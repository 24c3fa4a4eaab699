"""Which of MPS's kernels are known to be wrong, to crash or to be slow: where, and in which calls.

Left out are faults that no call shows: of compiled modules (pytorch#191976), of some values
(#151667, #186367, #190491), of copies (#189563, #189690, #197715), of nightly builds (#186278), and
of ``autocast("cuda")`` and ``GradScaler("cuda")``, which do nothing on a Mac and don't say so.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import yaml
from packaging.specifiers import SpecifierSet

from finetune.devices.check import PREFER_METAL, is_set

# The arguments that are given to an operator, by their names in its schema.
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class KnownFault:
    """Operators, without ``aten::``, that are faulty on some Macs in some releases of PyTorch.

    ``condition``, one of ``_CONDITIONS``, says which of their calls are hit. ``torch`` and
    ``macos`` are ranges of versions, and ``chips`` generations such as 1 for M1; without them all
    are hit.
    """

    source: str
    operators: str
    condition: str
    effect: str
    remedy: str
    torch: str = ""
    macos: str = ""
    chips: tuple[int, ...] = ()

    def hits(self, operator: str, arguments: Arguments) -> bool:
        """Return whether a call is hit, of an operator by its name on MPS, such as aten::bmm."""
        is_named = operator.removeprefix("aten::") in self.operators.split()
        return is_named and _CONDITIONS[self.condition](arguments)


def known_faults(*, torch_version: str, macos: str, chip: int | None) -> list[KnownFault]:
    """Return the faults of a release of PyTorch on a Mac; ``""`` and None stand for any Mac."""
    return [
        fault
        for fault in _read_faults()
        if _contains(fault.torch, torch_version)
        and (not macos or _contains(fault.macos, macos))
        and (not fault.chips or chip is None or chip in fault.chips)
    ]


def _contains(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def named_arguments(
    operator: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Arguments:
    """Return the arguments of a call by the names in the operator's schema."""
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


@functools.cache
def _read_faults() -> list[KnownFault]:
    text = (resources.files("finetune.devices.mps") / "known_faults.yaml").read_text("utf-8")
    entries = yaml.safe_load(text)
    return [KnownFault(**entry | {"chips": tuple(entry.get("chips", ()))}) for entry in entries]


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
# From so many on, single vectors take a quick path again (pytorch#189855).
_QUICK_VECTORS = 16
_HALF = (torch.float16, torch.bfloat16)


def _is_small_attention(call: Arguments) -> bool:
    *_, queries, head_size = call["query"].shape
    return queries <= _MAX_VECTOR_QUERIES and head_size in _VECTOR_HEAD_SIZES


def _tensors(call: Arguments) -> list[torch.Tensor]:
    return [one for one in call.values() if isinstance(one, torch.Tensor)]


def _vectors(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1])


def _has_long_sum(call: Arguments) -> bool:
    if "grad_output" in call:
        outputs, features = call["weight"].shape
        vectors = _vectors(call["self"])
        products = [(outputs, vectors, features), (vectors, outputs, features)]
    elif "input" in call:
        inputs = call["input"]
        products = [(_vectors(inputs), inputs.shape[-1], len(call["weight"]))]
    else:
        # After the bias, if there is one.
        left, right = _tensors(call)[-2:]
        products = [(left.shape[-2], left.shape[-1], right.shape[-1])]
    return any(
        terms > _MAX_SUM and min(rows, columns) >= _MIN_TILED_SIDE
        for rows, terms, columns in products
    )


def _has_many_elements(call: Arguments) -> bool:
    left, right = _tensors(call)
    outputs = left.shape[0] * left.shape[1] * right.shape[2]
    return max(left.numel(), right.numel(), outputs) > _MAX_ELEMENTS


def _has_bias(call: Arguments) -> bool:
    return call.get("bias") is not None


def _has_many_matrices(call: Arguments) -> bool:
    shape = call["input"].shape
    return _has_bias(call) and len(shape) > 2 and shape[-3] > _MAX_MATRICES


def _multiplies_halves_in_batches(call: Arguments) -> bool:
    inputs: torch.Tensor = call["grad_output" if "grad_output" in call else "input"]
    return inputs.dtype in _HALF and inputs.ndim > 2 and not _has_bias(call)


def _is_transposed_weight(call: Arguments) -> bool:
    weight = call["weight"]
    return weight.dtype == torch.bfloat16 and not weight.is_contiguous() and call["input"].ndim > 2


def _is_expanded(call: Arguments) -> bool:
    return any(
        stride == 0 and size > 1
        for one in _tensors(call)
        for stride, size in zip(one.stride(), one.shape, strict=True)
    )


_CONDITIONS: dict[str, Callable[[Arguments], bool]] = {
    "small permuted attention": lambda call: (
        _is_small_attention(call) and len(call["query"]) > 1 and not call["query"].is_contiguous()
    ),
    "small attention to a partial block": lambda call: (
        _is_small_attention(call) and call["key"].shape[-2] % _VECTOR_BLOCK != 0
    ),
    "small masked attention": lambda call: (
        _is_small_attention(call) and call.get("attn_mask") is not None
    ),
    "large softmax": lambda call: call["self"].numel() >= _SOFTMAX_NAN_OUTPUTS,
    "many outputs": lambda call: (
        _vectors(call["input"]) * len(call["weight"]) > _MAX_LINEAR_OUTPUTS
    ),
    "many matrices": _has_many_matrices,
    "single vectors with bias": lambda call: _has_bias(call) and call["input"].shape[-2:-1] == (1,),
    "few single vectors in 16 bits": lambda call: (
        call["input"].dtype in _HALF
        and call["input"].shape[-2:-1] == (1,)
        and call["input"].ndim > 2
        and len(call["input"]) < _QUICK_VECTORS
    ),
    "transposed weight in bf16": _is_transposed_weight,
    "weight of one dimension": lambda call: call["weight"].ndim == 1,
    "single rows in five dimensions": lambda call: (
        call["grad_output"].ndim > 4 and call["self"].shape.count(1) > 1
    ),
    "Metal preferred": lambda call: is_set(PREFER_METAL),
    "attention in 16 bits": lambda call: call["query"].dtype in _HALF,
    "values of another head size": lambda call: call["value"].shape[-1] != call["query"].shape[-1],
    "16 bits in batches": _multiplies_halves_in_batches,
    "expanded tensors": _is_expanded,
    "many elements": _has_many_elements,
    "long sum": _has_long_sum,
    "scaled gradients": lambda call: call.get("found_inf") is not None,
    "tensors in 16 bits": lambda call: any(one.dtype in _HALF for one in call["self"]),
    "frozen input": lambda call: not call["output_mask"][0] and any(call["output_mask"][1:]),
    "parameters of another format": lambda call: (
        call.get("weight") is not None and call["weight"].dtype != call["input"].dtype
    ),
}
