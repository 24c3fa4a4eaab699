"""Compares splits, metrics and linear heads with those of scikit-learn, in one thread.

    OMP_NUM_THREADS=1 python comparisons/against_scikit_learn.py

The table has 5,000 rows, 384 features and 77 classes, of which some are rare. Each line has the
shortest time of both sides, scikit-learn relative to ours, and where they differ, a result of each.
"""

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn import metrics as theirs
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupShuffleSplit, StratifiedGroupKFold
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import kneighbors_graph
from sklearn.semi_supervised import LabelSpreading

from finetune.config.schema import TrainingConfig
from finetune.data.dataset import find_folds, find_held_out
from finetune.tasks.base import Task
from finetune.tasks.metrics import MULTI, SINGLE, compute_metrics
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.training.linear_head import (
    FROM_NEIGHBORS,
    MAX_WEIGHT,
    NEIGHBORS,
    TEMPERATURE,
    LabeledFeatures,
    fit_linear_head,
    fit_with_texts,
    normalize,
    spread_labels,
)

ROWS, HIDDEN, CLASSES = 5_000, 384, 77
C = 10.0
NAMES = [str(number) for number in range(CLASSES)]
RANDOM = np.random.default_rng(0)


def shortest(function: Callable[[], Any], *, repeats: int = 3) -> tuple[float, Any]:
    """Return the shortest time in seconds, and the result."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def compare(
    what: str,
    ours: Callable[[], Any],
    other: Callable[[], Any],
    measure: Callable[[Any], str] = lambda _: "",
    *,
    repeats: int = 3,
) -> None:
    """Print a line about one part."""
    (own, own_result), (others, result) = (shortest(f, repeats=repeats) for f in (ours, other))
    found = " and ".join(filter(None, map(measure, (own_result, result))))
    print(f"{what:36} {own:9.4f} s {others:9.4f} s {others / own:8.1f}  {found}", flush=True)


def compare_splits(texts: NDArray[np.int64], classes: NDArray[np.int64]) -> None:
    """Compare five folds and a tenth that is held out; the measure is how far classes are off."""
    drawn = RANDOM.integers(0, 2**63, len(np.unique(texts))).astype(np.uint64)[texts]
    folds = StratifiedGroupKFold(5, shuffle=True, random_state=0)
    tenth = GroupShuffleSplit(1, test_size=0.1, random_state=0)

    def measure(held_out: Any) -> str:
        counts = np.bincount(classes[held_out], minlength=CLASSES)
        expected = np.bincount(classes) * counts.sum() / len(classes)
        lost = CLASSES - len(np.unique(np.delete(classes, np.flatnonzero(held_out))))
        return f"{np.abs(counts - expected).mean():.2f} rows off, {lost} classes lost"

    def mask(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.isin(np.arange(len(classes)), rows)

    compare(
        "folds: StratifiedGroupKFold",
        lambda: find_folds(texts, classes, folds=5, seed=0) == 0,
        lambda: mask(next(iter(folds.split(texts, classes, texts)))[1]),
        measure,
        repeats=1,
    )
    compare(
        "held out: GroupShuffleSplit",
        lambda: find_held_out(texts, classes, drawn, fraction=0.1),
        lambda: mask(next(tenth.split(texts, classes, texts))[1]),
        measure,
    )


def compare_metrics(classes: NDArray[np.int64]) -> None:
    """Compare the metrics of predictions, as a resample of an interval computes them."""
    predicted = np.where(RANDOM.random(ROWS) < 0.8, classes, RANDOM.permutation(classes))
    weights = np.ones(ROWS)
    compare(
        "metrics, single-label",
        lambda: compute_metrics(SINGLE, classes, {"predictions": predicted}, weights),
        lambda: [
            theirs.accuracy_score(classes, predicted, sample_weight=weights),
            theirs.f1_score(classes, predicted, average="macro", sample_weight=weights),
            theirs.balanced_accuracy_score(classes, predicted, sample_weight=weights),
            theirs.matthews_corrcoef(classes, predicted, sample_weight=weights),
        ],
    )
    labels = (RANDOM.random((ROWS, CLASSES)) < 0.03).astype(np.float32)
    probabilities = (labels / 2 + RANDOM.random((ROWS, CLASSES)) * 0.6).astype(np.float32)
    flags = probabilities > 0.5
    compare(
        "metrics, multi-label",
        lambda: compute_metrics(MULTI, labels, {"predictions": flags}, weights),
        lambda: [
            theirs.f1_score(labels, flags, average="micro", sample_weight=weights),
            theirs.f1_score(labels, flags, average="macro", sample_weight=weights),
            theirs.accuracy_score(labels, flags, sample_weight=weights),
        ],
    )
    compare(
        "average precision",
        lambda: compute_metrics(MULTI, labels, {"probabilities": probabilities}, weights),
        lambda: theirs.average_precision_score(labels, probabilities),
    )


def draw_features(classes: NDArray[np.int64], centers: NDArray[Any]) -> NDArray[np.float32]:
    """Return features of rows, [rows, hidden], in clusters that overlap."""
    noise = 4 * RANDOM.normal(size=(len(classes), HIDDEN))
    return np.asarray(centers[classes] + noise, np.float32)


def rows_of(features: NDArray[np.float32], labels: NDArray[Any], task: Task) -> LabeledFeatures:
    """Return rows that all have the same weight."""
    count, outputs = len(labels), len(task.output_names)
    weights = np.ones(count, np.float32)
    return LabeledFeatures(features, labels, weights, task.losses, outputs, task.strata(labels))


def accuracy_of(classes: NDArray[np.int64], scores: NDArray[np.float32]) -> str:
    """Return the accuracy of scores, [rows, classes], as text."""
    return f"{100 * (scores.argmax(axis=1) == classes).mean():.2f}%"


def compare_heads(classes: NDArray[np.int64]) -> None:
    """Compare heads, fitted with the same penalty; the measure is the accuracy on other rows."""
    centers = RANDOM.normal(size=(CLASSES, HIDDEN))
    features, new = draw_features(classes, centers), draw_features(classes, centers)
    center = features.mean(axis=0)
    scale = np.sqrt(np.square(features - center).sum(axis=1).mean())
    scaled, new_scaled = (features - center) / scale, (new - center) / scale

    accuracy = partial(accuracy_of, classes)

    def fit(labels: NDArray[Any], task: Task) -> NDArray[np.float32]:
        rows = rows_of(features, labels, task)
        return fit_linear_head(rows, inverse_regularization=C).logits(new)

    regression = LogisticRegression(C=C, max_iter=1000, tol=1e-5)
    compare(
        "head: LogisticRegression",
        lambda: fit(classes, Single(NAMES)),
        lambda: regression.fit(scaled, classes).decision_function(new_scaled),
        accuracy,
        repeats=1,
    )
    flags = np.eye(CLASSES, dtype=np.float32)[classes]
    # Our loss is the mean over the classes.
    binary = OneVsRestClassifier(LogisticRegression(C=C / CLASSES, max_iter=1000, tol=1e-5))
    compare(
        "head: 77 × LogisticRegression",
        lambda: fit(flags, Multi(NAMES)),
        lambda: binary.fit(scaled, flags).decision_function(new_scaled),
        accuracy,
        repeats=1,
    )
    values = (features @ RANDOM.normal(size=HIDDEN)).astype(np.float32)
    task = Regression().with_loss(values, TrainingConfig())
    compare(
        "head: Ridge",
        lambda: fit(values, task),
        lambda: Ridge(alpha=0.5 / C).fit(scaled, (values - task.mean) / task.deviation),
    )
    compare_spreading(features, new, classes)


def compare_spreading(
    features: NDArray[np.float32], texts: NDArray[np.float32], classes: NDArray[np.int64]
) -> None:
    """Compare labels that spread from 5 rows per class, and a head fitted on them.

    scikit-learn can't fit soft labels. It repeats each text, with the weights of its ten most
    probable classes.
    """
    few = np.concatenate([np.flatnonzero(classes == number)[:5] for number in range(CLASSES)])
    rows = rows_of(features[few], classes[few], Single(NAMES))
    together = normalize(np.concatenate([rows.features, texts]))
    labels = np.concatenate([rows.labels, np.full(len(texts), -1)])

    accuracy = partial(accuracy_of, classes)

    def spread(kernel: Any) -> NDArray[Any]:
        spreading = LabelSpreading(kernel, n_neighbors=NEIGHBORS, alpha=FROM_NEIGHBORS)
        distributions: NDArray[Any] = spreading.fit(together, labels).label_distributions_
        return distributions[len(few) :]

    def link(these: NDArray[Any], _: Any = None) -> csr_array:
        graph = kneighbors_graph(these, NEIGHBORS, mode="distance")
        graph.data = np.exp(-(graph.data**2) / 2 / TEMPERATURE)
        return csr_array((graph + graph.T) / 2)

    ours = partial(spread_labels, rows, texts)
    compare("LabelSpreading, knn", ours, partial(spread, "knn"), accuracy, repeats=1)
    compare("LabelSpreading, our links", ours, partial(spread, link), accuracy, repeats=1)
    soft = ours()
    best = np.argsort(-soft, axis=1)[:, :10]
    weights = MAX_WEIGHT * len(few) / len(texts) * np.take_along_axis(soft, best, axis=1).ravel()

    def fit_repeated() -> NDArray[np.float32]:
        repeated = np.concatenate([rows.features, np.repeat(texts, 10, axis=0)])
        scaled = (repeated - repeated.mean(axis=0)) / np.linalg.norm(repeated, axis=1).mean()
        head = LogisticRegression(C=C, max_iter=1000, tol=5e-4)
        numbers = np.concatenate([rows.labels, best.ravel()])
        head.fit(scaled, numbers, np.concatenate([rows.weights, weights]))
        scores: NDArray[np.float32] = head.decision_function(scaled[len(few) :: 10])
        return scores

    compare(
        "head of soft labels",
        lambda: fit_with_texts(rows, texts).logits(texts),
        fit_repeated,
        accuracy,
        repeats=1,
    )


def main() -> None:
    """Compare all parts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shares = 1 / np.arange(1, CLASSES + 1)
    drawn = RANDOM.choice(CLASSES, ROWS - 10 * CLASSES, p=shares / shares.sum())
    classes = np.concatenate([np.repeat(np.arange(CLASSES), 10), drawn])
    texts = np.arange(ROWS)
    repeats = np.flatnonzero(RANDOM.random(ROWS) < 0.05)
    texts[repeats] = texts[RANDOM.integers(0, ROWS, len(repeats))]
    _, first, texts = np.unique(texts, return_index=True, return_inverse=True)
    compare_splits(np.argsort(np.argsort(first))[texts], classes)
    compare_metrics(classes)
    compare_heads(classes)


if __name__ == "__main__":
    main()
