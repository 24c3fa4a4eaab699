import numpy as np
import pytest

from finetune.evaluation.calibration import (
    coverage_curve,
    measure_reliability,
    threshold_for_precision,
)


def test_probabilities_that_are_right_have_almost_no_calibration_error():
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.3, 1, 100_000)
    is_right = rng.uniform(size=100_000) < confidences

    found = measure_reliability(confidences, is_right)
    assert found.ece < 0.01
    assert sum(one.count for one in found.bins) == len(confidences)
    assert all(one.lower <= one.confidence <= one.upper for one in found.bins)
    assert measure_reliability(np.minimum(1, confidences + 0.1), is_right).ece > 0.08


def test_rows_of_one_confidence_are_accepted_together():
    curve = coverage_curve(
        np.array([0.5, 0.9, 0.5, 0.7], np.float32), np.array([False, True, True, True])
    )

    assert curve.confidences == pytest.approx([0.9, 0.7, 0.5])
    assert curve.coverages.tolist() == [0.25, 0.5, 1]
    assert curve.accuracies.tolist() == [1, 1, 0.75]


def test_predictions_from_the_threshold_on_have_the_precision():
    confidences = np.repeat([0.9, 0.8, 0.7], [30, 30, 30])
    is_right = np.append(np.ones(60, bool), np.arange(30) % 2 == 0)

    assert threshold_for_precision(confidences, is_right, precision=0.95) == 0.8
    assert threshold_for_precision(confidences, is_right, precision=0.5) == 0.7
    assert threshold_for_precision(confidences, is_right, precision=0.999) is None
    assert threshold_for_precision(confidences[:18], is_right[:18], precision=0.95) is None
    assert threshold_for_precision(confidences[:0], is_right[:0], precision=0.95) is None


@pytest.mark.parametrize("rows", [60, 150, 500])
def test_other_rows_have_the_precision_that_validation_rows_were_asked_for(rows):
    """Were the precision itself the target, a half of the draws would miss it."""
    rng = np.random.default_rng(0)

    def true_precision() -> float:
        confidences = rng.beta(5, 1, rows)
        lowest = threshold_for_precision(
            confidences, rng.uniform(size=rows) < confidences, precision=0.9
        )
        # The mean of Beta(5, 1) above a value.
        return 1 if lowest is None else 5 / 6 * (1 - lowest**6) / (1 - lowest**5)

    precisions = np.array([true_precision() for _ in range(300)])

    assert np.mean(precisions >= 0.9) > 0.75
    assert np.mean(precisions >= 0.88) > 0.9
