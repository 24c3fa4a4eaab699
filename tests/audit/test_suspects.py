"""Labels that may be wrong, found from numbers alone."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from finetune.audit.heads import predict_out_of_fold
from finetune.audit.suspects import estimate_wrong, nearest_rows, rank_suspects
from finetune.tasks.single import Single
from finetune.training.linear_head import LabelledFeatures

TASK = Single(["a", "b", "c"])
ROWS = 600


def exchange(true: NDArray[np.int64], *, share: float) -> NDArray[np.int64]:
    labels = true.copy()
    chosen = np.random.default_rng(1).permutation(len(true))[: round(share * len(true))]
    labels[chosen] = (true[chosen] + 1) % 3
    return labels


def make_rows(labels: NDArray[np.int64], true: NDArray[np.int64]) -> LabelledFeatures:
    generator = np.random.default_rng(0)
    features = (2.5 * np.eye(3)[true] + generator.normal(size=(len(true), 3))).astype(np.float32)
    weights = np.ones(len(true), np.float32)
    return LabelledFeatures(features, labels, weights, TASK.losses, 3, labels)


def predict(share: float) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    true = np.arange(ROWS) % 3
    labels = exchange(true, share=share)
    tokens = csr_matrix(np.ones((ROWS, 1), np.float32))
    logits = predict_out_of_fold(make_rows(labels, true), tokens, np.arange(ROWS), folds=5)
    return logits, labels, true


def test_exchanged_labels_come_first() -> None:
    logits, labels, true = predict(0.05)
    order, losses = rank_suspects(TASK, logits, labels)
    wrong = np.flatnonzero(labels != true)
    assert np.isin(order[: len(wrong)], wrong).mean() > 0.7
    assert (np.diff(losses[order]) <= 0).all()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1])
def test_the_interval_holds_how_many_were_exchanged(share: float) -> None:
    logits, labels, _ = predict(share)
    found = estimate_wrong(torch.from_numpy(logits).softmax(dim=1).numpy(), labels)
    assert found is not None
    assert found.low <= share * ROWS <= found.high
    assert abs(found.value - share * ROWS) < 0.03 * ROWS


def test_the_only_row_of_a_class_is_no_suspect() -> None:
    logits = np.zeros((5, 3), np.float32)
    order, _ = rank_suspects(TASK, logits, np.array([0, 0, 1, 1, 2]))
    assert sorted(order.tolist()) == [0, 1, 2, 3]


def test_the_nearest_rows_carry_the_class_and_are_others() -> None:
    features = np.array([[0, 1], [0, 2], [1, 0.2], [1, 0], [1, 0.1]], np.float32)
    labels = np.array([0, 0, 1, 1, 1])
    [near] = nearest_rows(features, labels, np.array([2]), np.array([1]))
    assert near == [4, 3]
