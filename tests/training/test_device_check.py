"""What a run finds of a device that computes wrongly, and what finding it costs.

``CHECKED_UPDATES=N`` in the environment for another number of steps of a healthy device.
"""

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from planted_faults import (
    DroppedBiasOfVectors,
    IgnoredMask,
    LeftOutGaps,
    NotANumber,
    OtherAtEachCall,
    RandomInputGradients,
    WrongNormGradients,
    WrongShortAttention,
    ZeroRows,
    plant,
    plant_in_steps,
)
from tiny_training import OtherDevice, copied_parameters, random_examples, tiny_training_state
from torch.overrides import TorchFunctionMode

from finetune import events
from finetune.devices.base import BatchShapes
from finetune.devices.batch_size import BatchSize
from finetune.devices.select import select_device
from finetune.errors import DeviceDiffers
from finetune.tokenization.buckets import plan_epoch
from finetune.training import loop
from finetune.training.comparison import Comparison, Difference
from finetune.training.device_check import CheckedBatches, DeviceCheck
from finetune.training.loop import LoopSettings, train
from finetune.training.snapshot import Progress
from finetune.training.training_state import TrainingState

ROWS, BATCH, UPDATES_PER_EPOCH = 23, 4, 6


class AnyShapes(OtherDevice):
    """A device with texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = BatchShapes()


@dataclass
class Saved:
    """What a run has saved, and what it has reported."""

    steps: list[int] = field(default_factory=list)
    emitted: list[events.Event] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def losses(self) -> list[float]:
        return [one.loss for one in self.emitted if isinstance(one, events.Step)]


def run(
    training_state: TrainingState,
    saved: Saved,
    *,
    is_checked: bool = True,
    batch_size: int = BATCH,
    logging_steps: int = UPDATES_PER_EPOCH,
    after_step: Callable[[int], None] = lambda number: None,
) -> None:
    """Train a small model, which is saved after every epoch."""
    examples = random_examples(ROWS)
    lengths = sorted({training_state.device.shapes.padded_length(one) for one in (8, 12)})

    def should_stop() -> bool:
        after_step(saved.progress.steps)
        return False

    settings = LoopSettings(
        batch_size=BatchSize(batch_size, "batch size", training_state.device, saved.emitted.append),
        steps_per_epoch=UPDATES_PER_EPOCH,
        logging_steps=logging_steps,
        patience=0,
        plan_epoch=lambda epoch: plan_epoch(
            examples.lengths,
            effective_batch_size=BATCH,
            padded_lengths=lengths,
            seed=0,
            epoch=epoch,
        ),
        validate=None,
        save_best=lambda progress: saved.steps.append(progress.steps),
        save_progress=lambda progress: saved.steps.append(progress.steps),
        saves_each_epoch=True,
        save_every_steps=None,
        save_seconds=0,
        checked_lengths=lengths if is_checked else (),
        should_stop=should_stop,
        emit=saved.emitted.append,
    )
    train(training_state, examples, saved.progress, settings)


@pytest.fixture
def checks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device be checked at every report and before everything that is saved."""
    monkeypatch.setattr(loop, "SHARE_AT_REPORTS", math.inf)
    monkeypatch.setattr(loop, "SHARE_BEFORE_SAVING", math.inf)


def lively(training_state: TrainingState) -> TrainingState:
    """Let attention make a difference, unlike with BERT's first weights."""
    with torch.no_grad():
        for parameter in training_state.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(9)
            elif not parameter.any():
                parameter.add_(0.1)
    return training_state


FAULTS: dict[str, tuple[TorchFunctionMode, str]] = {
    "rows of zeros": (ZeroRows(), "bert.encoder.layer.0.attention.self.query"),
    "other products at each call": (OtherAtEachCall(), "bert.encoder.layer.0.attention.self.query"),
    "gradients of inputs": (RandomInputGradients(), ""),
    "gradients of norms": (WrongNormGradients(), "LayerNorm"),
    "ignored mask": (IgnoredMask(), "bert.encoder.layer.0.attention.self"),
    "attention of few tokens": (WrongShortAttention(), "bert.encoder.layer.0.attention.self"),
    "no number": (NotANumber(), "bert.encoder.layer.0.attention.self"),
}


@pytest.mark.usefixtures("checks_cost_nothing")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_anything_is_saved_after_it(fault: str, precision: str) -> None:
    state = lively(tiny_training_state(device=AnyShapes(), precision=precision, peak=1e-5))
    mode, module = FAULTS[fault]
    saved = Saved()

    def plant_once(steps: int) -> None:
        if steps == UPDATES_PER_EPOCH + 2:
            plant(state, mode)

    with pytest.raises(DeviceDiffers) as found:
        run(state, saved, after_step=plant_once)

    assert set(saved.steps) == {UPDATES_PER_EPOCH}
    assert saved.progress.checked_steps == UPDATES_PER_EPOCH
    assert "other differs from the CPU after step 12: the " in found.value.message
    assert module in found.value.message


def transpose_last_layer(training_state: TrainingState) -> None:
    weight = training_state.model.get_parameter("bert.encoder.layer.2.output.dense.weight")
    weight.data = weight.detach().T.contiguous().T


@pytest.mark.usefixtures("checks_cost_nothing")
def test_a_step_that_does_nothing_to_tensors_with_gaps_is_found_after_the_next_check() -> None:
    state = tiny_training_state(device=AnyShapes())
    transpose_last_layer(state)
    saved = Saved()

    def plant_once(steps: int) -> None:
        if steps == UPDATES_PER_EPOCH + 2:
            plant_in_steps(state, LeftOutGaps())

    with pytest.raises(DeviceDiffers) as found:
        run(state, saved, after_step=plant_once, logging_steps=3)

    assert "the changes of parameters are off" in found.value.message
    assert "first in bert.encoder.layer.2.output.dense;" in found.value.message
    assert saved.progress.steps == 10
    assert set(saved.steps) == {UPDATES_PER_EPOCH}


@pytest.mark.usefixtures("checks_cost_nothing")
def test_a_dropped_bias_of_single_vectors_is_found_where_they_are_what_trains() -> None:
    device = AnyShapes()
    state = lively(tiny_training_state(device=device, mode="head"))
    plant(state, DroppedBiasOfVectors())
    saved = Saved()
    with pytest.raises(DeviceDiffers):
        run(state, saved, batch_size=1)
    assert saved.steps == []


@pytest.mark.usefixtures("checks_cost_nothing")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_check_finds_nothing_in_a_healthy_run_and_changes_nothing(precision: str) -> None:
    def trained(*, is_checked: bool) -> tuple[Saved, dict[str, torch.Tensor]]:
        saved = Saved()
        state = tiny_training_state(device=OtherDevice(), precision=precision, total_steps=18)
        run(state, saved, is_checked=is_checked)
        return saved, copied_parameters(state.model)

    checked, parameters = trained(is_checked=True)
    unchecked, others = trained(is_checked=False)
    assert checked.progress.checked_steps == 18
    assert unchecked.progress.checked_steps is None
    assert checked.losses == unchecked.losses
    assert all(torch.equal(one, others[name]) for name, one in parameters.items())


def test_checks_take_a_hundredth_of_the_time_and_leave_as_much_for_what_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, checks = 0.0, 0

    def compare(comparison: Comparison) -> None:
        nonlocal seconds, checks
        seconds, checks = seconds + 0.5, checks + 1

    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    monkeypatch.setattr(Comparison, "find_difference", compare)
    state, progress = tiny_training_state(device=OtherDevice()), Progress()
    batch_size = BatchSize(BATCH, "batch size", state.device, events.ignore)
    batches = CheckedBatches(random_examples(ROWS), [9, 12], batch_size)
    device_check = DeviceCheck(state, progress, batches, emit=events.ignore)
    for step in range(1, 301):
        seconds, progress.steps = seconds + 1, step
        device_check.check_within(loop.SHARE_AT_REPORTS)
        if step % 60 == 0:
            device_check.check_within(loop.SHARE_BEFORE_SAVING)
            assert progress.checked_steps == step
    assert 0.01 * seconds < 0.5 * checks < 0.02 * seconds


def test_run_goes_on_without_checks_where_memory_does_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(comparison: Comparison) -> None:
        raise MemoryError

    monkeypatch.setattr(Comparison, "find_difference", run_out)
    saved = Saved()
    run(tiny_training_state(device=OtherDevice()), saved)
    [warning] = [one for one in saved.emitted if isinstance(one, events.WarningMessage)]
    assert "memory does not suffice to compare other with the CPU" in warning.message
    assert saved.progress.steps == 12
    assert saved.progress.checked_steps is None


@pytest.mark.parametrize(("precision", "differing", "is_fault"), [
    ("fp32", 1, True), ("bf16", 2, False), ("bf16", 3, True),
])  # fmt: skip
def test_in_16_bits_a_difference_counts_if_other_examples_show_it_too(
    precision: str, differing: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = Difference("the gradients", "", error=0.12, tolerance=0.1)
    found = iter([off] * differing)
    monkeypatch.setattr(Comparison, "find_difference", lambda self: next(found, None))
    state = tiny_training_state(device=OtherDevice(), precision=precision)
    with pytest.raises(DeviceDiffers, match="off by 12") if is_fault else nullcontext():
        run(state, Saved())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_thousands_of_updates_of_a_healthy_device_raise_no_alarm(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SHARE_AT_REPORTS", math.inf)
    found = select_device(name, emit=lambda event: None)
    device = OtherDevice() if found.is_reference else found
    saved = Saved()
    steps = int(os.environ.get("CHECKED_UPDATES", "10000"))
    state = tiny_training_state(device=device, precision=precision, total_steps=steps)
    run(state, saved, logging_steps=20)
    assert saved.progress.checked_steps == steps
    assert saved.losses[-1] < saved.losses[0]
