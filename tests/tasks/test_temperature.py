import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.single import Single

NAMES = ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]


def draw_rows(rows: int, *, temperature: float) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return labels, and logits whose probabilities are correct at a temperature."""
    generator = np.random.default_rng(0)
    logits = 2 * generator.normal(size=(rows, 6))
    logits[np.arange(rows), generator.integers(6, size=rows)] += 6
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return (temperature * logits).astype(np.float32), labels


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_temperature_that_calibrates_is_found(temperature: float) -> None:
    rows = draw_rows(20_000, temperature=temperature)
    single = Single(NAMES).calibrate(lambda: rows, fits_temperature=True)
    assert single.temperature == pytest.approx(temperature, rel=0.03)

    right = np.random.default_rng(1).normal(size=(20_000, 2)).astype(np.float32)
    drawn = np.random.default_rng(2).logistic(size=right.shape)
    yes_or_no = (temperature * right, (right + drawn > 0).astype(np.float32))
    multi = Multi(NAMES[:2]).calibrate(lambda: yes_or_no, fits_temperature=True)
    assert multi.temperature == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize(
    "task", [Single(NAMES, temperature=1.7), Multi(NAMES, temperature=1.7)], ids=["single", "multi"]
)
def test_scaling_changes_no_prediction_and_is_undone(task: Task) -> None:
    inputs = torch.randn(2_000, 16, generator=torch.Generator().manual_seed(0))
    layer = torch.nn.Linear(16, 6)
    parameters, weight = list(layer.parameters()), layer.weight.detach().clone()

    def logits() -> NDArray[np.float32]:
        return layer(inputs).detach().numpy()

    first, before = logits(), task.read_logits(logits()).predicted
    scaled = task.scale_output_layer(parameters)
    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    assert (scaled.read_logits(logits()).predicted == before).all()

    # A saved model that predicts, and a saved model that is trained further.
    scaled.unscale_output_layer(parameters, saved=scaled.parameters)
    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    type(task)(NAMES).unscale_output_layer(parameters, saved=scaled.parameters)
    assert torch.allclose(layer.weight, weight, rtol=1e-6)
