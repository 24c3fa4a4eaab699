import numpy as np
import pytest
from numpy.typing import NDArray

from finetune.evaluation.statistics import (
    Interval,
    bootstrap,
    mcnemar_p_value,
    mean_interval,
    paired_differences,
)
from finetune.tasks.metrics import WeightedMetrics


def accuracy_of(is_right: NDArray[np.bool_]) -> WeightedMetrics:
    return lambda weights: {"accuracy": weights @ is_right / weights.sum(axis=1)}


def difference_of(
    first: NDArray[np.bool_], second: NDArray[np.bool_], *, resamples: int
) -> Interval:
    drawn = bootstrap([accuracy_of(first), accuracy_of(second)], rows=len(first),
                      resamples=resamples)  # fmt: skip
    found = {"accuracy": float(second.mean() - first.mean())}
    return paired_differences(drawn[1], drawn[0], differences=found)["accuracy"]


def test_the_interval_contains_the_true_difference_in_about_95_of_100_samples() -> None:
    random, hits, widths = np.random.default_rng(1), 0, []
    for _ in range(300):
        # Two models that mostly err on the same rows: 80 % and 85 % right.
        first = random.random(250) < 0.8
        second = np.where(first, random.random(250) < 0.95, random.random(250) < 0.45)
        found = difference_of(first, second, resamples=300)
        hits += found.low <= 0.05 <= found.high
        widths.append(found.high - found.low)
    assert 0.91 < hits / 300 < 0.98
    # Unpaired, by the variances of both, it would be 0.132.
    assert np.mean(widths) == pytest.approx(0.09, abs=0.01)


@pytest.mark.parametrize(
    ("first_only", "second_only", "p_value"),
    # Of 9 coins, at most 1 falls on one side with a probability of 2 · (1 + 9) / 512.
    [(1, 8, 20 / 512), (8, 1, 20 / 512), (0, 5, 2 / 32), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_mcnemars_test_is_that_of_coins(first_only: int, second_only: int, p_value: float) -> None:
    assert mcnemar_p_value(first_only, second_only) == pytest.approx(p_value)


def test_the_interval_of_a_mean_is_students() -> None:
    # Quantile 4.3027 of two degrees of freedom, from a table; standard error 1 / sqrt(3).
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2
    assert (found.low, found.high) == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-4)
