from itertools import product

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_model
from tiny_training import (
    FewShapesDevice,
    device_with_cuda_shapes,
    random_examples,
    take_steps,
    tiny_trainer,
)
from torch import nn

from finetune.devices.base import BatchSize, Device
from finetune.devices.cpu import CpuDevice
from finetune.errors import LossNotFiniteError
from finetune.evaluation.predict import Predictor
from finetune.model.structure import find_structure
from finetune.tokenization.examples import Examples, choose_padded_lengths

ROWS = 23


def predict(
    model: nn.Module, examples: Examples, *, batch_size: int = 5, device: Device | None = None
) -> np.ndarray:
    device = device or CpuDevice()
    padded_lengths = choose_padded_lengths(examples.lengths, device.shapes)
    predictor = Predictor(model, device, "fp32", BatchSize(batch_size, "batch size", device))
    return predictor.logits(examples, padded_lengths=padded_lengths)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_batched_logits_match_single_row_logits(architecture: str) -> None:
    model = tiny_model(architecture).eval()
    takes_4d_mask = find_structure(model).takes_4d_mask
    examples = random_examples(ROWS, takes_4d_mask=takes_4d_mask)
    alone = [
        model(**examples.inputs_of(np.array([row]), int(examples.lengths[row]))).logits
        for row in range(ROWS)
    ]
    expected = torch.cat(alone).detach().numpy()
    assert np.ptp(expected, axis=0).max() > 1e-3

    for device, batch_size in product((CpuDevice(), FewShapesDevice()), (5, 64)):
        logits = predict(model, examples, batch_size=batch_size, device=device)
        assert logits.shape == (ROWS, 6)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "batch_size", "rows", "sizes"),
    [
        (FewShapesDevice(), 5, ROWS, [5] * 5),
        (FewShapesDevice(min_examples=2), 1, 3, [2, 2, 2]),
        # Evaluation doesn't capture graphs, so a single text is not padded to two.
        (device_with_cuda_shapes(), 64, 1, [1]),
        (device_with_cuda_shapes(), 5, ROWS, [5] * 4 + [3]),
        (CpuDevice(), 64, 1, [1]),
    ],
)
def test_forward_passes_have_batch_sizes_that_the_device_supports(
    device: Device, batch_size: int, rows: int, sizes: list[int]
) -> None:
    model = tiny_model()
    found: list[int] = []
    model.register_forward_hook(lambda _, __, output: found.append(len(output.logits)))
    logits = predict(model, random_examples(rows), batch_size=batch_size, device=device)
    assert found == sizes
    assert logits.shape == (rows, 6)


def test_prediction_between_steps_does_not_change_training() -> None:
    examples = random_examples(ROWS)
    losses = []
    for predicts in (False, True):
        trainer = tiny_trainer(precision="bf16")  # autocast keeps copies of weights
        first = take_steps(trainer, examples, [0])
        if predicts:
            predict(trainer.model, examples)
            trainer.model.train()
        losses.append(first + take_steps(trainer, examples, [1, 2]))
    assert losses[0] == losses[1]


def test_nonfinite_logits_raise_an_error() -> None:
    model = tiny_model()
    torch.nn.init.constant_(model.classifier.bias, torch.inf)
    with pytest.raises(LossNotFiniteError, match="NaN or infinite"):
        predict(model, random_examples(ROWS))
