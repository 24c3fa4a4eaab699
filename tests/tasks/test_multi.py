"""Multi-label classification, without a model."""

import json
from dataclasses import replace

import numpy as np
import pyarrow
import pytest
import torch

from finetune.config.schema import TrainingConfig
from finetune.errors import DataError
from finetune.tasks.multi import MAX_POSITIVE_WEIGHT, Multi, find_thresholds
from finetune.tasks.scores import Scores

LABELS = np.array([[1, 0], [0, 0], [0, 1], [0, 1]], np.float32)
BALANCED = TrainingConfig(class_weights="balanced")


def test_labels_missing_in_training_are_listed_per_row() -> None:
    rows = pyarrow.chunked_array(
        [pyarrow.array([["a", "x"], [], ["y", "b", "z"]]), pyarrow.array([["b"], ["x"]])]
    )
    training = pyarrow.chunked_array([pyarrow.array([["a"], ["b", "a"]])])
    unknown = Multi(["a", "b"]).find_unknown(rows, training=training)
    assert unknown.to_pylist() == ["x", None, "y, z", None, "x"]


@pytest.mark.parametrize(
    "lists",
    [
        ["[0, 1, 0]", "[0, 0, 0]", "[1.0, 1, 0]"],
        ["[0, 1]", "[1, 0]", ""],
        ["[3, 1, 0]", "[0, 5, 0]", "[1, 1, 1]"],
        ["[0.67, 0.33, 0]", "[0, 0.5, 0.5]"],
        ["[-1, 1, 1]", "[1, -1, -1]"],
    ],
)
def test_indicator_lists_are_rejected(lists: list[str]) -> None:
    with pytest.raises(DataError, match="lists of numbers"):
        Multi.parse([pyarrow.chunked_array([lists])])


def test_lists_of_class_numbers_are_parsed() -> None:
    for lists in (["[0, 1]", "[]", "[1]"], ["[0, 3]", "[1, 2]"], ["[0, 1]", "[0, 1]"]):
        [labels] = Multi.parse([pyarrow.chunked_array([lists])])
        assert [json.loads(text) for text in lists] == [
            [*map(int, row)] for row in labels.to_pylist()
        ]


def test_classes_without_rows_are_reported_as_untested() -> None:
    scores = Multi(["a", "b"]).score(np.array([[2.0, 2.0]], np.float32), np.float32([[1, 0]]))
    assert scores.table
    assert scores.table.rows[1] == ["b", "0.50", "–", "–", "–", "–", "–", "0"]
    assert "b." in scores.table.note
    assert scores.to_json()["per_class"]["b"]["average_precision"] is None
    assert Scores.from_json(scores.to_json()) == scores


def test_balanced_weights_equalize_positive_and_negative_rows() -> None:
    task = Multi(["a", "b"]).with_loss(LABELS, BALANCED)
    assert task.class_weights == (3.0, 1.0)
    logits, labels = torch.zeros(4, 2), torch.tensor(LABELS)
    logits.requires_grad_()
    task.losses(logits, labels).sum().backward()
    # At probability 0.5, the gradients of positive and negative rows cancel.
    assert logits.grad is not None
    assert logits.grad.sum(dim=0).tolist() == pytest.approx([0, 0])
    one_row = Multi(["a"]).with_loss(np.eye(1000, 1), BALANCED)
    assert one_row.class_weights == (MAX_POSITIVE_WEIGHT,)
    plain = Multi(["a", "b"]).with_loss(LABELS, TrainingConfig())
    assert plain.losses(torch.zeros(4, 2), labels).tolist() == pytest.approx([np.log(2)] * 4)


@pytest.mark.parametrize("is_balanced", [False, True])
def test_label_smoothing_and_focal_loss_are_class_weighted(is_balanced: bool) -> None:
    plain = Multi(["a", "b"])
    logits, labels = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, 0.0]])
    options, weight = (BALANCED, 3.0) if is_balanced else (TrainingConfig(), 1.0)
    right, left = np.log1p(np.exp([-1.0, -2.0])), np.log1p(np.exp([1.0, 2.0]))
    smooth = plain.with_loss(LABELS, replace(options, label_smoothing=0.2))
    expected = (0.9 * right + 0.1 * left) * [weight, 1]
    assert smooth.losses(logits, labels).item() == pytest.approx(expected.mean())
    focal = plain.with_loss(LABELS, replace(options, loss="focal"))
    expected = (1 - np.exp(-right)) ** 2 * right * [weight, 1]
    assert focal.losses(logits, labels).item() == pytest.approx(expected.mean())
    plain_losses = plain.losses(logits, labels)
    assert torch.equal(focal.plain_losses(logits, labels), plain_losses)
    assert torch.equal(smooth.plain_losses(logits, labels), plain_losses)


@pytest.mark.parametrize("shift", [-1.5, 0.0])
def test_thresholds_improve_f1_on_unseen_rows_and_keep_rare_classes(shift: float) -> None:
    random = np.random.default_rng(0)
    shares = np.array([0.01, 0.02, 0.04, 0.1, 0.3])
    distances = np.array([1.0, 2.0, 1.5, 2.0, 1.5])

    def draw(rows: int) -> tuple[np.ndarray, np.ndarray]:
        true = random.random((rows, 5)) < shares
        seen = random.normal(size=(rows, 5)) + distances * true
        logits = distances * seen - distances**2 / 2 + np.log(shares / (1 - shares)) + shift
        return (1 / (1 + np.exp(-logits))).astype(np.float32), true

    def f1(thresholds: np.ndarray | float) -> np.ndarray:
        predicted = others >= thresholds
        right, both = (predicted & labels).sum(axis=0), predicted.sum(axis=0) + labels.sum(axis=0)
        return 2 * right / both

    others, labels = draw(20_000)
    gains = [f1(find_thresholds(*draw(200))) - f1(0.5) for _ in range(20)]
    assert (np.mean(gains, axis=0) > 0).all()
    assert (np.min(gains, axis=0)[:3] > -0.03).all()
