from pathlib import Path

import pytest
import torch
from tiny_training import copied_parameters, random_examples, take_steps, tiny_trainer

from finetune.runs.checkpoint import read_checkpoint, write_checkpoint
from finetune.training.snapshot import Progress, capture_state, restore_state
from finetune.training.trainer import Trainer


def save(folder: Path, trainer: Trainer, progress: Progress) -> None:
    trainer.progress = progress
    tensors, state = capture_state(trainer)
    write_checkpoint(folder, tensors=tensors, state=state)


@pytest.mark.parametrize(("mode", "precision"), [("full", "bf16"), ("last-1", "fp32")])
def test_interrupted_training_goes_on_bit_for_bit(
    tmp_path: Path, mode: str, precision: str
) -> None:
    examples = random_examples(6)
    whole = tiny_trainer(mode=mode, precision=precision)
    expected_losses = take_steps(whole, examples, range(6))

    first = tiny_trainer(mode=mode, precision=precision)
    losses = take_steps(first, examples, range(3))
    save(tmp_path / "checkpoint", first, Progress(steps=3))
    second = tiny_trainer(mode=mode, precision=precision)
    torch.manual_seed(99)
    restore_state(second, *read_checkpoint(tmp_path / "checkpoint"))
    losses += take_steps(second, examples, range(second.progress.steps, 6))

    assert losses == expected_losses
    expected = copied_parameters(whole.model)
    for name, parameter in copied_parameters(second.model).items():
        assert torch.equal(parameter, expected[name])


def test_a_falling_loss_is_an_improvement_where_the_score_stands_still() -> None:
    progress = Progress()
    progress.note_validation(score=0.5, loss=1.0)
    progress.note_validation(score=0.5, loss=1.0)

    progress.note_validation(score=0.6, loss=1.5)
    assert not progress.note_validation(score=0.5, loss=0.9)
    assert progress.validations_since_best == 0
    progress.note_validation(score=0.5, loss=0.95)
    assert progress.validations_since_best == 1
