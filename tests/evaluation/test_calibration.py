import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.evaluation.calibration import Reliability, coverage_curve, measure_reliability


def test_probabilities_that_are_right_have_almost_no_calibration_error():
    rng = np.random.default_rng(0)
    confidences = rng.uniform(0.3, 1, 100_000)
    is_right = rng.uniform(size=100_000) < confidences

    assert measure_reliability(confidences, is_right).ece < 0.01
    assert measure_reliability(np.minimum(1, confidences + 0.1), is_right).ece > 0.08


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1))
def test_every_row_is_in_the_bin_of_its_confidence(rows):
    confidences, is_right = (np.array(column) for column in zip(*rows, strict=True))

    found = measure_reliability(confidences, is_right)

    assert found.samples == len(rows)
    assert 0 <= found.ece <= 1
    for one in found.bins:
        assert one.lower - 1e-9 <= one.confidence <= one.upper + 1e-9
    assert sum(one.accuracy * one.count for one in found.bins) == pytest.approx(is_right.sum())


def test_a_reliability_is_read_back_from_json():
    found = measure_reliability(np.array([0.0, 0.5, 1.0]), np.array([True, False, True]))

    assert Reliability.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_rows_of_one_confidence_are_answered_together():
    curve = coverage_curve(
        np.array([0.5, 0.9, 0.5, 0.7], np.float32), np.array([False, True, True, True])
    )

    assert curve.confidences == pytest.approx([0.9, 0.7, 0.5])
    assert curve.coverages.tolist() == [0.25, 0.5, 1]
    assert curve.accuracies.tolist() == [1, 1, 0.75]
