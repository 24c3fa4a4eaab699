import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY_SIZE
from tiny_training import FewShapesDevice, random_examples, tiny_training_state

from finetune import events
from finetune.devices.base import Device
from finetune.devices.batch_size import BatchSize
from finetune.devices.cpu import CpuDevice, CpuMemory
from finetune.errors import FinetuneError, LossNotFiniteError
from finetune.tokenization.buckets import Batch, choose_padded_lengths, plan_epoch
from finetune.tokenization.examples import Examples
from finetune.training.loop import LoopSettings, is_over, train
from finetune.training.snapshot import Progress
from finetune.training.step import TrainingState

ROWS = 23
BATCH = 4
STEPS_PER_EPOCH = 6


@dataclass
class Diary:
    """What a run did between its steps, in its order, each with the steps done before it.

    Args:
        scores: What the validations will say; empty if there is no validation split.
        stop_after: Step after which the user asks to stop.
    """

    scores: Sequence[float] = ()
    stop_after: int | None = None
    progress: Progress = field(default_factory=Progress)
    entries: list[tuple[str, int]] = field(default_factory=list)
    emitted: list[events.Event] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.entries.append((what, self.progress.steps))

    def times(self, what: str) -> list[int]:
        return [steps for entry, steps in self.entries if entry == what]

    def reports(self) -> list[events.Step]:
        return [event for event in self.emitted if isinstance(event, events.Step)]

    def should_stop(self) -> bool:
        return self.stop_after is not None and self.progress.steps >= self.stop_after

    def settings(self, examples: Examples, **options: Any) -> LoopSettings:
        def validate() -> tuple[float, dict[str, float]]:
            score = self.scores[len(self.times("validate"))]
            self.note("validate")
            return score, {"accuracy": score, "loss": 1.0}

        settings: dict[str, Any] = {
            "batch_size": BatchSize(BATCH, "batch size", CpuDevice()),
            "steps_per_epoch": STEPS_PER_EPOCH,
            "logging_steps": 2,
            "patience": 0,
            "plan_epoch": plan_of(examples),
            "validate": validate if self.scores else None,
            "save_best": lambda progress: self.note("best"),
            "saves": "no",
            "save_steps": 500,
            "check_device": lambda: self.note("check"),
            "save_progress": lambda progress, writes: self.note("progress" if writes else "held"),
            "is_save_due": lambda: True,
            "should_stop": self.should_stop,
        }
        return LoopSettings(**{**settings, **options})


def plan_of(examples: Examples) -> Callable[[int], list[Batch]]:
    return lambda epoch: plan_epoch(
        examples.lengths,
        effective_batch_size=BATCH,
        padded_lengths=range(1, 17),
        seed=0,
        epoch=epoch,
    )


def run(
    diary: Diary, training_state: TrainingState, examples: Examples | None = None, **options: Any
) -> None:
    """Train for as long as the schedule says; options change the diary's settings."""
    examples = examples or random_examples(ROWS)
    with events.sent_to(diary.emitted.append):
        train(training_state, examples, diary.progress, diary.settings(examples, **options))


def test_rows_come_in_the_order_of_the_plan() -> None:
    examples = random_examples(ROWS)
    seen: list[int] = []

    def inputs_of(rows: np.ndarray, padded_length: int) -> dict[str, torch.Tensor]:
        seen.extend(rows.tolist())
        return examples.inputs_of(rows, padded_length)

    run(Diary(), tiny_training_state(total_steps=9), replace(examples, inputs_of=inputs_of))

    plan = plan_of(examples)
    planned = np.concatenate([batch.indices for batch in [*plan(0), *plan(1)[:3]]])
    assert seen == planned.tolist()


def test_report_tells_the_state_of_the_run() -> None:
    single, diary = Diary(), Diary()
    run(single, tiny_training_state(peak=1e-3, total_steps=12), logging_steps=1)
    losses = [report.loss for report in single.reports()]

    run(diary, tiny_training_state(peak=1e-3, total_steps=12), logging_steps=3)

    first, second, _, last = diary.reports()
    assert (first.step, first.total_steps, first.epoch) == (3, 12, 0.5)
    assert first.loss == pytest.approx(np.mean(losses[:3]))
    assert second.loss == pytest.approx(np.mean(losses[3:6]))
    assert second.learning_rate == pytest.approx(0.7e-3)
    assert second.memory_bytes > 0
    assert second.reserved_bytes > 0
    assert second.remaining_seconds > 0
    assert last.remaining_seconds == 0
    assert diary.progress.loss_sum == pytest.approx(sum(losses))


def test_speed_and_time_are_of_training_without_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    now_seconds = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_seconds)
    examples = random_examples(ROWS)

    def inputs_of(rows: np.ndarray, padded_length: int) -> dict[str, torch.Tensor]:
        nonlocal now_seconds
        now_seconds += 0.5
        return examples.inputs_of(rows, padded_length)

    def validate() -> tuple[float, dict[str, float]]:
        nonlocal now_seconds
        now_seconds += 100.0
        return 0.5, {"loss": 1.0}

    diary = Diary()
    slow = replace(examples, inputs_of=inputs_of)
    run(diary, tiny_training_state(total_steps=12), slow, validate=validate, logging_steps=3)

    seconds_of_3_steps = 1.5
    assert [report.examples_per_second for report in diary.reports()] == [
        rows / seconds_of_3_steps for rows in rows_of_reports(examples, steps=3)
    ]
    assert [report.remaining_seconds for report in diary.reports()] == [4.5, 3.0, 1.5, 0.0]


def rows_of_reports(examples: Examples, *, steps: int) -> list[int]:
    """Return the rows of two epochs' reports, each over so many steps."""
    plan = plan_of(examples)
    sizes = [len(batch.indices) for epoch in (0, 1) for batch in plan(epoch)]
    return [sum(sizes[start : start + steps]) for start in range(0, len(sizes), steps)]


def test_best_model_is_kept_and_later_ones_that_are_no_better_are_not() -> None:
    diary = Diary(scores=[0.5, 0.7, 0.7, 0.6, 0.8])

    run(diary, tiny_training_state(total_steps=30))

    assert diary.times("best") == [6, 12, 30]
    assert diary.progress.best_score == 0.8
    assert diary.progress.best_step == 30
    validations = [event for event in diary.emitted if isinstance(event, events.Validation)]
    assert [one.is_best for one in validations] == [True, True, False, False, True]
    assert [one.step for one in validations] == [6, 12, 18, 24, 30]
    assert [one.epoch for one in validations] == [1, 2, 3, 4, 5]
    assert [one.metrics["accuracy"] for one in validations] == diary.scores


def test_training_stops_when_the_model_no_longer_improves() -> None:
    diary = Diary(scores=[0.5, 0.4, 0.6, 0.6, 0.5, 0.9])

    run(diary, tiny_training_state(total_steps=60), patience=2)

    assert diary.progress.steps == 30
    assert diary.times("best") == [6, 18]
    stopped = "stopped: 2 validations without improvement; kept epoch 3"
    assert diary.emitted[-1] == events.Info(stopped)
    assert is_over(diary.progress, total_steps=60, patience=2)
    assert not is_over(diary.progress, total_steps=60, patience=3)
    assert not is_over(diary.progress, total_steps=60, patience=0)


@pytest.mark.parametrize(
    ("saves", "saved", "held"),
    [
        ("epoch", [6, 12], [14]),
        ("steps", [7], [14]),
        ("time", [4, 6, 8, 12], [14]),
        ("no", [], [14]),
    ],
)
def test_progress_is_kept_when_the_strategy_says(
    saves: str, saved: list[int], held: list[int]
) -> None:
    diary = Diary(scores=[0.5, 0.4, 0.6])

    run(diary, tiny_training_state(total_steps=14), saves=saves, save_steps=7, logging_steps=4)

    # At the end not before the validation, which a run that is resumed there would leave out.
    assert (diary.times("progress"), diary.times("held")) == (saved, held)
    # After the validation, whose outcome belongs to it.
    if saves == "epoch":
        assert [what for what, _ in diary.entries[1:4]] == ["validate", "best", "progress"]


@pytest.mark.parametrize(
    ("stop_after", "steps_before", "checked"), [(None, 0, [0, 12]), (8, 0, [0]), (None, 12, [12])]
)
def test_device_is_checked_before_the_first_step_and_after_the_last(
    stop_after: int | None, steps_before: int, checked: list[int]
) -> None:
    diary = Diary(stop_after=stop_after, progress=Progress(steps=steps_before))

    run(diary, tiny_training_state(total_steps=12))

    assert diary.times("check") == checked


def test_request_to_stop_saves_progress_and_returns() -> None:
    diary = Diary(scores=[0.5], stop_after=8)

    run(diary, tiny_training_state(total_steps=30), logging_steps=5)

    assert diary.progress.steps == 8
    assert diary.times("progress") == [8]
    assert [report.step for report in diary.reports()] == [5, 6, 8]


@pytest.mark.parametrize("calls", [1, 2, 3, 7, 8, 9, 14, 15, 16, 20])
def test_run_that_stops_early_has_saved_its_progress_whenever_the_signal_came(calls: int) -> None:
    diary = Diary()
    answers = iter([False] * (calls - 1))

    run(diary, tiny_training_state(total_steps=12), should_stop=lambda: next(answers, True))

    if diary.progress.steps < 12:
        assert diary.times("progress")[-1:] == [diary.progress.steps]


def test_validation_finds_no_gradients_in_memory() -> None:
    training_state = tiny_training_state(total_steps=6)
    gradients: list[Any] = []

    def validate() -> tuple[float, dict[str, float]]:
        gradients.extend(one.grad for one in training_state.model.parameters())
        return 0.5, {"loss": 1.0}

    run(Diary(), training_state, validate=validate)

    assert set(gradients) == {None}


@pytest.mark.parametrize("logging_steps", [1, 4, 100])
def test_loss_that_is_not_a_number_is_told_with_its_step_and_examples(logging_steps: int) -> None:
    examples = random_examples(ROWS)
    training_state = tiny_training_state(total_steps=12)
    poison = VOCABULARY_SIZE - 1
    with torch.no_grad():
        training_state.model.get_parameter("bert.embeddings.word_embeddings.weight")[poison] = (
            np.inf
        )
    [*_, odd, _] = plan_of(examples)(0)
    odd_row = int(odd.indices[1])

    def inputs_of(rows: np.ndarray, padded_length: int) -> dict[str, torch.Tensor]:
        inputs = examples.inputs_of(rows, padded_length)
        inputs["input_ids"][rows == odd_row, 0] = poison
        return inputs

    with pytest.raises(LossNotFiniteError, match=r"the loss is nan at step 5\n") as caught:
        run(
            Diary(),
            training_state,
            replace(examples, inputs_of=inputs_of),
            logging_steps=logging_steps,
        )

    assert caught.value.examples == odd.indices.tolist()


def test_model_that_became_not_a_number_in_its_last_step_is_not_kept() -> None:
    """The loss of a step is that of the model before it."""
    diary = Diary()
    training_state = tiny_training_state(total_steps=6)
    weight = training_state.model.get_parameter("classifier.weight")
    weight.register_hook(lambda gradient: gradient * (np.inf if diary.progress.steps == 5 else 1))

    with pytest.raises(LossNotFiniteError):
        run(
            diary,
            training_state,
            validate=lambda: (weight.sum().item(), {"loss": weight.sum().item()}),
        )

    assert diary.times("best") == []


def test_model_that_does_not_train_is_noticed_at_the_first_report() -> None:
    class DoesNothing(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            pass

    training_state = tiny_training_state()
    optimizer = DoesNothing(training_state.optimizer.param_groups)

    with pytest.raises(FinetuneError):
        run(Diary(), replace(training_state, optimizer=optimizer))


def test_a_resumed_run_that_has_learned_all_its_rows_goes_on() -> None:
    training_state = tiny_training_state()
    diary = Diary(progress=Progress(steps=9))
    training_state.optimizer.step = lambda: None  # type: ignore[method-assign, misc]
    run(diary, training_state)
    assert diary.progress.steps == 12


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_steps_too_small_for_the_numbers_they_change_are_no_fault(logging_steps: int) -> None:
    # Norms begin at 1.0, where the next number is 6e-8 away. A warm-up of 1,000 steps to 2e-5
    # begins so, and so ends any long run, whose last steps may be all that is left after a stop.
    run(Diary(), tiny_training_state(peak=2e-8, total_steps=6), logging_steps=logging_steps)


def test_a_cache_that_exceeds_its_limit_is_emptied_at_each_report() -> None:
    class FullCache(CpuMemory):
        releases = 0

        def cache_exceeds_limit(self) -> bool:
            return True

        def release(self) -> None:
            self.releases += 1

    device, diary = CpuDevice(), Diary()
    memory = device.memory = FullCache()

    run(diary, tiny_training_state(device=device, total_steps=6))

    assert memory.releases == len(diary.reports()) > 1


@pytest.mark.parametrize("device", [CpuDevice(), FewShapesDevice()], ids=["any", "few shapes"])
def test_widest_batch_comes_first_where_memory_is_kept_by_shape(device: Device) -> None:
    training_state = tiny_training_state(device=device, total_steps=12)
    padded_lengths: list[int] = []
    training_state.model.register_forward_pre_hook(
        lambda _, __, inputs: padded_lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    examples = random_examples(ROWS, longest_tokens=48)

    def plan(epoch: int) -> list[Batch]:
        return plan_epoch(
            examples.lengths,
            effective_batch_size=BATCH,
            padded_lengths=choose_padded_lengths(examples.lengths, device.shapes),
            seed=4,
            epoch=epoch,
        )

    run(Diary(), training_state, examples, plan_epoch=plan)

    planned = [[batch.padded_length for batch in plan(epoch)] for epoch in (0, 1)]
    assert planned[0][0] < max(planned[0])
    if device.shapes.pads_batches:
        longest = max(planned[0])
        assert padded_lengths[0] == padded_lengths[STEPS_PER_EPOCH] == longest
        assert sorted(padded_lengths) == sorted(planned[0] + planned[1])
    else:
        assert padded_lengths == planned[0] + planned[1]
