from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from finetune.devices.cpu import CpuDevice
from finetune.model.structure import find_structure
from finetune.training.optimizers import build_optimizer, set_learning_rate, total_norm
from finetune.training.plan import Plan


def optimizer_of(
    model: nn.Module, *, head: frozenset[str] = frozenset(), **options: Any
) -> torch.optim.Optimizer:
    plan = Plan(peak=1e-3, total_steps=1, **options)
    return build_optimizer(model, plan, head=head, device=CpuDevice())


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, setting: str) -> dict[str, float]:
    """Return a setting of the parameter groups for each parameter that the optimizer changes."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name_of[parameter]: group[setting]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def expected(model: nn.Module, value_of: Callable[[str], float]) -> dict[str, float]:
    return {name: value_of(name) for name, _ in model.named_parameters()}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = tiny_model()
    head = find_structure(model).head

    optimizer = optimizer_of(model, head=head, weight_decay=0.25)

    assert by_name(model, optimizer, "weight_decay") == expected(
        model, lambda name: 0.0 if name.endswith("bias") or "LayerNorm" in name else 0.25
    )


def test_head_has_a_learning_rate_of_its_own() -> None:
    model = tiny_model()
    head = find_structure(model).head
    optimizer = optimizer_of(model, head=head, head_lr_multiplier=10.0)

    for rate in (0.5, 0.125):
        set_learning_rate(optimizer, rate)

        assert by_name(model, optimizer, "lr") == expected(
            model,
            lambda name: 10 * rate if name in head else rate,  # noqa: B023
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("numbers", [3, 2**17])
def test_norm_shows_what_is_not_finite_in_small_and_large_tensors(
    numbers: int, value: float
) -> None:
    odd = torch.ones(numbers).index_fill(0, torch.tensor(2), value)
    tensors = [torch.ones(3), torch.ones(2**17), odd]
    assert total_norm(tensors[:2]) == pytest.approx((3 + 2**17) ** 0.5)
    assert not total_norm(tensors).isfinite()
