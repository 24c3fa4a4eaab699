"""The comparison with the CPU, with faults planted in a device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import (
    ATTENTION,
    Fault,
    flip_input_gradients,
    flip_norm_gradients,
    flip_short,
    ignore_mask,
    lose_last_text,
    plant,
    zero_last_row,
)
from tiny_training import OtherDevice, copied_parameters, random_examples, take_steps, tiny_trainer
from torch import nn

from finetune import events
from finetune.devices.base import BatchShapes
from finetune.errors import FinetuneError
from finetune.events import sent_to
from finetune.model.structure import set_training
from finetune.training import checks
from finetune.training.checks import Difference, ParameterGuard, check_device
from finetune.training.trainer import Trainer

EXAMPLES = random_examples(23)


class AnyShapes(OtherDevice):
    """A device that accepts texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = BatchShapes()


def check(state: Trainer, *, step: int = 0) -> None:
    lengths = sorted({state.device.shapes.padded_length(length) for length in (8, 12)})
    state.plan = replace(state.plan, padded_lengths=lengths)
    state.batch_size.examples, state.progress.steps = 4, step
    check_device(state, EXAMPLES)


def lively(state: Trainer) -> Trainer:
    """Make attention affect the result, unlike in a newly initialized BERT."""
    with torch.no_grad():
        for parameter in state.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(9)
            elif not parameter.any():
                parameter.add_(0.1)
    return state


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("function", "faulty", "part"),
    [
        (nn.functional.linear, zero_last_row, "logits"),
        (nn.functional.linear, flip_input_gradients, "gradients"),
        (nn.functional.layer_norm, flip_norm_gradients, "(bert.embeddings.LayerNorm.weight)"),
        (ATTENTION, ignore_mask, "logits"),
        (ATTENTION, flip_short, "logits (4 x 8 tokens)"),
        (ATTENTION, lose_last_text, "NaN"),
    ],
)
def test_a_fault_is_found(
    function: Callable[..., Any], faulty: Callable[..., Any], part: str, precision: str
) -> None:
    state = lively(tiny_trainer(device=AnyShapes(), precision=precision, peak=1e-5))
    take_steps(state, EXAMPLES, range(2))
    check(state)
    plant(state, Fault(function, faulty))

    with pytest.raises(FinetuneError) as found:
        check(state, step=2)

    assert found.value.message.startswith("other differs from the CPU after step 2: ")
    assert part in found.value.message
    assert found.value.remedy.startswith("start again with --overwrite --device cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_check_finds_nothing_on_a_healthy_device_and_changes_nothing(precision: str) -> None:
    def train(*, is_checked: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        state, losses = tiny_trainer(device=OtherDevice(), precision=precision), []
        for number in range(4):
            losses += take_steps(state, EXAMPLES, [number])
            if is_checked:
                check(state, step=number)
                set_training(state.model)
        return losses, copied_parameters(state.model)

    torch.manual_seed(0)
    losses, parameters = train(is_checked=True)
    torch.manual_seed(0)
    other_losses, others = train(is_checked=False)
    assert losses == other_losses
    assert all(torch.equal(one, others[name]) for name, one in parameters.items())


def test_a_run_continues_unchecked_where_memory_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checks, "_compute", run_out)
    emitted: list[events.Event] = []
    state = tiny_trainer(device=OtherDevice())
    with sent_to(emitted.append):
        check(state)
    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert warning.message.startswith("no comparison of other with the CPU")


@pytest.mark.parametrize(("precision", "differing", "is_fault"), [
    ("fp32", 1, True), ("bf16", 2, False), ("bf16", 3, True),
])  # fmt: skip
def test_in_16_bits_a_difference_counts_if_other_examples_show_it_too(
    precision: str, differing: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Difference("gradients", "classifier.bias", error=0.12, tolerance=0.1)
    found = iter([[off]] * differing)
    monkeypatch.setattr(checks, "compare_with_cpu", lambda *_, **__: next(found, []))
    state = tiny_trainer(device=OtherDevice(), precision=precision)
    if is_fault:
        with pytest.raises(FinetuneError, match="off by 12"):
            check(state)
    else:
        check(state)


LAYER = "bert.encoder.layer.1.output.dense.weight"


def test_change_of_one_frozen_number_is_noticed() -> None:
    trainer = tiny_trainer(mode="head")
    model, guard = trainer.model, ParameterGuard(trainer.model)
    take_steps(trainer, random_examples(), range(2))
    guard.check(model)

    with torch.no_grad():
        weight = model.get_parameter(LAYER)
        weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))

    with pytest.raises(FinetuneError, match=rf"frozen but changed.*{LAYER}"):
        guard.check(model)


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


def test_change_at_the_end_of_a_large_parameter_is_noticed() -> None:
    model = nn.Embedding(2**22 + 1, 1).requires_grad_(False)
    guard = ParameterGuard(model)
    with torch.no_grad():
        model.weight[-1] += 1
    with pytest.raises(FinetuneError, match="frozen but changed"):
        guard.check(model)
