from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from finetune.model.freeze import freeze_parameters
from finetune.model.structure import find_structure
from finetune.training.optimizer import build_optimizer, set_learning_rate


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    settings = {"head_rate_factor": 1.0, "weight_decay": 0.01, "is_fused": True, "head": set()}
    return build_optimizer(model, **{**settings, **options})


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer, setting: str) -> dict[str, float]:
    """Return a setting of the groups for each parameter that the optimizer changes."""
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
    optimizer = optimizer_of(model, head=head, head_rate_factor=10.0)

    for rate in (0.5, 0.125):
        set_learning_rate(optimizer, rate)

        assert by_name(model, optimizer, "lr") == expected(
            model,
            lambda name: 10 * rate if name in head else rate,  # noqa: B023
        )


def test_frozen_parameters_are_left_out() -> None:
    model = tiny_model()
    structure = find_structure(model)
    freeze_parameters(model, structure, mode="head")

    optimizer = optimizer_of(model, head=structure.head)

    assert by_name(model, optimizer, "weight_decay").keys() == structure.head


def test_model_of_matrices_alone_has_one_group() -> None:
    optimizer = optimizer_of(nn.Linear(3, 2, bias=False))

    [group] = optimizer.param_groups
    assert group["weight_decay"] == 0.01


@pytest.mark.parametrize("is_fused", [True, False])
def test_kernel_is_the_one_asked_for(is_fused: bool) -> None:
    optimizer = optimizer_of(tiny_model(), is_fused=is_fused)

    assert {group["fused"] for group in optimizer.param_groups} == {is_fused}
