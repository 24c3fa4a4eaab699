import numpy as np
import pytest

from finetune.evaluation.evaluate import evaluate_logits
from finetune.evaluation.metrics import compute_metrics

NAMES = ["ABBR", "DESC", "ENTY"]
LOGITS = np.array([[2, 1, 0], [0, 0, 3], [1, 4, 1], [0, 5, 0]], np.float32)
LABELS = np.array([0, 2, 1, 0])


def test_likeliest_class_is_the_prediction() -> None:
    metrics = evaluate_logits(LOGITS, LABELS, class_names=NAMES)

    expected = compute_metrics(
        predictions=np.array([0, 2, 1, 1]), references=LABELS, class_names=NAMES
    )
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["accuracy"] == 0.75


def test_loss_is_the_mean_over_the_rows_of_minus_log_probability() -> None:
    metrics = evaluate_logits(LOGITS, LABELS, class_names=NAMES)

    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    of_true_class = probabilities[np.arange(4), LABELS]
    assert metrics["loss"] == pytest.approx(-np.log(of_true_class).mean(), rel=1e-6)


def test_figures_do_not_depend_on_the_order_of_the_rows() -> None:
    order = np.array([2, 0, 3, 1])

    shuffled = evaluate_logits(LOGITS[order], LABELS[order], class_names=NAMES)

    expected = evaluate_logits(LOGITS, LABELS, class_names=NAMES)
    assert shuffled.pop("loss") == pytest.approx(expected.pop("loss"))
    assert shuffled == expected
