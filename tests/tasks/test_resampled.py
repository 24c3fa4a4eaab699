"""Metrics of resamples, against those that each kind computes of the same rows repeated."""

import numpy as np
import pytest
from numpy.typing import NDArray

from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

NAMES = ["a", "b", "c", "d"]
ROWS = 40


def examples(task: Task, random: np.random.Generator) -> tuple[NDArray[np.float32], NDArray]:
    """Return logits and labels; ``d`` never occurs, and numbers have ties."""
    if isinstance(task, Regression):
        labels = random.integers(0, 8, ROWS).astype(np.float32)
        noise = random.integers(-3, 3, ROWS)
        return (labels + noise).astype(np.float32)[:, None], labels
    logits = random.normal(size=(ROWS, 4)).astype(np.float32)
    logits[:, 3] = -9
    if isinstance(task, Single):
        return logits, random.integers(0, 3, ROWS)
    return logits, (random.random((ROWS, 4)) < [0.5, 0.3, 0.1, 0]).astype(np.float32)


@pytest.mark.parametrize(
    "task", [Single(NAMES), Multi(NAMES), Regression(is_folded=True)], ids=lambda task: task.name
)
def test_a_row_that_counts_twice_is_as_good_as_two_rows(task: Task) -> None:
    random = np.random.default_rng(0)
    logits, labels = examples(task, random)
    weights = random.integers(0, 4, size=(3, ROWS))
    found = task.weighted_metrics([*task.predictions(logits, labels)])(weights.astype(np.float64))

    for number, counts in enumerate(weights):
        scores = task.score(logits.repeat(counts, axis=0), labels.repeat(counts, axis=0)).metrics
        own = {name: values[number] for name, values in found.items()}
        assert own == pytest.approx({name: scores[name] for name in own})
    # Probabilities, which a loss and average precision need, are not in the file.
    assert found.keys() == scores.keys() - {"loss", "mean_average_precision"}


def test_resamples_in_which_all_numbers_are_the_same_have_no_correlation() -> None:
    rows = [{"label": 0.1, "predicted": 0.7}, {"label": 0.1, "predicted": 0.2}]
    found = Regression().weighted_metrics(rows)(np.array([[1.0, 1.0], [3.0, 0.0]]))
    assert found["pearson"].tolist() == found["spearman"].tolist() == [0, 0]
    assert found["mae"] == pytest.approx([0.35, 0.6])
