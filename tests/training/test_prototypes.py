"""Class prototypes on features with known classes."""

import numpy as np
import pytest
from scipy.special import softmax

from finetune.training.prototypes import Prototypes

Features = tuple[np.ndarray, np.ndarray, np.ndarray]


@pytest.fixture
def features() -> Features:
    """Features of names and texts, which have different centers, and the classes of the texts."""
    random = np.random.default_rng(0)
    classes = random.integers(3, size=300)
    centers = np.eye(3, 16, dtype=np.float32)
    texts = centers[classes] + 0.2 * random.normal(size=(300, 16)) + 5 * np.eye(16)[7]
    names = centers + 0.3 * random.normal(size=(3, 16)) - 4 * np.eye(16)[9]
    return names.astype(np.float32), texts.astype(np.float32), classes


def test_texts_get_the_class_with_the_most_similar_name(features: Features) -> None:
    names, texts, classes = features
    predicted = Prototypes.of(names, texts).head.logits(texts).argmax(axis=1)
    assert (predicted == classes).mean() > 0.95


def test_texts_move_the_prototypes_toward_their_classes(features: Features) -> None:
    names, texts, classes = features
    names += 0.5 * np.random.default_rng(1).normal(size=names.shape).astype(np.float32)
    fitted, by_name = Prototypes.of(names, texts), Prototypes.of(names, texts[:4])
    right = [(p.head.logits(texts).argmax(axis=1) == classes).mean() for p in (fitted, by_name)]
    assert right[0] > right[1]


def test_few_texts_move_the_prototypes_only_slightly(features: Features) -> None:
    names, texts, _ = features
    starts = names - names.mean(axis=0)
    starts /= np.linalg.norm(starts, axis=1, keepdims=True)
    few, many = (
        (Prototypes.of(names, rows).vectors * starts).sum(axis=1).min()
        for rows in (texts[:12], np.tile(texts[:12], (100, 1)))
    )
    assert few > many


def test_name_has_at_least_half_of_the_final_weight(features: Features) -> None:
    names, texts, _ = features
    starts = names - names.mean(axis=0)
    starts /= np.linalg.norm(starts, axis=1, keepdims=True)
    # These texts are unrelated to the names.
    texts = np.roll(texts, 3, axis=1)
    assert (Prototypes.of(names, texts).vectors * starts).sum(axis=1).min() > np.cos(np.pi / 4)


@pytest.mark.parametrize(("noise", "least", "most"), [(0.2, 0.8, 0.95), (1.5, 0.3, 0.8)])
def test_texts_far_from_their_names_lower_the_confidence(
    noise: float, least: float, most: float, features: Features
) -> None:
    names, texts, _ = features
    texts = texts + noise * np.random.default_rng(2).normal(size=texts.shape).astype(np.float32)
    logits = Prototypes.of(names, texts).head.logits(texts)
    confidence = softmax(logits, axis=1).max(axis=1).mean()
    assert least < confidence < most


def test_logits_are_similarities_divided_by_the_temperature(features: Features) -> None:
    names, texts, _ = features
    prototypes = Prototypes.of(names, texts)
    centered = texts - prototypes.center
    mean_norm = np.linalg.norm(centered, axis=1).mean()
    expected = centered / mean_norm @ prototypes.vectors.T / prototypes.temperature
    np.testing.assert_allclose(prototypes.head.logits(texts), expected, atol=1e-3)


def test_name_without_similar_texts_does_not_fit(features: Features) -> None:
    names, texts, _ = features
    assert Prototypes.of(names, texts).names_fit.all()
    names[1] = names[0] + np.eye(16)[12]
    assert Prototypes.of(names, texts).names_fit.tolist() == [True, False, True]


def test_labeled_texts_correct_misleading_names(features: Features) -> None:
    names, texts, classes = features
    wrong = names[[1, 2, 0]]
    fitted = [Prototypes.of(wrong, texts, labels) for labels in (None, classes[:30])]
    right = [(p.head.logits(texts).argmax(axis=1) == classes).mean() for p in fitted]
    assert right[0] < 0.1
    assert right[1] > 0.9
