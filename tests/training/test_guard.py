from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_training import random_examples, take_steps, tiny_trainer
from torch import nn

from finetune.errors import FinetuneError
from finetune.training.guard import ParameterGuard

LAYER = "bert.encoder.layer.1.output.dense.weight"


def guarded(mode: str) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model after two steps, and the check that compares it with its state before."""
    trainer = tiny_trainer(mode=mode)
    guard = ParameterGuard(trainer.model)
    take_steps(trainer, random_examples(), range(2))
    return trainer.model, lambda: guard.check(trainer.model)


@pytest.mark.parametrize("mode", ["full", "last-1", "head", "classifier"])
def test_steps_as_they_should_be_pass(mode: str) -> None:
    _, check = guarded(mode)

    check()


def test_change_of_one_frozen_number_is_noticed() -> None:
    model, check = guarded("head")

    with torch.no_grad():
        weight = model.get_parameter(LAYER)
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))

    with pytest.raises(FinetuneError, match=rf"frozen but changed.*{LAYER}"):
        check()


class SkipsOddLayouts(torch.optim.AdamW):
    """Fails silently on tensors that are not contiguous, as MPS once did (pytorch#118115)."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skipped = [
            (parameter, parameter.detach().clone())
            for group in self.param_groups
            for parameter in group["params"]
            if not parameter.is_contiguous()
        ]
        super().step(closure)
        with torch.no_grad():
            for parameter, value in skipped:
                parameter.copy_(value)


def test_optimizer_that_skips_a_parameter_silently_is_noticed() -> None:
    model = tiny_trainer().model
    transposed = model.get_parameter(LAYER)
    transposed.data = transposed.detach().T.contiguous().T
    guard = ParameterGuard(model)
    optimizer = SkipsOddLayouts(model.parameters(), lr=1e-3)

    inputs = random_examples().inputs_of(np.arange(4), 12)
    model(**inputs).logits.sum().backward()
    optimizer.step()

    with pytest.raises(FinetuneError, match=rf"trained but the same.*{LAYER}"):
        guard.check(model)


@pytest.mark.parametrize("gradient", [None, 0.0, 1e-15])
def test_parameter_without_a_gradient_or_with_next_to_none_may_stay(gradient: float | None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    guard = ParameterGuard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model[0](torch.ones(2)).sum().backward()
    for parameter in model[1].parameters():
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()

    guard.check(model)
