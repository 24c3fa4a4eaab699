from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.batch_finder.estimate import LiveMemory
from finetune.devices.emulation import (
    dispatching_as_mps,
    keeping_memory_as,
    name_on_mps,
    run_on_cpu,
)


class Names(TorchDispatchMode):
    """Notes the names of operators as MPS would dispatch them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(name_on_mps(func))
        return run_on_cpu(func, *args, **(kwargs or {}))


@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_is_one_operator_each_way_with_the_same_gradients(has_bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 4, bias=has_bias)
    inputs = torch.randn(2, 5, 3, requires_grad=True)
    layer(inputs).square().sum().backward()
    expected = [one.grad.clone() for one in (inputs, *layer.parameters())]
    for one in (inputs, *layer.parameters()):
        one.grad = None
    with dispatching_as_mps(), Names() as names:
        layer(inputs).square().sum().backward()
    assert names.seen.count("aten::linear") == names.seen.count("aten::linear_backward") == 1
    assert not {"aten::addmm", "aten::mm", "aten::t"} & set(names.seen)
    actual = [one.grad for one in (inputs, *layer.parameters())]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("trains", [True, False])
def test_attention_is_one_operator_only_without_gradients(trains: bool) -> None:
    query = torch.randn(2, 4, 8, 16, requires_grad=trains)
    with dispatching_as_mps(), Names() as names:
        nn.functional.scaled_dot_product_attention(query, query, query)
    is_one = "aten::_scaled_dot_product_attention_math_for_mps" in names.seen
    assert is_one is not trains
    assert ("aten::bmm" in names.seen) is trains


NUMBERS = 2**16


def kept_bytes(
    action: Callable[[torch.Tensor], torch.Tensor],
    *shape: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return what an action keeps alive beside its input, for the backward pass or as result."""
    with (
        FakeTensorMode(),
        LiveMemory() as memory,
        keeping_memory_as(device),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
    ):
        tensor = torch.ones(*shape, dtype=dtype, requires_grad=True)
        before = memory.live_bytes
        result = action(tensor)
        kept = memory.live_bytes - before
        del result
        return kept


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_by_matrices_keeps_what_grows_with_the_tokens_squared(dropout: float) -> None:
    def attend(tensor: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(tensor, tensor, tensor, dropout_p=dropout)

    few, many = (kept_bytes(attend, 2, 4, tokens, 8, device="mps") for tokens in (128, 512))
    assert many > 12 * few


def test_autocast_computes_norms_in_fp32_where_the_device_does() -> None:
    def normalize(tensor: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(tensor, [256])

    result, copy, mean_and_deviation = 4 * NUMBERS, 4 * NUMBERS, 2 * 4 * 256
    half = torch.bfloat16
    assert kept_bytes(normalize, 256, 256, device="mps", dtype=half) == (
        result + copy + mean_and_deviation
    )
    assert kept_bytes(normalize, 256, 256, device="cpu", dtype=half) < result
