import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from tiny_training import CLASSES

from finetune.training.class_weights import balanced_class_weights, example_weights

labels_of_examples = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=60).map(np.array)


@given(labels=labels_of_examples)
def test_balanced_weights_are_those_of_scikit_learn(labels: np.ndarray) -> None:
    present = np.unique(labels)

    weights = balanced_class_weights(labels, classes=CLASSES)

    expected = compute_class_weight("balanced", classes=present, y=labels)
    np.testing.assert_allclose(weights[present], expected, rtol=1e-6)
    assert not np.delete(weights, present).any()
    assert weights.dtype == np.float32


@given(labels=labels_of_examples)
def test_balanced_weights_leave_the_mean_weight_of_an_example_at_1(labels: np.ndarray) -> None:
    weights = example_weights(labels, classes=CLASSES, is_balanced=True)

    assert weights.mean() == pytest.approx(1.0, rel=1e-5)


def test_examples_weigh_as_their_class_or_all_the_same() -> None:
    labels = np.array([2, 0, 2, 2])

    balanced = example_weights(labels, classes=3, is_balanced=True)
    assert balanced.tolist() == pytest.approx([2 / 3, 2.0, 2 / 3, 2 / 3])
    assert example_weights(labels, classes=3, is_balanced=False).tolist() == [1.0] * 4
