"""Metrics of many resamples at once, of how often each row occurs in each: [resamples, rows]."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Of a mean, relative to the largest value.
ROUNDING = 1e-13


def count_classes(weights: Floats, numbers: NDArray[np.int64], *, classes: int) -> Floats:
    """Return how many rows of each class each resample has: [resamples, classes].

    Args:
        weights: Of shape [resamples, rows].
        numbers: The class of each row: [rows].
        classes: How many there are.
    """
    places = numbers + classes * np.arange(len(weights))[:, None]
    counts = np.bincount(places.ravel(), weights.ravel(), minlength=classes * len(weights))
    return np.asarray(counts.reshape(len(weights), classes), np.float64)


def macro_f1(right: Floats, answers: Floats) -> Floats:
    """Return the mean F1 over the classes that are predicted or true: [resamples].

    Args:
        right: Rows of each class that are predicted and true: [resamples, classes].
        answers: How often it is predicted and how often true, together: [resamples, classes].
    """
    f1 = np.divide(2 * right, answers, where=answers > 0, out=np.zeros_like(answers))
    return np.asarray(f1.sum(axis=1) / np.maximum(np.count_nonzero(answers, axis=1), 1))


def correlation(weights: Floats, one: Floats, other: Floats) -> Floats:
    """Return the linear correlation of two columns, 0 where one of them is constant: [resamples].

    Args:
        weights: Of shape [resamples, rows].
        one: Of shape [rows], or [resamples, rows].
        other: As ``one``.
    """
    weights = weights / weights.sum(axis=1, keepdims=True)
    (one, variance), (other, other_variance) = (_center(weights, one), _center(weights, other))
    product = variance * other_variance
    covariance = (weights * one * other).sum(axis=1)
    undefined = np.zeros(len(weights))
    return np.asarray(np.divide(covariance, np.sqrt(product), where=product > 0, out=undefined))


def _center(weights: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return values without their mean, and their variance, 0 where rounding alone gives one."""
    centered = values - (weights * values).sum(axis=1, keepdims=True)
    variance = (weights * centered**2).sum(axis=1)
    return centered, np.where(variance > (ROUNDING * np.abs(values).max()) ** 2, variance, 0.0)


def ranks(weights: Floats, values: Floats) -> Floats:
    """Return the rank of each row's value in each resample, the mean of equal ones: as weights."""
    distinct, numbers = np.unique(values, return_inverse=True)
    counts = count_classes(weights, numbers, classes=len(distinct))
    return np.asarray((np.cumsum(counts, axis=1) - (counts - 1) / 2)[:, numbers])
