"""Confidence intervals: of the difference between two models, of the mean over seeds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.metrics import WeightedMetrics

CONFIDENCE = 0.95
RESAMPLES = 2000
# Weights in memory at a time: 32 MB.
MAX_WEIGHTS = 2**22


@dataclass(frozen=True)
class Interval:
    """A number and its 95% confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(
    runs: Sequence[WeightedMetrics], *, rows: int, resamples: int = RESAMPLES
) -> list[dict[str, NDArray[np.float64]]]:
    """Return the metrics of each run on the same resamples of the rows: [resamples] by name."""
    generator = np.random.default_rng(0)
    size = max(1, MAX_WEIGHTS // rows)
    chunks = []
    for first in range(0, resamples, size):
        count = min(size, resamples - first)
        drawn = generator.integers(rows, size=(count, rows)) + rows * np.arange(count)[:, None]
        weights = np.bincount(drawn.ravel(), minlength=count * rows).astype(np.float64)
        chunks.append([compute(weights.reshape(count, rows)) for compute in runs])
    return [
        {name: np.concatenate([chunk[name] for chunk in run]) for name in run[0]}
        for run in zip(*chunks, strict=True)
    ]


def paired_differences(
    run: Mapping[str, NDArray[np.float64]],
    baseline: Mapping[str, NDArray[np.float64]],
    *,
    differences: Mapping[str, float],
) -> dict[str, Interval]:
    """Return the difference of each metric on all rows with its percentile interval."""
    tail = (1 - CONFIDENCE) / 2
    limits = {
        name: np.quantile(values - baseline[name], [tail, 1 - tail]) for name, values in run.items()
    }
    return {name: Interval(differences[name], *map(float, ends)) for name, ends in limits.items()}


def mcnemar_p_value(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, from the rows only one gets right."""
    from scipy.special import bdtr

    rows = first_only + second_only
    return min(1.0, 2 * float(bdtr(min(first_only, second_only), rows, 0.5))) if rows else 1.0


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values, two at least, with its interval by Student's t."""
    from scipy.special import stdtrit

    mean, deviation = float(np.mean(values)), float(np.std(values, ddof=1))
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    half = quantile * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
