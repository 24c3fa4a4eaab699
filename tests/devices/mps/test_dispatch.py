import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.devices.mps.dispatch import dispatching_as_mps, name_on_mps, run_on_processor


class Names(TorchDispatchMode):
    """Notes the names of operators as MPS would dispatch them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(name_on_mps(func))
        return run_on_processor(func, *args, **(kwargs or {}))


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


def test_autocast_keeps_norms_in_fp32_as_on_mps() -> None:
    norm = nn.LayerNorm(4)
    inputs = torch.randn(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(inputs).dtype == torch.bfloat16
        with dispatching_as_mps():
            assert norm(inputs).dtype == torch.float32


def test_the_processor_is_itself_again_afterwards() -> None:
    layer = nn.Linear(3, 4)
    with pytest.raises(ZeroDivisionError), dispatching_as_mps():
        raise ZeroDivisionError
    with Names() as names:
        layer(torch.randn(2, 3)).sum().backward()
    assert "aten::addmm" in names.seen
    assert "aten::linear" not in names.seen
