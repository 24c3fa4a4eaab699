"""The comparison of a device with the CPU, with planted faults."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_faults import (
    ATTENTION,
    Fault,
    SkipsOddLayouts,
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
from finetune.training.checks import Difference, check_device, compare_with_cpu
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
    state.batch_size.examples = 4
    check_device(state, EXAMPLES, step=step)


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
def test_planted_fault_is_detected(
    function: Callable[..., Any], faulty: Callable[..., Any], part: str, precision: str
) -> None:
    state = lively(tiny_trainer(device=AnyShapes(), precision=precision, learning_rate=1e-5))
    take_steps(state, EXAMPLES, range(2))
    check(state)
    plant(state, Fault(function, faulty))

    with pytest.raises(FinetuneError) as found:
        check(state, step=2)

    assert found.value.message.startswith("other differs from the CPU after step 2: ")
    assert part in found.value.message
    assert found.value.remedy.startswith("start again with --overwrite --device cpu")


@pytest.mark.parametrize(
    ("precision", "mode"),
    [("fp32", "full"), ("bf16", "full"), ("fp16", "last-1"), ("fp32", "head")],
)
def test_check_passes_on_a_healthy_device_and_keeps_the_training_state(
    precision: str, mode: str
) -> None:
    def train(*, is_checked: bool) -> tuple[list[float], list[torch.Tensor]]:
        state, losses = tiny_trainer(device=OtherDevice(), precision=precision, mode=mode), []
        for number in range(4):
            if is_checked:
                check(state, step=number)
                assert all(parameter.grad is None for parameter in state.model.parameters())
                set_training(state.model)
            losses += take_steps(state, EXAMPLES, [number])
        moments = [values["exp_avg_sq"] for values in state.optimizer.state.values()]
        random = [*state.device.random_state().values()]
        return losses, [*copied_parameters(state.model).values(), *moments, *random]

    torch.manual_seed(0)
    losses, tensors = train(is_checked=True)
    torch.manual_seed(0)
    other_losses, others = train(is_checked=False)
    assert losses == other_losses
    assert all(map(torch.equal, tensors, others))


def test_run_continues_without_a_check_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checks, "_compute", run_out)
    emitted: list[events.Event] = []
    state = tiny_trainer(device=OtherDevice())
    with sent_to(emitted.append):
        check(state)
    [warning] = emitted
    assert isinstance(warning, events.WarningMessage)
    assert warning.message.startswith("other is not compared with the CPU")


@pytest.mark.parametrize(("precision", "differing", "is_fault"), [
    ("fp32", 1, True), ("bf16", 2, False), ("bf16", 3, True),
])  # fmt: skip
def test_difference_in_16_bits_must_occur_on_other_examples_too(
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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_that_skips_a_parameter_is_detected(precision: str, steps: int) -> None:
    state = tiny_trainer(device=AnyShapes(), precision=precision)
    transposed = state.model.get_parameter(LAYER)
    transposed.data = transposed.detach().T.contiguous().T
    state.optimizer = SkipsOddLayouts(state.optimizer.param_groups)
    take_steps(state, EXAMPLES, range(steps))
    with pytest.raises(FinetuneError, match=rf"changes \({LAYER}\) off by 100.00%"):
        check(state)


@pytest.mark.parametrize("gradient", [0.0, 1e-30, 1e-15])
def test_parameter_with_a_tiny_gradient_can_stay_unchanged(gradient: float) -> None:
    state = tiny_trainer(device=AnyShapes(), weight_decay=0.01)
    for name in (LAYER, "bert.embeddings.LayerNorm.weight"):
        state.model.get_parameter(name).register_hook(lambda grad: grad.sign() * gradient)
    found = compare_with_cpu(state, EXAMPLES, [(4, 8)])
    changes = {each.tensor: each.error for each in found if each.part == "changes"}
    assert LAYER in changes
    assert max(changes.values()) < 1e-4
