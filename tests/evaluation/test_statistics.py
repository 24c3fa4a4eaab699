import numpy as np
import pytest

from finetune.evaluation.statistics import (
    mcnemar_p_value,
    mean_interval,
    measure_reliability,
    threshold_for_precision,
)


@pytest.mark.parametrize(
    ("first_only", "second_only", "p_value"),
    # At most 1 of 9 fair coins shows the rarer side with probability 2 · (1 + 9) / 512.
    [(1, 8, 20 / 512), (8, 1, 20 / 512), (0, 5, 2 / 32), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_mcnemar_p_value_matches_binomial(
    first_only: int, second_only: int, p_value: float
) -> None:
    assert mcnemar_p_value(first_only, second_only) == pytest.approx(p_value)


def test_mean_interval_matches_the_t_distribution() -> None:
    # The t quantile for two degrees of freedom is 4.3027, and the standard error 1 / sqrt(3).
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2
    assert (found.low, found.high) == pytest.approx((2 - 2.4842, 2 + 2.4842), abs=1e-4)


def test_calibrated_probabilities_have_almost_zero_calibration_error() -> None:
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.3, 1, 100_000)
    is_right = rng.uniform(size=100_000) < confidences
    found = measure_reliability(confidences, is_right)
    assert found.ece < 0.01
    assert sum(found.rows) == len(confidences)
    assert list(found.confidence) == sorted(found.confidence)
    assert measure_reliability(np.minimum(1, confidences + 0.1), is_right).ece > 0.08


def test_predictions_above_the_threshold_reach_the_precision() -> None:
    confidences = np.repeat([0.9, 0.8, 0.7], [30, 30, 30])
    is_right = np.append(np.ones(60, bool), np.arange(30) % 2 == 0)
    assert threshold_for_precision(confidences, is_right, precision=0.95) == 0.8
    assert threshold_for_precision(confidences, is_right, precision=0.5) == 0.7
    assert threshold_for_precision(confidences, is_right, precision=0.999) is None
    assert threshold_for_precision(confidences[:18], is_right[:18], precision=0.95) is None
    assert threshold_for_precision(confidences[:0], is_right[:0], precision=0.95) is None


@pytest.mark.parametrize("rows", [60, 150, 500])
def test_target_precision_holds_on_unseen_rows(rows: int) -> None:
    """Without the margin, half of the draws would miss the target."""
    rng = np.random.default_rng(0)

    def true_precision() -> float:
        confidences = rng.beta(5, 1, rows)
        lowest = threshold_for_precision(
            confidences, rng.uniform(size=rows) < confidences, precision=0.9
        )
        # The mean of Beta(5, 1) above the threshold.
        return 1 if lowest is None else 5 / 6 * (1 - lowest**6) / (1 - lowest**5)

    precisions = np.array([true_precision() for _ in range(300)])

    assert np.mean(precisions >= 0.9) > 0.75
    assert np.mean(precisions >= 0.88) > 0.9
