"""Few-shot training: what a head learns from unlabeled texts, and whether class names help.

The labels of rows spread over similar texts. Zhou et al. 2004, "Learning with Local and Global
Consistency": texts are linked with their nearest neighbors, and each class flows along the links.
This runs after contrastive training only. On the features of a pretrained encoder it costs TREC
nine points (docs/measurements.md).
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array
from scipy.special import softmax

from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    TRIED_GRADIENT,
    LabelledFeatures,
    LinearHead,
    fit_linear_head,
)

# With fewer fitting names, names are codes, or mean nothing to the encoder. If exactly half of the
# names fit, they help (docs/measurements.md).
MIN_FITTING_NAMES = 0.5
# More texts are sampled. 2,000 give most of the gain.
MAX_TEXTS = 5_000
NEIGHBORS = 10
# Similarities of 0.03 below the highest count a factor of e less. With 0.1, TREC loses 0.3 points
# with 6 classes and 1.5 with 40.
TEMPERATURE = 0.03
# Weight of the neighbors of a text in each round; the rest is the weight of labeled rows.
FROM_NEIGHBORS, ROUNDS = 0.8, 20
# All unlabeled texts together count at most this many times as much as the rows.
MAX_WEIGHT, WEIGHT_PER_TEXT = 3.0, 0.25
# More classes than this lose a little by the shift of the bias, and fewer gain.
MAX_CLASSES_TO_SHIFT = 20
# Texts of each class that are added when class shares are estimated.
PSEUDO_TEXTS, SHARE_ROUNDS = 50, 100
# On TREC with 5 to 20 rows per class, 0.95 is as good, and 0.8 costs half a point.
MEAN_CONFIDENCE = 0.9
# Rows of the similarity matrix that are in memory at a time.
BLOCK_ROWS = 1_024


def normalize(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return features [texts, hidden] scaled to unit norm."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)


def names_fit(
    names: NDArray[np.float32], rows: NDArray[np.float32], is_label: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return for each class with rows whether its name is most similar to the mean of its rows.

    Features of the frozen encoder are [classes, hidden] and [rows, hidden]; ``is_label`` is
    [rows, classes].
    """
    known = np.flatnonzero(is_label.any(axis=0))
    if not len(known):
        return np.zeros(0, bool)
    marks = is_label[:, known].astype(np.float32)
    means = normalize(marks.T @ normalize(rows) / marks.sum(axis=0)[:, None])
    return np.asarray((names[known] @ means.T).argmax(axis=1) == np.arange(len(known)))


def spread_labels(
    row_features: NDArray[np.float32],
    classes: NDArray[np.int64],
    text_features: NDArray[np.float32],
    *,
    class_count: int,
) -> NDArray[np.float32]:
    """Return the probability of each class for unlabeled texts: float32 [texts, classes].

    Features are float32 [rows, hidden] and [texts, hidden]; the classes of the rows are [rows].
    """
    links = _link_neighbors(normalize(np.concatenate([row_features, text_features])))
    labels = np.zeros((len(row_features) + len(text_features), class_count), np.float32)
    labels[np.arange(len(classes)), classes] = 1 / np.bincount(classes)[classes]
    spread = labels
    for _ in range(ROUNDS):
        spread = FROM_NEIGHBORS * (links @ spread) + (1 - FROM_NEIGHBORS) * labels
    # Squaring sharpens the shares. A text that no label has reached belongs to no class more than
    # to any other.
    squares = (spread[len(row_features) :] / spread.max()) ** 2 + np.float32(1e-30)
    return np.asarray(squares / squares.sum(axis=1, keepdims=True), np.float32)


def _link_neighbors(features: NDArray[np.float32]) -> csr_array:
    """Return the symmetric, degree-normalized graph of nearest neighbors: [texts, texts]."""
    count = len(features)
    neighbors = min(NEIGHBORS, count - 1)
    columns = np.empty((count, neighbors), np.int64)
    weights = np.empty((count, neighbors), np.float32)
    for start in range(0, count, BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, count))
        similarities = features[block] @ features.T
        similarities[np.arange(len(similarities)), np.arange(count)[block]] = -np.inf
        nearest = np.argpartition(-similarities, neighbors - 1, axis=1)[:, :neighbors]
        columns[block] = nearest
        chosen = np.take_along_axis(similarities, nearest, axis=1)
        weights[block] = np.exp((chosen - 1) / TEMPERATURE)
    starts = np.arange(count + 1) * neighbors
    directed = csr_array((weights.ravel(), columns.ravel(), starts), shape=(count, count))
    graph = (directed + directed.T) / 2
    scale = diags_array(1 / np.sqrt(np.maximum(graph.sum(axis=1), np.finfo(np.float32).tiny)))
    return csr_array(scale @ graph @ scale, dtype=np.float32)


def fit_with_texts(rows: LabelledFeatures, texts: NDArray[np.float32]) -> LinearHead:
    """Fit a linear head on rows and on the features of unlabeled texts, float32 [texts, hidden]."""
    soft_labels = spread_labels(rows.features, rows.labels, texts, class_count=rows.outputs)
    weight = min(MAX_WEIGHT, WEIGHT_PER_TEXT * len(texts) / len(rows.labels))
    weight_of_text = weight * rows.weights.sum() / len(texts)
    together = replace(
        rows,
        features=np.concatenate([rows.features, texts]),
        labels=np.concatenate([np.eye(rows.outputs, dtype=np.float32)[rows.labels], soft_labels]),
        weights=np.concatenate([rows.weights, np.full(len(texts), weight_of_text, np.float32)]),
        losses=_soft_losses,
        groups=np.zeros(len(rows.labels) + len(texts), np.int64),
    )
    # The penalty stays the same as without texts.
    share = len(rows.labels) * (1 + weight) / len(together.labels)
    head = fit_linear_head(
        together,
        inverse_regularization=DEFAULT_INVERSE_REGULARIZATION * share,
        max_gradient=TRIED_GRADIENT,
    )
    if rows.outputs > MAX_CLASSES_TO_SHIFT:
        return head
    return replace(head, bias=head.bias + shift_bias(head.logits(texts)))


def _soft_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(labels.to(logits) * logits.log_softmax(dim=1)).sum(dim=1)


def shift_bias(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return what to add to the bias, so that it expects the class shares of unlabeled texts.

    The shares are estimated by expectation maximization (Saerens et al. 2002) from the logits of
    the texts, [texts, classes], sharpened or softened to a mean confidence that suits few labels.
    """
    texts, classes = logits.shape
    low, high = 1e-3, 1e3
    for _ in range(50):
        factor = (low * high) ** 0.5
        confidence = softmax(factor * logits, axis=1).max(axis=1).mean()
        low, high = (low, factor) if confidence > MEAN_CONFIDENCE else (factor, high)
    probabilities = softmax(factor * logits.astype(np.float64), axis=1)
    shares = np.full(classes, 1 / classes)
    for _ in range(SHARE_ROUNDS):
        weighted = probabilities * shares
        expected = (weighted / weighted.sum(axis=1, keepdims=True)).sum(axis=0)
        shares = (expected + PSEUDO_TEXTS) / (texts + PSEUDO_TEXTS * classes)
    return np.asarray(np.log(classes * shares) / factor)
