"""Fits linear heads on features. The loss is convex, so its only minimum is found in seconds.

Features are centered and scaled to unit norm on average. This affects only the meaning of
``inverse_regularization``, which is ``C`` in scikit-learn.

One solver fits the losses of all tasks. With 5,000 rows and 77 classes, ``LogisticRegression`` of
scikit-learn takes 0.5 to 1.1 times as long for single-label heads, but 2.5 to 3.8 times for
multi-label heads and 4.4 to 5.1 times for soft labels. Its import adds 10% to a run on stored
features (docs/measurements.md#own-code-and-scikit-learn).

After contrastive training, labels are propagated to similar unlabeled texts: texts are linked
to their nearest neighbors, and each class flows along the links (Zhou et al. 2004, "Learning with
Local and Global Consistency"). Without contrastive training, it costs TREC nine points
(docs/measurements.md#few-labels).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_array, diags_array
from scipy.special import softmax
from torch import nn

from finetune.data.dataset import find_folds

# The best value for TREC lies in this range, with 6 or 50 classes and 5 to 900 rows per class.
INVERSE_REGULARIZATIONS = (1.0, 10.0, 100.0)
# The best value for features of an encoder that was trained on the same rows.
DEFAULT_INVERSE_REGULARIZATION = 10.0
FOLDS = 5
# Multiplications in one pass over the rows. Above the first limit, cross-validation uses a sample.
# Above the second, even the smallest sample for folds is too slow, so the default is used.
MAX_WORK, MAX_FOLD_WORK = 2e7, 2e8
# Less work than this is faster in one thread, especially if other programs use the cores.
MIN_THREADED_WORK = 1e7
# A fit stops at this gradient norm of the penalized mean loss. Cross-validation stops earlier.
FITTED_GRADIENT, TRIED_GRADIENT = 1e-5, 5e-4
MAX_ITERATIONS = 1_000
# Larger feature arrays are fitted in fp32.
MAX_DOUBLES = 5e7


@dataclass(frozen=True)
class LabeledFeatures:
    """Rows to fit a head on, with a function for the loss of each row from logits and labels."""

    features: NDArray[np.float32]  # [rows, hidden]
    labels: NDArray[Any]  # [rows, ...]
    weights: NDArray[np.float32]  # weight of each row in the loss
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    outputs: int
    strata: NDArray[np.int64]  # for the folds, such as the class of each row

    def select(self, rows: NDArray[np.int64]) -> "LabeledFeatures":
        """Return a subset of the rows."""
        arrays = ("features", "labels", "weights", "strata")
        return replace(self, **{name: getattr(self, name)[rows] for name in arrays})


@dataclass(frozen=True)
class LinearHead:
    """A fitted linear head: ``weight`` is float64 [outputs, hidden], ``bias`` [outputs]."""

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    loss: float

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Compute the logits of features: float32 of shape [rows, outputs]."""
        return np.asarray(features @ self.weight.T + self.bias, np.float32)

    @torch.no_grad()
    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        """Copy weight and bias to the parameters of an output layer."""
        for parameter in parameters:
            values = self.bias if parameter.ndim == 1 else self.weight
            parameter.copy_(torch.from_numpy(values))


def fit_linear_head(
    rows: LabeledFeatures,
    *,
    inverse_regularization: float,
    max_gradient: float = FITTED_GRADIENT,
    start: LinearHead | None = None,
) -> LinearHead:
    """Minimize the mean loss plus ``|weight|² / (2 * inverse_regularization * rows)``.

    ``start`` must have been fitted on the same rows, so that no other labels leak in.
    """
    # In place, because a copy of a large table's features can take gigabytes.
    is_exact = max_gradient <= FITTED_GRADIENT and rows.features.size <= MAX_DOUBLES
    dtype = torch.float64 if is_exact else torch.float32
    features = torch.tensor(rows.features, dtype=dtype)
    center = features.mean(dim=0)
    features -= center
    scale = torch.linalg.vector_norm(features).div(len(features) ** 0.5).clamp(min=1e-12)
    features /= scale
    labels = torch.tensor(rows.labels)
    weights = torch.from_numpy(rows.weights).to(dtype)
    weights = weights / weights.sum()
    penalty = 1 / (inverse_regularization * len(features))
    shape = (rows.outputs, features.shape[1])

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        parameters = torch.from_numpy(flat).to(dtype).requires_grad_()
        weight, bias = parameters[: -shape[0]].view(shape), parameters[-shape[0] :]
        losses = rows.losses(features @ weight.T + bias, labels)
        loss = (losses * weights).sum() + penalty / 2 * weight.square().sum()
        [gradient] = torch.autograd.grad(loss, [parameters])
        return loss.item(), gradient.double().numpy()

    first = np.zeros(shape[0] * (shape[1] + 1))
    if start is not None:
        bias = start.bias + start.weight @ center.numpy()
        first = np.concatenate([(start.weight * scale.item()).ravel(), bias])
    options = {"gtol": max_gradient, "ftol": 0.0, "maxiter": MAX_ITERATIONS, "maxcor": 20}
    threads = torch.get_num_threads()
    if features.numel() * rows.outputs < MIN_THREADED_WORK:
        torch.set_num_threads(1)
    try:
        optimum = minimize(objective, first, jac=True, method="L-BFGS-B", options=options)
    finally:
        torch.set_num_threads(threads)
    weight = optimum.x[: -shape[0]].reshape(shape) / scale.item()
    bias = optimum.x[-shape[0] :] - weight @ center.numpy()
    return LinearHead(weight, bias, float(optimum.fun))


def choose_inverse_regularization(
    rows: LabeledFeatures, *, seed: int
) -> tuple[float, NDArray[np.float32] | None]:
    """Choose the value with the lowest cross-validated loss, or the default for many classes.

    Also return the cross-validated logits, or None if only a sample of rows was used.
    """
    work = rows.features.size * rows.outputs
    if min(work, FOLDS * rows.outputs**2 * rows.features.shape[1]) > MAX_FOLD_WORK:
        return DEFAULT_INVERSE_REGULARIZATION, None
    compared = rows
    if work > MAX_WORK:
        count = max(int(len(rows.labels) * MAX_WORK / work), FOLDS * rows.outputs)
        order = np.random.default_rng(seed).permutation(len(rows.labels))
        compared = rows.select(np.sort(order[:count]))
    logits = cross_validate(compared, INVERSE_REGULARIZATIONS, seed=seed)

    def mean_loss(candidate: float) -> float:
        losses = compared.losses(torch.from_numpy(logits[candidate]), torch.tensor(compared.labels))
        return float(np.average(losses.numpy(), weights=compared.weights))

    best = min(INVERSE_REGULARIZATIONS, key=mean_loss)
    return best, logits[best] if compared is rows else None


def cross_validate(
    rows: LabeledFeatures,
    candidates: Sequence[float],
    *,
    seed: int,
    folds: int = FOLDS,
    groups: NDArray[np.int64] | None = None,
) -> dict[float, NDArray[np.float32]]:
    """Compute the logits of each row from a head fitted without that row: [rows, outputs].

    Keys are the candidates for ``inverse_regularization``. Rows of one group, [rows], share a fold.
    """
    shape = (len(rows.labels), rows.outputs)
    logits = {candidate: np.empty(shape, np.float32) for candidate in candidates}
    # With many classes, gradients are small even before anything is fitted.
    max_gradient = min(TRIED_GRADIENT, 0.02 / rows.outputs)
    groups = np.arange(len(rows.labels)) if groups is None else groups
    folds = min(folds, len(np.unique(groups)))
    fold = find_folds(groups, rows.strata, folds=folds, seed=seed)
    for test in (fold == number for number in range(folds)):
        training, head = rows.select(np.flatnonzero(~test)), None
        for candidate in candidates:
            head = fit_linear_head(
                training, inverse_regularization=candidate, max_gradient=max_gradient, start=head
            )
            logits[candidate][test] = head.logits(rows.features[test])
    return logits


# With fewer fitting names, names are codes, or mean nothing to the encoder. If exactly half of the
# names fit, they help (docs/measurements.md#few-labels).
MIN_FITTING_NAMES = 0.5
# Larger sets of texts are sampled. 2,000 texts give most of the gain.
MAX_TEXTS = 5_000
NEIGHBORS = 10
# Softmax temperature: a similarity 0.03 below the maximum gets 1/e of the weight. With 0.1, TREC
# loses 0.3 points with 6 classes and 1.5 with 40.
TEMPERATURE = 0.03
# Weight of the neighbors of a text in each round; the rest is the weight of labeled rows.
FROM_NEIGHBORS, ROUNDS = 0.8, 20
# All unlabeled texts together weigh at most this many times as much as the rows.
MAX_WEIGHT, WEIGHT_PER_TEXT = 3.0, 0.25
# Shifting the bias helps up to this many classes and slightly hurts beyond.
MAX_CLASSES_TO_SHIFT = 20
# Pseudo-texts per class, added when class shares are estimated.
PSEUDO_TEXTS, SHARE_ROUNDS = 50, 100
# On TREC with 5 to 20 rows per class, 0.95 is as good, and 0.8 costs half a point.
MEAN_CONFIDENCE = 0.9
# Rows of the similarity matrix in memory at a time.
BLOCK_ROWS = 1_024


def normalize(features: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale features [texts, hidden] to unit norm."""
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(norms, np.finfo(np.float32).tiny), np.float32)


def mean_by_class(
    features: NDArray[np.float32], is_class: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return the unit-norm mean feature of each class: [classes, hidden].

    Features are [rows, hidden]. ``is_class`` is [rows, classes], with at least one row per class.
    """
    marks = is_class.astype(np.float32)
    return normalize(marks.T @ normalize(features) / marks.sum(axis=0)[:, None])


def names_fit(
    names: NDArray[np.float32], rows: NDArray[np.float32], is_label: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return, for each class with rows, whether its name is most similar to the mean of its rows.

    Frozen-encoder features are [classes, hidden] and [rows, hidden]. ``is_label`` is
    [rows, classes].
    """
    known = np.flatnonzero(is_label.any(axis=0))
    if not len(known):
        return np.zeros(0, bool)
    means = mean_by_class(rows, is_label[:, known])
    return np.asarray((names[known] @ means.T).argmax(axis=1) == np.arange(len(known)))


def spread_labels(rows: LabeledFeatures, texts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Propagate labels to unlabeled texts. Return class probabilities: float32 [texts, classes].

    Text features are float32 [texts, hidden], and row labels are class numbers.
    """
    # LabelSpreading of scikit-learn takes 1.4 times as long. Its labels cost the head 0.3 points of
    # accuracy with 6 classes of TREC, and 1.6 with 50
    # (docs/measurements.md#own-code-and-scikit-learn).
    links = _link_neighbors(normalize(np.concatenate([rows.features, texts])))
    count = len(rows.labels)
    labels = np.zeros((links.shape[0], rows.outputs), np.float32)
    labels[np.arange(count), rows.labels] = 1 / np.bincount(rows.labels)[rows.labels]
    spread = labels
    for _ in range(ROUNDS):
        spread = FROM_NEIGHBORS * (links @ spread) + (1 - FROM_NEIGHBORS) * labels
    # Squaring sharpens the shares. A text that no label reached belongs to no class more than
    # to any other.
    squares = (spread[count:] / spread.max()) ** 2 + np.float32(1e-30)
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


def fit_with_texts(rows: LabeledFeatures, texts: NDArray[np.float32]) -> LinearHead:
    """Fit a linear head on rows and on unlabeled text features, float32 [texts, hidden]."""
    soft_labels = spread_labels(rows, texts)
    weight = min(MAX_WEIGHT, WEIGHT_PER_TEXT * len(texts) / len(rows.labels))
    weight_of_text = weight * rows.weights.sum() / len(texts)
    together = replace(
        rows,
        features=np.concatenate([rows.features, texts]),
        labels=np.concatenate([np.eye(rows.outputs, dtype=np.float32)[rows.labels], soft_labels]),
        weights=np.concatenate([rows.weights, np.full(len(texts), weight_of_text, np.float32)]),
        losses=lambda logits, labels: -(labels.to(logits) * logits.log_softmax(1)).sum(1),
    )
    # Keep the penalty the same as without texts.
    share = len(rows.labels) * (1 + weight) / len(together.labels)
    inverse = DEFAULT_INVERSE_REGULARIZATION * share
    head = fit_linear_head(together, inverse_regularization=inverse, max_gradient=TRIED_GRADIENT)
    if rows.outputs > MAX_CLASSES_TO_SHIFT:
        return head
    return replace(head, bias=head.bias + shift_bias(head.logits(texts)))


def shift_bias(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return a bias correction that matches the class distribution of the unlabeled texts.

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
