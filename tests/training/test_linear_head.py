"""Linear heads fitted on features."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune.training.linear_head import (
    LabeledFeatures,
    cross_validate,
    fit_linear_head,
    fit_with_texts,
    shift_bias,
    spread_labels,
)


def softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of single-label rows."""
    return functional.cross_entropy(logits, labels, reduction="none")


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the squared error of regression rows."""
    return (logits[:, 0] - labels).square()


@pytest.mark.parametrize("c", [1.0, 100.0])
def test_linear_head_matches_scikit_learn(c: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows, *_ = draw_clusters(120, 0, classes=3, hidden=8, noise=1.0)
    rows = replace(rows, features=rows.features + 30)  # far from the origin
    centred = rows.features.astype(float) - rows.features.astype(float).mean(axis=0)
    scale = np.sqrt(np.square(centred).sum(axis=1).mean())
    reference = linear_model.LogisticRegression(C=c, max_iter=10_000, tol=1e-8)
    reference.fit(centred / scale, rows.labels)

    head = fit_linear_head(rows, inverse_regularization=c)

    expected = reference.decision_function(centred / scale)
    logits = head.logits(rows.features)
    np.testing.assert_allclose(
        logits - logits.mean(axis=1, keepdims=True), expected, atol=2e-3 * np.abs(expected).max()
    )


def test_regression_head_matches_ridge_regression() -> None:
    random = np.random.default_rng(1)
    features = random.normal(size=(50, 4)).astype(np.float32)
    labels = (features @ [1.0, -2.0, 0.0, 3.0] + 5).astype(np.float32)
    rows = LabeledFeatures(
        features, labels, np.ones(50, np.float32), squared, 1, np.zeros(50, np.int64)
    )

    head = fit_linear_head(rows, inverse_regularization=1e6)

    np.testing.assert_allclose(head.weight, [[1.0, -2.0, 0.0, 3.0]], atol=1e-2)
    np.testing.assert_allclose(head.bias, [5.0], atol=1e-2)


def test_out_of_fold_logits_come_from_heads_fitted_without_the_row() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(size=(60, 40)).astype(np.float32)
    labels = np.arange(60) % 2
    rows = LabeledFeatures(noise, labels, np.ones(60, np.float32), softmax, 2, strata=labels)

    seen = fit_linear_head(rows, inverse_regularization=100).logits(noise).argmax(axis=1) == labels
    unseen = cross_validate(rows, [100], seed=0)[100].argmax(axis=1) == labels

    assert seen.mean() > 0.9
    assert unseen.mean() < 0.7


def test_rows_of_a_group_are_never_split_between_folds() -> None:
    noise = np.random.default_rng(2).normal(size=(60, 40)).astype(np.float32).repeat(2, axis=0)
    labels = (np.arange(60) % 2).repeat(2)
    rows = LabeledFeatures(noise, labels, np.ones(120, np.float32), softmax, 2, strata=labels)

    apart, together = (
        cross_validate(rows, [100], seed=0, groups=groups)[100].argmax(axis=1) == labels
        for groups in (None, np.arange(60).repeat(2))
    )

    assert apart.mean() > 0.7
    assert together.mean() < 0.6


def draw_clusters(rows, texts, *, classes, hidden=32, noise=0.3, shares=None, seed=0):
    random = np.random.default_rng(seed)
    centers = random.normal(size=(classes, hidden))
    row_classes = np.arange(rows) % classes
    text_classes = random.choice(classes, texts, p=shares)
    row_features, text_features = (
        (centers[labels] + noise * random.normal(size=(len(labels), hidden))).astype(np.float32)
        for labels in (row_classes, text_classes)
    )
    weights = np.ones(rows, np.float32)
    labeled = LabeledFeatures(row_features, row_classes, weights, softmax, classes, row_classes)
    return labeled, text_features, text_classes


def test_labels_spread_to_nearby_texts():
    rows, texts, truth = draw_clusters(12, 400, classes=4)
    probabilities = spread_labels(rows, texts)
    assert probabilities.shape == (400, 4)
    assert probabilities.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert (probabilities.argmax(axis=1) == truth).mean() > 0.98


def test_unlabeled_texts_improve_the_head() -> None:
    labeled, texts, _ = draw_clusters(8, 2000, classes=4, noise=1.1)
    _, new_texts, new_truth = draw_clusters(8, 2000, classes=4, noise=1.1, seed=0)
    plain = fit_linear_head(labeled, inverse_regularization=10.0)
    head = fit_with_texts(labeled, texts)
    accuracies = [
        (fit.logits(new_texts).argmax(axis=1) == new_truth).mean() for fit in (plain, head)
    ]
    assert accuracies[1] > accuracies[0] + 0.02


def test_bias_shifts_toward_classes_that_are_frequent_in_the_texts():
    shares = np.array([0.7, 0.2, 0.1])
    *_, truth = draw_clusters(9, 2000, classes=3, shares=shares)
    logits = np.random.default_rng(1).normal(size=(2000, 3)).astype(np.float32)
    logits[np.arange(2000), truth] += 2
    shift = shift_bias(logits)
    assert shift[0] > 0 > shift[2]
    accuracy = ((logits + shift).argmax(axis=1) == truth).mean()
    assert accuracy > (logits.argmax(axis=1) == truth).mean()


@pytest.mark.parametrize("texts", [1, 50])
def test_few_texts_and_zero_features_give_finite_probabilities(texts: int) -> None:
    rows, *_ = draw_clusters(2, 0, classes=2, hidden=8, noise=1.0)
    rows = replace(rows, features=np.zeros((2, 8), np.float32))
    assert np.isfinite(spread_labels(rows, np.zeros((texts, 8), np.float32))).all()


def test_texts_of_one_class_do_not_exclude_the_other_class() -> None:
    logits = np.tile(np.array([2.2, 0], np.float32), (100, 1))
    assert np.ptp(shift_bias(logits)) < 3
