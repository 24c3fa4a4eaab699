import numpy as np
import pytest
import torch

from finetune.config.schema import TrainingConfig
from finetune.tasks.scores import ClassScores, Scores
from finetune.tasks.single import Single

NAMES = ["ABBR", "DESC", "ENTY", "HUM"]


def score(predicted: np.ndarray, true: np.ndarray) -> Scores:
    """Score logits that predict these classes."""
    return Single(NAMES).score(np.eye(4, dtype=np.float32)[predicted], true)


def test_metrics_match_a_manual_calculation() -> None:
    scores = score(np.array([0, 1, 1, 2]), np.array([0, 1, 2, 2]))

    assert scores.accuracy == 0.75
    # HUM doesn't occur, so the mean is over three classes.
    assert scores.macro_f1 == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    assert scores.per_class == {
        "ABBR": ClassScores(1.0, 1.0, 1.0, 1),
        "DESC": ClassScores(0.5, 1.0, pytest.approx(2 / 3), 1),
        "ENTY": ClassScores(1.0, 0.5, pytest.approx(2 / 3), 2),
        "HUM": ClassScores(None, None, None, 0),
    }
    assert scores.confusion_matrix == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert (scores.samples, scores.baseline_accuracy) == (4, 0.5)
    assert Scores.from_json(scores.to_json()) == scores


def test_classes_without_rows_or_predictions_have_empty_metrics() -> None:
    scores = score(np.array([1, 1, 3]), np.array([0, 1, 1]))
    assert scores.table
    cells = {row[0]: [*row[1:3], *row[4:]] for row in scores.table.rows}
    assert cells["ABBR"] == ["–", "0.0%", "0.0%", "1"]
    assert cells["ENTY"] == cells["HUM"] == ["–", "–", "–", "0"]  # one of them was predicted
    assert scores.table.note == "Untested, because none of these rows has the label: ENTY, HUM."
    assert scores.to_json()["per_class"]["HUM"] == {
        "precision": None, "recall": None, "f1": None, "support": 0
    }  # fmt: skip
    assert scores == Scores.from_json(scores.to_json())
    whole = score(np.arange(4), np.arange(4))
    assert whole.table
    assert whole.table.note == ""


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (6, "(95% CI 31–83%), no better than the majority-class baseline (`DESC`, 70%)."),
        (8, "than the majority-class baseline (`DESC`, 70%): 10 rows are too few to tell."),
        (10, "Accuracy 100% on 10 test rows (95% CI 72–100%), above the majority-class "),
    ],
)
def test_model_is_described_relative_to_the_majority_class(right: int, words: str) -> None:
    true = np.array([1] * 7 + [0] * 3)
    scores = score(np.where(np.arange(10) < right, true, 3), true)
    assert words in scores.describe()
    assert scores.is_better == (right == 10)


def test_training_loss_is_smoothed_or_focal_but_reported_loss_is_plain() -> None:
    logits = torch.tensor([[2.0, 0.0], [-1.0, 1.0], [0.0, 60.0]], requires_grad=True)
    labels = torch.tensor([0, 0, 1])
    plain = Single(["a", "b"])
    right = logits.detach().double().softmax(1).gather(1, labels[:, None])[:, 0]
    focal = plain.with_loss(labels.numpy(), TrainingConfig(loss="focal", focal_gamma=0.5))
    expected = -((1 - right) ** 0.5) * right.log()
    losses = focal.losses(logits, labels)
    assert losses.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    losses.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    smooth = plain.with_loss(labels.numpy(), TrainingConfig(label_smoothing=0.2))
    log = logits.detach().log_softmax(1)
    expected = -0.9 * log[0, 0] - 0.1 * log[0, 1]
    assert smooth.losses(logits, labels)[0].item() == pytest.approx(expected.item())
    arrays = logits.detach().numpy(), labels.numpy()
    for task in (focal, smooth):
        assert task.score(*arrays).loss == plain.score(*arrays).loss
