"""Training's attention on MPS, computed on the CPU in the place of a Mac."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from finetune.devices.mps.attention import (
    TrainingAttention,
    training_attention,
    use_default_attention,
    use_training_attention,
)

BOOL_MASK = torch.tensor([[[[True] * 6]], [[[True] * 4 + [False] * 2]]])


def gradients_of(model: nn.Module, mask: torch.Tensor) -> list[torch.Tensor]:
    tokens = torch.arange(12).reshape(2, 6)
    loss = model(input_ids=tokens, attention_mask=mask).logits.square().sum()
    trained = [one for one in model.parameters() if one.requires_grad]
    return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("mask", [BOOL_MASK, BOOL_MASK[:, 0, 0].long()], ids=["4-D", "2-D"])
@pytest.mark.parametrize("architecture", ["bert", "distilbert", "roberta", "electra"])
def test_gradients_are_those_of_pytorchs_attention(architecture: str, mask: torch.Tensor) -> None:
    model = tiny_model(architecture).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = gradients_of(model, mask)
    with training_attention("cpu"):
        actual = gradients_of(model, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_it_drops_weights_as_often_as_it_should() -> None:
    values = torch.eye(64).expand(2, 1, 64, 64)
    query = torch.zeros(2, 1, 64, 64, requires_grad=True)
    attend = TrainingAttention(refuse, device_type="cpu")
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    weights, _ = attend(nn.Module(), query, query, values, mask, dropout=0.25)
    assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert weights.max().item() == pytest.approx(1 / 64 / 0.75)


def refuse(*args: Any, **options: Any) -> Any:
    raise AssertionError("another attention was called")


def without_gradient(attend: Callable[..., Any], query: torch.Tensor) -> None:
    with torch.no_grad():
        attend(nn.Module(), query, query, query, BOOL_MASK)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(without_gradient, id="evaluation"),
        lambda attend, query: attend(nn.Module(), query, query, query, None),
        lambda attend, query: attend(nn.Module(), query, query, query, BOOL_MASK, softcap=1.0),
        lambda attend, query: attend(nn.Module(), query, query[:, :1], query[:, :1], BOOL_MASK),
        lambda attend, query: attend(nn.Module(), *[query.bfloat16()] * 3, BOOL_MASK),
        lambda attend, query: attend(nn.Module(), *[query.to("meta")] * 3, BOOL_MASK),
    ],
)
def test_all_else_is_computed_as_before(call: Callable[..., Any]) -> None:
    called: list[dict[str, Any]] = []
    attend = TrainingAttention(lambda *args, **options: called.append(options), device_type="cpu")
    call(attend, torch.randn(2, 4, 6, 8, requires_grad=True))
    assert len(called) == 1


def test_transformers_takes_it_on_its_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(ALL_ATTENTION_FUNCTIONS))
    model = tiny_model().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    expected = gradients_of(model, BOOL_MASK)
    use_training_attention("mps")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    use_training_attention("mps")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend
    actual = gradients_of(model, BOOL_MASK)
    use_default_attention()
    assert not isinstance(ALL_ATTENTION_FUNCTIONS["sdpa"], TrainingAttention)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
