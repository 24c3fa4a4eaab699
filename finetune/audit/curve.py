"""Is it enough? What a fitted law expects of more rows, and which texts to label next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.audit.duplicates import unit_rows
from finetune.data.split import find_folds
from finetune.tasks.base import Labels, Logits, Task
from finetune.training.linear_head import DEFAULT_STRENGTH, TRIED_GRADIENT, LabelledFeatures, solve

SIZES, DRAWS = 7, 5
SMALLEST = 0.05
MIN_ROWS = 50
# More numbers times outputs than this are a sample of the rows.
MAX_WORK = 6e7
TIMES_AS_MANY = (2, 4)
MORE_OF_A_CLASS = 200
ERRORS_OF_90 = 1.645
# Of a forecast's gain: what another law than the fitted one would give or take.
LAW_ERROR = 0.25
# Density is that of a sample: texts like many others teach more than ones unlike all.
SAMPLED_TEXTS = 1_000
MAX_TEXTS = 20_000
# Of a class the slope is that of all rows, as if seen on so many of its own.
PRIOR_ROWS = 50.0


@dataclass(frozen=True)
class Point:
    """The accuracy, or of numbers the mean error, of a head on so many rows; 90% interval."""

    rows: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """What was measured and what is expected; ``gains`` are points of 200 more rows by class."""

    metric: str
    points: Sequence[Point]
    forecast: Sequence[Point]
    gains: Mapping[str, float]


def row_errors(task: Task, logits: Logits, labels: Labels) -> NDArray[np.float64]:
    """Return 1 for each row that is predicted wrong, or how far a number is off: [rows]."""
    predicted = task.read_logits(logits).predicted
    if not task.class_names:
        return np.abs(np.asarray(predicted, np.float64) - labels)
    wrong = predicted != labels
    return np.asarray(wrong if wrong.ndim == 1 else wrong.any(axis=1), np.float64)


def measure_curve(task: Task, rows: LabelledFeatures, groups: NDArray[np.int64]) -> Curve | None:
    """Solve heads on nested subsets, and fit a power law of the error; None of too few rows."""
    total = len(rows.labels)
    largest = min(int(0.8 * total), int(MAX_WORK / (rows.features.shape[1] * rows.outputs)) + 1)
    is_too_small = largest < max(0.8 * MIN_ROWS, 4 * rows.outputs)
    if is_too_small or len(np.unique(groups)) < DRAWS:
        return None
    fold = find_folds(groups, rows.groups, folds=DRAWS, seed=0)
    sizes = np.unique(np.geomspace(max(SMALLEST * largest, 10), largest, SIZES).astype(int))
    errors = np.zeros((len(sizes), total))
    trained = np.zeros((len(sizes), len(task.class_names)))
    for draw in range(DRAWS):
        test = np.flatnonzero(fold == draw)
        order = np.random.default_rng(draw).permutation(np.flatnonzero(fold != draw))
        for number, size in enumerate(sizes):
            training = rows.select(order[:size])
            head = solve(training, strength=DEFAULT_STRENGTH, max_gradient=TRIED_GRADIENT)
            logits = head.logits(rows.features[test])
            errors[number, test] = row_errors(task, logits, rows.labels[test])
            _, classes = task.class_rows(training.labels)
            trained[number] += np.bincount(classes, minlength=trained.shape[1]) / DRAWS
    by_draw = np.array([errors[:, fold == draw].mean(axis=1) for draw in range(DRAWS)])
    slopes, means = [_slope(sizes, own) for own in by_draw], by_draw.mean(axis=0)
    slope = _slope(sizes, means)
    sign, base = (-1, 1.0) if task.class_names else (1, 0.0)

    def point(count: int, error: float, spread: float) -> Point:
        low, high = sorted(base + sign * (error + spread * end) for end in (-1, 1))
        bounds = (max(low, 0.0), min(high, 1.0) if task.class_names else high)
        return Point(count, base + sign * error, *bounds)

    deviation = errors.std(axis=1) * ERRORS_OF_90 / total**0.5
    points = map(point, sizes.tolist(), means.tolist(), deviation.tolist())
    forecast = []
    for times in TIMES_AS_MANY:
        count = times * total
        shrink = (count / sizes[-1]) ** slope
        of_slopes = float(np.std([(count / sizes[-1]) ** one for one in slopes])) / DRAWS**0.5
        unsure = ERRORS_OF_90 * means[-1] * of_slopes + LAW_ERROR * means[-1] * (1 - shrink)
        forecast.append(point(count, means[-1] * shrink, float(np.hypot(deviation[-1], unsure))))
    gains = _gains(task, rows.labels, errors, trained, slope)
    metric = "accuracy" if task.class_names else "mae"
    return Curve(metric, [*points], forecast, gains)


def _slope(sizes: NDArray[np.int64], errors: NDArray[np.float64]) -> float:
    """Return the exponent of the power law through errors, at most 0; larger sizes count more."""
    found = np.polyfit(np.log(sizes), np.log(np.maximum(errors, 1e-6)), 1, w=sizes**0.25)
    return min(float(found[0]), 0.0)


def _gains(
    task: Task,
    labels: Labels,
    errors: NDArray[np.float64],
    trained: NDArray[np.float64],
    slope: float,
) -> dict[str, float]:
    """Return how many points of accuracy more rows of each class would give, by their errors."""
    gains = {}
    rows, classes = task.class_rows(labels)
    for number, name in enumerate(task.class_names):
        own = rows[classes == number]
        if not len(own) or trained[-1, number] < 1:
            continue
        means = (errors[:, own].sum(axis=1) + 0.5) / (len(own) + 1)
        seen = trained[:, number] >= 1
        is_fitted = len(np.unique(trained[seen, number])) > 1
        mine = _slope(trained[seen, number], means[seen]) if is_fitted else slope
        mine = (len(own) * mine + PRIOR_ROWS * slope) / (len(own) + PRIOR_ROWS)
        error = errors[-1, own].mean()
        more = (len(own) + MORE_OF_A_CLASS) / len(own)
        gains[name] = float(error * (1 - more**mine) * len(own) / len(labels))
    return gains


def choose_to_label(
    features: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    *,
    batch: int,
    batches: int,
) -> NDArray[np.int64]:
    """Return the texts to label, the most useful first: at most ``batch * batches`` row numbers.

    Probabilities are [texts, classes]; without them, texts are only spread. Within a batch each is
    the one with the highest uncertainty², times its distance to those before it. On TREC, 250
    texts on top of 60 reach what 425 random ones do.
    """
    generator = np.random.default_rng(0)
    pool = np.sort(generator.permutation(len(features))[:MAX_TEXTS])
    unit = unit_rows(features[pool])
    sample = unit[generator.permutation(len(unit))[:SAMPLED_TEXTS]]
    value = np.sqrt(np.mean(np.maximum(unit @ sample.T, 0) ** 3, axis=1)) + 1e-6
    if probabilities is not None and probabilities.shape[1] > 1:
        two_best = np.sort(probabilities[pool], axis=1)[:, -2:]
        value *= (1 - (two_best[:, 1] - two_best[:, 0]) + 1e-6) ** 2
    chosen: list[int] = []
    for place in range(min(batch * batches, len(pool))):
        if place % batch == 0:
            distance = np.ones(len(pool), np.float32)
        scores = value * distance
        scores[chosen] = -1
        best = int(scores.argmax())
        chosen.append(best)
        distance = np.minimum(distance, 1 - unit @ unit[best])
    return pool[chosen]
