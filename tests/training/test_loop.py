"""The order of steps, validations and checkpoints in the training loop, and when it stops."""

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY_SIZE
from tiny_training import random_examples, tiny_trainer

from finetune import events
from finetune.devices.base import BatchSize
from finetune.devices.cpu import CpuDevice
from finetune.errors import LossNotFiniteError
from finetune.events import sent_to
from finetune.tasks.metrics import SINGLE
from finetune.tokenization.examples import Examples
from finetune.training import loop
from finetune.training.interruption import Stopped
from finetune.training.loop import Progress, TrainingLoop
from finetune.training.snapshot import StateUnusableError, load_trained_tensors

ROWS, BATCH, STEPS_PER_EPOCH = 23, 4, 6
PLAN: dict[str, Any] = {
    "examples_per_step": BATCH,
    "steps_per_epoch": STEPS_PER_EPOCH,
    "padded_lengths": range(1, 17),
    "logging_steps": 2,
    "metric_for_best_model": "accuracy",
}


@dataclass
class Diary:
    """Records the steps at which checkpoints and validations happen.

    Validations return ``scores``. Without scores, there is only a training split. A signal is sent
    at ``stop_at``, an event and its step.
    """

    scores: Sequence[float] = ()
    stop_at: tuple[str, int] | None = None
    entries: list[tuple[str, int]] = field(default_factory=list)
    emitted: list[events.Event] = field(default_factory=list)

    def note(self, what: str, trainer: TrainingLoop) -> None:
        self.entries.append((what, trainer.progress.steps))
        if self.entries[-1] == self.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def times(self, what: str) -> list[int]:
        return [steps for entry, steps in self.entries if entry == what]

    def reports(self) -> list[events.Step]:
        return [event for event in self.emitted if isinstance(event, events.Step)]

    def is_due(self) -> bool:
        return True

    def save_best(self, trainer: TrainingLoop) -> None:
        self.note("best", trainer)

    def save(self, trainer: TrainingLoop) -> None:
        self.note("save", trainer)

    def run(self, trainer: TrainingLoop, examples: Examples | None = None) -> Progress:
        """Train to the end, or until the signal."""
        trainer.batch_size, trainer.checkpoints = BatchSize(BATCH, "batch size", CpuDevice()), self
        train = examples or random_examples(ROWS)
        trainer.examples = {"train": train} | ({"validation": train} if self.scores else {})
        scores, step = iter(self.scores), trainer.step

        def score(*_: Any) -> Any:
            self.note("validate", trainer)
            return SimpleNamespace(metrics={"accuracy": next(scores), "loss": 1.0})

        def noted_step(number: int, cut: Any) -> torch.Tensor:
            self.note("step", trainer)
            return step(number, cut)

        trainer.task = SimpleNamespace(score=score, problem_type=SINGLE)  # type: ignore[assignment]
        trainer.predict = lambda split: ()  # type: ignore[assignment, method-assign, return-value]
        trainer.step = noted_step  # type: ignore[method-assign]
        with sent_to(self.emitted.append), suppress(Stopped):
            trainer.train()
        return trainer.progress


def trainer_of(**options: Any) -> TrainingLoop:
    return tiny_trainer(**PLAN | options)


def test_best_model_is_kept_unless_a_later_model_is_better() -> None:
    diary = Diary(scores=[0.5, 0.7, 0.7, 0.6, 0.8])
    progress = diary.run(trainer_of(total_steps=30))

    assert diary.times("best") == [6, 12, 30]
    assert (progress.best_score, progress.best_step) == (0.8, 30)
    validations = [event for event in diary.emitted if isinstance(event, events.Validation)]
    assert [(each.is_best, each.step, each.epoch) for each in validations] == [
        (True, 6, 1), (True, 12, 2), (False, 18, 3), (False, 24, 4), (True, 30, 5)
    ]  # fmt: skip
    assert [each.metrics["accuracy"] for each in validations] == diary.scores


def test_training_stops_when_the_model_stops_improving() -> None:
    diary = Diary(scores=[0.5, 0.4, 0.6, 0.6, 0.5, 0.9])
    progress = diary.run(trainer_of(total_steps=60, early_stopping_patience=2))

    assert progress.steps == 30
    assert diary.times("best") == [6, 18]
    stopped = "stopped: 2 validations without improvement; kept epoch 3"
    assert events.Info(stopped) in diary.emitted


@pytest.mark.parametrize(
    ("strategy", "saved"), [("epoch", [6, 12]), ("steps", [7]), ("time", [4, 6, 8, 12]), ("no", [])]
)
def test_checkpoints_follow_the_save_strategy(strategy: str, saved: list[int]) -> None:
    diary = Diary(scores=[0.5, 0.4, 0.6])
    diary.run(trainer_of(total_steps=14, save_strategy=strategy, save_steps=7, logging_steps=4))
    # If a checkpoint at the end preceded the validation, a resumed run would skip the validation.
    assert diary.times("save") == saved
    if strategy == "epoch":
        entries = [what for what, _ in diary.entries if what != "step"]
        assert entries[:3] == ["validate", "best", "save"]


@pytest.mark.parametrize(
    ("stop_at", "steps_before", "checked"),
    [(None, 0, [0, 12]), (("step", 7), 0, [0]), (None, 12, [12])],
)
def test_device_is_checked_before_the_first_and_after_the_last_step(
    stop_at: Any, steps_before: int, checked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, trainer = Diary(stop_at=stop_at), trainer_of(checks_device=True)
    monkeypatch.setattr(
        loop, "check_device", lambda trainer, *_, **__: diary.note("check", trainer)
    )
    trainer.progress = Progress(steps=steps_before)
    diary.run(trainer)
    assert diary.times("check") == checked


@pytest.mark.parametrize(
    ("stop_at", "strategy", "steps"),
    [(("step", 0), "no", 1), (("step", 7), "no", 8), (("step", 5), "no", 6),
     (("validate", 6), "no", 6), (("best", 6), "no", 6), (("save", 8), "steps", 9),
     (("save", 6), "epoch", 7)],
)  # fmt: skip
def test_signal_stops_training_with_a_checkpoint_after_the_step(
    stop_at: tuple[str, int], strategy: str, steps: int
) -> None:
    diary = Diary(scores=[0.5, 0.6], stop_at=stop_at)
    progress = diary.run(
        trainer_of(total_steps=30, logging_steps=5, save_strategy=strategy, save_steps=4)
    )
    assert progress.steps == diary.times("save")[-1] == diary.reports()[-1].step == steps


@pytest.mark.parametrize("logging_steps", [1, 4, 100])
def test_nan_loss_is_reported_with_its_step_and_examples(logging_steps: int) -> None:
    examples, trainer = random_examples(ROWS), trainer_of(logging_steps=logging_steps)
    poison = VOCABULARY_SIZE - 1
    with torch.no_grad():
        trainer.model.get_parameter("bert.embeddings.word_embeddings.weight")[poison] = np.inf
    [*_, batch, _] = trainer.plan.batches(examples, epoch=0)

    def inputs_of(rows: np.ndarray, padded_length: int) -> dict[str, torch.Tensor]:
        inputs = examples.inputs_of(rows, padded_length)
        inputs["input_ids"][rows == batch.indices[1], 0] = poison
        return inputs

    with pytest.raises(LossNotFiniteError, match=r"the loss is nan at step 5\n") as caught:
        Diary().run(trainer, replace(examples, inputs_of=inputs_of))
    assert caught.value.examples == batch.indices.tolist()


def test_model_broken_by_the_last_step_is_not_kept() -> None:
    """The loss of a step is computed before the update. Validations run without gradients."""
    gradients = list[Any]()
    trainer = trainer_of()
    weight = trainer.model.get_parameter("classifier.weight")
    weight.register_hook(
        lambda gradient: gradient * (np.inf if trainer.progress.steps == 11 else 1)
    )

    class Watching(Diary):
        def note(self, what: str, trainer: TrainingLoop) -> None:
            super().note(what, trainer)
            if what == "validate":
                gradients.extend(each.grad for each in trainer.model.parameters())

    diary = Watching(scores=[0.5, 0.6])
    with pytest.raises(LossNotFiniteError):
        diary.run(trainer)
    assert (diary.times("best"), set(gradients)) == ([6], {None})


def test_falling_loss_is_an_improvement_if_the_score_is_constant() -> None:
    progress = Progress()
    progress.note_validation(score=0.5, loss=1.0)
    progress.note_validation(score=0.5, loss=1.0)

    progress.note_validation(score=0.6, loss=1.5)
    assert not progress.note_validation(score=0.5, loss=0.9)
    assert progress.validations_since_best == 0
    progress.note_validation(score=0.5, loss=0.95)
    assert progress.validations_since_best == 1


def test_parameters_of_a_different_model_are_rejected() -> None:
    with pytest.raises(StateUnusableError, match="another model"):
        load_trained_tensors(tiny_trainer(), {"weight": torch.zeros(1)})


def test_reason_is_reported_if_steps_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer()
    monkeypatch.setattr(CpuDevice, "captures", True)
    assert trainer.cuda_graph_error is None
    monkeypatch.setattr(trainer.model, "gradient_checkpointing", True, raising=False)
    assert trainer.cuda_graph_error == "gradient checkpointing repeats random numbers"
