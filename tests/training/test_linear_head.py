"""Linear heads that are fitted on features."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from finetune.training.linear_head import LabelledFeatures, cross_validate, fit_linear_head


def softmax(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of single-label rows."""
    return functional.cross_entropy(logits, labels, reduction="none")


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of regression."""
    return (logits[:, 0] - labels).square()


def make_rows(count: int = 120, classes: int = 3, noise: float = 1.0) -> LabelledFeatures:
    """Return clusters of features, far from the origin."""
    random = np.random.default_rng(0)
    labels = np.arange(count) % classes
    centres = random.normal(size=(classes, 8))
    features = 30 + centres[labels] + noise * random.normal(size=(count, 8))
    weights = np.ones(count, np.float32)
    return LabelledFeatures(
        features.astype(np.float32), labels, weights, softmax, classes, groups=labels
    )


@pytest.mark.parametrize("c", [1.0, 100.0])
def test_it_finds_the_optimum_that_scikit_learn_finds(c: float) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = make_rows()
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


def test_numbers_are_solved_as_ridge_regression_solves_them() -> None:
    random = np.random.default_rng(1)
    features = random.normal(size=(50, 4)).astype(np.float32)
    labels = (features @ [1.0, -2.0, 0.0, 3.0] + 5).astype(np.float32)
    rows = LabelledFeatures(
        features, labels, np.ones(50, np.float32), squared, 1, np.zeros(50, np.int64)
    )

    head = fit_linear_head(rows, inverse_regularization=1e6)

    np.testing.assert_allclose(head.weight, [[1.0, -2.0, 0.0, 3.0]], atol=1e-2)
    np.testing.assert_allclose(head.bias, [5.0], atol=1e-2)


def test_out_of_fold_logits_are_of_heads_that_have_not_seen_the_row() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(size=(60, 40)).astype(np.float32)
    labels = np.arange(60) % 2
    rows = LabelledFeatures(noise, labels, np.ones(60, np.float32), softmax, 2, groups=labels)

    seen = fit_linear_head(rows, inverse_regularization=100).logits(noise).argmax(axis=1) == labels
    unseen = cross_validate(rows, [100], seed=0)[100].argmax(axis=1) == labels

    assert seen.mean() > 0.9
    assert unseen.mean() < 0.7


def test_noise_is_found_to_tell_nothing_even_where_a_head_can_learn_it_by_heart() -> None:
    random = np.random.default_rng(3)
    noise = random.normal(size=(400, 100)).astype(np.float32)
    labels = random.permutation(np.arange(400) % 20)
    rows = LabelledFeatures(noise, labels, np.ones(400, np.float32), softmax, 20, groups=labels)

    right = cross_validate(rows, [1.0, 100.0], seed=0)[100.0].argmax(axis=1) == labels

    assert right.mean() < 0.1
