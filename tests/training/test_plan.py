"""Training plans, and supervised contrastive training."""

import numpy as np
import pytest
import torch
from tiny_training import (
    FewShapesDevice,
    copied_parameters,
    random_examples,
    take_steps,
    tiny_plan,
    tiny_trainer,
)

from finetune.devices.cpu import CpuDevice
from finetune.tokenization.examples import Examples
from finetune.training.plan import (
    TEXTS_PER_STEP,
    TrainingMethod,
    bypass_output_layer,
    contrastive_losses,
    count_steps,
    draw_texts,
    interpolate,
)


def test_contrastive_loss_is_low_for_well_separated_classes() -> None:
    apart = torch.tensor([[3.0, 0, 0], [3.0, 0.1, 0], [0, 3.0, 0], [0.1, 3.0, 0]])
    labels = torch.tensor([0, 0, 1, 1])

    good = contrastive_losses(apart, labels, torch.ones(4))
    bad = contrastive_losses(apart, torch.tensor([0, 1, 0, 1]), torch.ones(4))

    assert good.shape == (4,)
    assert good.max() < 0.1 < 5 < bad.min()


@pytest.mark.parametrize("rows", [10, 11, 13, 15, 16])
@pytest.mark.parametrize("only_head", [False, True])
def test_padding_rows_do_not_change_a_contrastive_step(rows: int, only_head: bool) -> None:
    steps = []
    for device in (CpuDevice(), FewShapesDevice()):
        method = TrainingMethod(fits_head=True, is_contrastive=True)
        mode = "head" if only_head else "full"
        state = tiny_trainer(device=device, mode=mode, dropout=0, method=method)
        with bypass_output_layer(state.model, "classifier"):
            losses = take_steps(state, random_examples(rows), range(3), batch_size=16)
        steps.append((losses, copied_parameters(state.model)))
    (losses, parameters), (filled_losses, filled_parameters) = steps
    assert filled_losses == pytest.approx(losses, rel=1e-4)
    for name, values in parameters.items():
        torch.testing.assert_close(filled_parameters[name], values, rtol=0, atol=2e-4)


def test_plan_exposes_only_options_of_its_configuration() -> None:
    plan = tiny_plan(total_steps=1, seed=7)
    assert plan.seed == plan.config.training.seed == 7
    with pytest.raises(AttributeError, match="peak"):
        _ = plan.peak


def test_contrastive_steps_are_balanced_and_grouped_by_length() -> None:
    classes = np.repeat(np.arange(6), [1, 2, 5, 50, 500, 3])
    lengths = np.arange(len(classes)) % 16 + 1

    examples = Examples(lambda *_: {}, lengths, classes, np.ones(len(classes), np.float32))
    method = TrainingMethod(fits_head=True, is_contrastive=True)
    plan = tiny_plan(total_steps=50, method=method, seed=1, padded_lengths=[8, 16])

    batches = plan.batches(examples, epoch=0)

    assert len(batches) == 50
    for batch in batches:
        assert np.bincount(classes[batch.indices]).tolist() == [10] * 6
        assert [examples for examples, _ in batch.parts] == [15] * 4
        padded = np.repeat([tokens for _, tokens in batch.parts], 15)
        assert (lengths[batch.indices] <= padded).all()
        assert batch.parts[-1][1] == 8


def test_large_tables_get_more_contrastive_steps() -> None:
    assert [count_steps(rows) for rows in (10, 3_200, 1_000_000)] == [50, 100, 200]


def test_rows_of_large_classes_are_drawn_without_repetition() -> None:
    classes = np.arange(400) % 4
    batch = draw_texts(classes, np.full(400, 8), np.random.default_rng(0), has_parts=False)
    assert len(np.unique(batch.indices)) == TEXTS_PER_STEP


@pytest.mark.parametrize(("accuracy", "share"), [(0.0, 1.0), (0.5, 0.75), (1.0, 0.5)])
def test_encoder_that_already_separates_the_classes_changes_less(
    accuracy: float, share: float
) -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    interpolate(model, {"weight": torch.zeros(2, 2)}, frozen_accuracy=accuracy)
    assert (model.weight == share).all()
