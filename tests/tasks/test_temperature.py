"""A number that logits are divided by, fitted on validation rows."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from finetune.events import Event, Info, ignore
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.single import Single
from finetune.tasks.temperature import MIN_MISTAKES, MIN_ROWS, fit_temperature

NAMES = ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]
Rows = tuple[NDArray[np.float32], NDArray[np.int64]]


def draw_rows(rows: int, *, margin: float, temperature: float, seed: int) -> Rows:
    """Return logits whose probabilities are right at a temperature, and labels."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.normal(size=(rows, 6))
    logits[np.arange(rows), generator.integers(6, size=rows)] += 2 * margin
    labels = (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)
    return (temperature * logits).astype(np.float32), labels


def mean_loss(task: Task, rows: Rows, *, temperature: float) -> float:
    logits, labels = rows
    return float(task.losses(torch.tensor(logits / temperature), torch.tensor(labels)).mean())


@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_the_temperature_that_makes_probabilities_right_is_found(temperature: float) -> None:
    rows = draw_rows(20_000, margin=3, temperature=temperature, seed=0)

    single = Single(NAMES).calibrate(lambda: rows, fits_temperature=True, emit=ignore)

    assert single.temperature == pytest.approx(temperature, rel=0.03)
    right = np.random.default_rng(1).normal(size=(20_000, 2)).astype(np.float32)
    drawn = np.random.default_rng(2).logistic(size=right.shape)
    yes_or_no = (temperature * right, (right + drawn > 0).astype(np.float32))
    multi = Multi(NAMES[:2]).calibrate(lambda: yes_or_no, fits_temperature=True, emit=ignore)
    assert multi.temperature == pytest.approx(temperature, rel=0.03)


@pytest.mark.parametrize("margin", [3.5, 5.0])
def test_as_few_rows_as_are_taken_do_little_harm_and_more_good(margin: float) -> None:
    task = Single(NAMES)

    def mean_gain(temperature: float) -> float:
        population = draw_rows(20_000, margin=margin, temperature=temperature, seed=0)
        before = mean_loss(task, population, temperature=1)
        gains = []
        for seed in range(40):
            rows = draw_rows(MIN_ROWS, margin=margin, temperature=temperature, seed=1 + seed)
            tuned = task.calibrate(lambda rows=rows: rows, fits_temperature=True, emit=ignore)
            gains.append(before - mean_loss(task, population, temperature=tuned.temperature))
        return float(np.mean(gains))

    # A model that was calibrated loses about 1 / 2n a row, one that was not gains more.
    assert mean_gain(1.0) > -2 / (2 * MIN_ROWS)
    assert mean_gain(1.6) > -0.001
    assert margin == 5 or mean_gain(1.6) > 0.02


@pytest.mark.parametrize(
    ("rows", "wrong"), [(MIN_ROWS - 1, MIN_ROWS - 1), (MIN_ROWS, MIN_MISTAKES - 1)]
)
def test_with_too_few_rows_or_wrong_answers_there_is_no_temperature(rows: int, wrong: int) -> None:
    emitted: list[Event] = []
    logits, labels = draw_rows(rows, margin=3, temperature=2, seed=0)

    found = fit_temperature(
        Single(NAMES).losses, logits, labels, mistakes=wrong, emit=emitted.append
    )

    assert found == 1
    [event] = emitted
    assert isinstance(event, Info)
    assert event.message.endswith(f"there are {rows} and {wrong}")


@pytest.mark.parametrize(
    "task",
    [
        Single(NAMES, temperature=1.7),
        Multi(NAMES, [0.3, 0.5, 0.99, 0.001, 0.5, 0.7], temperature=1.7),
    ],
    ids=["single", "multi"],
)
def test_the_temperature_changes_no_answer_and_is_undone(task: Task) -> None:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(2_000, 16, generator=random)
    layer = torch.nn.Linear(16, 6)
    parameters, weight = list(layer.parameters()), layer.weight.detach().clone()

    def logits() -> NDArray[np.float32]:
        return layer(inputs).detach().numpy()

    labels: NDArray[np.generic] = np.zeros((2_000, 6), np.float32)
    if isinstance(task, Single):
        labels = np.zeros(2_000, np.int64)
    before = [row["predicted"] for row in task.prediction_rows(logits(), labels)]
    first = logits()

    scaled = task.scale_output_layer(parameters)

    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    assert [row["predicted"] for row in scaled.prediction_rows(logits(), labels)] == before
    scaled.unscale_output_layer(parameters, saved=scaled.parameters)  # a saved model that is used
    assert logits() == pytest.approx(first / 1.7, abs=1e-5)
    # A saved model that is trained further.
    type(task)(NAMES).unscale_output_layer(parameters, saved=scaled.parameters)
    assert torch.allclose(layer.weight, weight, rtol=1e-6)
