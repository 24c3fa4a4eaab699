"""Statistics of predictions: confidence intervals, calibration, accuracy when abstaining."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import Metric, WeightedMetrics, count_numbers
from finetune.tasks.tables import wilson_interval

CONFIDENCE = 0.95
RESAMPLES = 2000
# Rows drawn at a time before computing their metrics.
MAX_DRAWN = 2**17
# Bins of a reliability diagram, as in Guo et al. 2017.
BINS = 15
# Thresholds are chosen so that precision is this many standard errors above the target.
MARGIN_Z = 1.0

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Interval:
    """A number and its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Reliability:
    """Accuracy by confidence, for a reliability diagram: each [bins], without empty bins.

    With few rows, the expected calibration error ``ece`` is above 0 even for perfect probabilities,
    because the accuracy of each bin is measured on a sample.
    """

    ece: float
    confidence: Sequence[float]
    accuracy: Sequence[float]
    rows: Sequence[int]


@dataclass(frozen=True)
class Calibration:
    """The reliability of test rows before and after temperature scaling."""

    temperature: float
    before: Reliability
    after: Reliability


def bootstrap(
    compute: WeightedMetrics, *, rows: int, resamples: int = RESAMPLES
) -> dict[str, NDArray[np.float64]]:
    """Return metrics on resampled rows by name, [resamples]. Each call draws the same resamples."""
    generator = np.random.default_rng(0)
    parts = []
    for sizes in np.array_split(np.arange(resamples), math.ceil(resamples * rows / MAX_DRAWN)):
        drawn = generator.integers(rows, size=(len(sizes), rows))
        parts.append(compute(count_numbers(drawn, np.ones(drawn.shape), rows)))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def percentile_interval(value: float, resampled: Floats) -> Interval:
    """Return a value over all rows with its percentile interval over resampled rows."""
    tail = (1 - CONFIDENCE) / 2
    return Interval(value, *np.quantile(resampled, [tail, 1 - tail]).tolist())


def metric_interval(metric: Metric, value: float, rows: int, resampled: Floats) -> Interval:
    """Return a metric with its interval: Wilson for a proportion, otherwise bootstrap."""
    if metric.is_proportion:
        # The bootstrap interval of a proportion has no width if all rows are correct.
        return Interval(value, *map(float, wilson_interval(value * rows, rows)))
    return percentile_interval(value, resampled)


def mcnemar_p_value(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of the exact McNemar test on rows that one model got right."""
    from scipy.special import bdtr

    rows = first_only + second_only
    return min(1.0, 2 * float(bdtr(min(first_only, second_only), rows, 0.5))) if rows else 1.0


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of at least two independent values, with its Student t interval."""
    from scipy.special import stdtrit

    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = quantile * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def measure_reliability(confidences: Floats, is_right: NDArray[np.bool_]) -> Reliability:
    """Compare confidence, in 0..1, with accuracy in bins of equal width: both [rows]."""
    # Summed in float64: a thousand float32 confidences near 1 would lose their last digits.
    values = np.asarray(confidences, np.float64)
    bins = np.clip(np.ceil(values * BINS).astype(np.int64) - 1, 0, BINS - 1)
    _, bins, counts = np.unique(bins, return_inverse=True, return_counts=True)
    sums, right = np.bincount(bins, values), np.bincount(bins, is_right)
    ece = float(np.abs(sums - right).sum() / len(values))
    columns = (sums / counts, right / counts, counts)
    return Reliability(ece, *(column.tolist() for column in columns))


def measure_calibration(task: Task, logits: Logits, labels: Labels) -> Calibration | None:
    """Compare the saved model with itself before temperature scaling; None without scaling."""
    if task.temperature == 1:
        return None
    before, after = (
        measure_reliability(*task.confidences(scaled, labels))
        for scaled in (logits * np.float32(task.temperature), logits)
    )
    return Calibration(task.temperature, before, after)


def threshold_for_precision(
    confidences: Floats, is_right: NDArray[np.bool_], *, precision: float
) -> float | None:
    """Return the lowest confidence threshold at which a class reaches a precision.

    The precision minus one standard error (Wilson's) is at least the target. The margin makes up
    for choosing among many thresholds on the same rows: without it the precision on other rows is
    below the target about half the time (``tests/evaluation``). Precision 0.95 needs 19 correct
    predictions of 19. None if no confidence is high enough. El-Yaniv and Wiener, On the Foundations
    of Noise-free Selective Classification, 2010.
    """
    order = np.argsort(-confidences, kind="stable")
    ordered = np.asarray(confidences, np.float64)[order]
    # Rows of one confidence are accepted together.
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)[: len(order)])
    low, _ = wilson_interval(np.cumsum(is_right[order])[last], last + 1, errors=MARGIN_Z)
    good = np.flatnonzero(low >= precision)
    return float(ordered[last[good[-1]]]) if len(good) else None
