import os
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight

from finetune.events import Event, WarningMessage
from finetune.tasks.base import warn_unless_better
from finetune.tasks.single import (
    MAX_CLASSES_OF_MATRIX,
    ClassAnswer,
    ClassScores,
    Single,
    SingleScores,
    balanced_class_weights,
)

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)


def score(predicted: np.ndarray, true: np.ndarray) -> SingleScores:
    """Score logits that predict these classes."""
    return Single(NAMES).score(np.eye(4, dtype=np.float32)[predicted], true)


def test_metrics_of_a_small_example_are_those_by_hand() -> None:
    scores = score(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]))

    assert scores.accuracy == 0.75
    # HUM occurs nowhere, so that the mean is over three classes.
    assert scores.macro_f1 == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert scores.per_class == {
        "ABBR": ClassScores(1.0, 1.0, 1.0, 1),
        "DESC": ClassScores(0.5, 1.0, pytest.approx(2 / 3), 1),
        "ENTY": ClassScores(1.0, 0.5, pytest.approx(2 / 3), 2),
        "HUM": ClassScores(0.0, 0.0, 0.0, 0),
    }
    assert scores.confusion_matrix == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert (scores.samples, scores.baseline_accuracy) == (4, 0.5)


def test_loss_is_the_mean_over_the_rows_of_minus_log_probability() -> None:
    logits = np.array([[2, 1, 0, 0], [0, 0, 3, 1], [1, 4, 1, 0]], np.float32)
    labels = np.array([0, 2, 3])

    scores = Single(NAMES).score(logits, labels)

    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log(probabilities[np.arange(3), labels]).mean()
    assert scores.loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_labels_may_be_read_only() -> None:
    labels = np.array([0, 1])
    labels.flags.writeable = False

    assert score(np.array([0, 1]), labels).accuracy == 1


def test_class_that_is_only_predicted_counts_in_macro_f1() -> None:
    assert score(np.array([0, 1]), np.array([0, 0])).macro_f1 == pytest.approx((2 / 3 + 0) / 2)


@settings(max_examples=25)
@given(rows=ROWS)
def test_metrics_agree_with_the_confusion_matrix(rows: list[tuple[int, int]]) -> None:
    scores = score(*np.array(rows).T)

    matrix = np.array(scores.confusion_matrix)
    assert matrix.sum() == len(rows)
    assert scores.accuracy == pytest.approx(matrix.trace() / len(rows))
    occurring = [matrix[i].sum() + matrix[:, i].sum() > 0 for i in range(len(NAMES))]
    f1 = np.array([scores.per_class[name].f1 for name in NAMES])
    assert scores.macro_f1 == pytest.approx(f1[occurring].mean())
    for name, row, column in zip(NAMES, matrix, matrix.T, strict=True):
        of_class = scores.per_class[name]
        right = row[NAMES.index(name)]
        assert of_class.support == row.sum()
        assert of_class.recall == pytest.approx(right / max(row.sum(), 1))
        assert of_class.precision == pytest.approx(right / max(column.sum(), 1))


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        score(np.zeros(0, np.int64), np.zeros(0, np.int64))


def test_metrics_need_neither_network_nor_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError(f"called with {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    cache = Path(os.environ["HF_HOME"])
    before = sorted(cache.rglob("*"))

    score(np.array([0]), np.array([0]))

    assert sorted(cache.rglob("*")) == before


def test_random_numbers_of_others_are_not_disturbed() -> None:
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)

    score(np.array([0]), np.array([0]))

    assert np.random.random() == expected


@pytest.mark.parametrize(
    ("classes", "matrix_rows"),
    [(MAX_CLASSES_OF_MATRIX, MAX_CLASSES_OF_MATRIX), (MAX_CLASSES_OF_MATRIX + 1, 0)],
)
def test_only_few_classes_have_a_confusion_matrix(classes: int, matrix_rows: int) -> None:
    labels = np.arange(classes)
    names = list(map(str, labels))
    scores = Single(names).score(np.eye(classes, dtype=np.float32), labels)
    assert (scores.accuracy, scores.samples) == (1, classes)
    assert len(scores.confusion_matrix) == matrix_rows


@pytest.mark.parametrize(("right", "warns"), [(6, True), (7, True), (8, False)])
def test_a_model_that_does_not_beat_the_largest_class_is_reported(right: int, warns: bool) -> None:
    true = np.array([1] * 7 + [0] * 3)
    predicted = np.where(np.arange(10) < right, true, 3)
    events: list[Event] = []
    warn_unless_better(score(predicted, true), emit=events.append)
    assert len(events) == warns
    for event in events:
        assert isinstance(event, WarningMessage)
        assert f"accuracy {right / 10:.1%}" in event.message
        assert "70.0%" in event.message


def test_each_text_gets_its_most_probable_class_and_its_probability() -> None:
    logits = np.array([[0.0, 1.0, -1.0], [100.0, 0.0, 99.0]], np.float32)

    answers = Single(["a", "b", "c"]).answers(["one", "two"], logits)

    shares = np.exp(logits - logits.max(1, keepdims=True))
    expected = shares.max(1) / shares.sum(1)
    assert answers == [
        ClassAnswer("one", "b", pytest.approx(expected[0], rel=1e-5)),
        ClassAnswer("two", "a", pytest.approx(expected[1], rel=1e-5)),
    ]


CLASSES = 6
labels_of_examples = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=60).map(np.array)


@settings(max_examples=25)
@given(labels=labels_of_examples)
def test_balanced_weights_are_those_of_scikit_learn(labels: np.ndarray) -> None:
    present = np.unique(labels)

    weights = balanced_class_weights(labels, classes=CLASSES)

    expected = compute_class_weight("balanced", classes=present, y=labels)
    np.testing.assert_allclose(weights[present], expected, rtol=1e-6)
    assert not np.delete(weights, present).any()
    assert weights.dtype == np.float32


def test_examples_weigh_as_their_class_or_all_the_same() -> None:
    task, labels = Single(["a", "b", "c"]), np.array([2, 0, 2, 2])

    balanced = task.fitted(labels, is_balanced=True).example_weights(labels)
    assert balanced.tolist() == pytest.approx([2 / 3, 2.0, 2 / 3, 2 / 3])
    assert task.fitted(labels, is_balanced=False).example_weights(labels).tolist() == [1.0] * 4
