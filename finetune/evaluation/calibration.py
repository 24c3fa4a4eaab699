"""Calibration of the probabilities, and the accuracy gained by abstaining on unsure rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import wilson_interval

# As in Guo et al. 2017.
BINS = 15
# A threshold is chosen so that the precision is this many standard errors above the target.
ERRORS_OF_MARGIN = 1.0

Confidences = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class ConfidenceBin:
    """The rows, one at least, with a confidence above ``lower`` and at most ``upper``."""

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    """Accuracy by confidence, as a reliability diagram shows it, without empty bins.

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017 (arXiv 1706.04599), section 2.
    The expected calibration error, ``ece``, is above 0 even for perfect probabilities if rows are
    few, since the accuracy of a bin is that of a sample.
    """

    ece: float
    bins: Sequence[ConfidenceBin]


@dataclass(frozen=True)
class CalibrationScores:
    """The mean loss of a row of a split, and the reliability of its probabilities."""

    loss: float
    reliability: Reliability


@dataclass(frozen=True)
class Calibration:
    """Scores of two splits ``before`` and ``after`` scaling the logits by the temperature."""

    temperature: float
    validation: Mapping[str, CalibrationScores]
    test: Mapping[str, CalibrationScores]


@dataclass(frozen=True)
class CoverageCurve:
    """Coverage and accuracy when abstaining below a confidence, for each that occurs: [points].

    El-Yaniv and Wiener, On the Foundations of Noise-free Selective Classification, JMLR 2010.
    Confidences descend; the coverage is the fraction of rows that are accepted.
    """

    confidences: NDArray[np.float64]
    coverages: NDArray[np.float64]
    accuracies: NDArray[np.float64]


def measure_reliability(confidences: Confidences, is_right: NDArray[np.bool_]) -> Reliability:
    """Compare confidence, in 0..1, with accuracy in bins of equal width: both [rows]."""
    # Summed in float64: a thousand float32 confidences near 1 would lose their last digits.
    values = np.asarray(confidences, np.float64)
    numbers = np.clip(np.ceil(values * BINS).astype(np.int64) - 1, 0, BINS - 1)
    counts = np.bincount(numbers, minlength=BINS)
    sums = np.bincount(numbers, weights=values, minlength=BINS)
    right = np.bincount(numbers, weights=is_right, minlength=BINS)
    bins = [
        ConfidenceBin(number / BINS, (number + 1) / BINS, count, total / count, correct / count)
        for number, (count, total, correct) in enumerate(
            zip(counts.tolist(), sums.tolist(), right.tolist(), strict=True)
        )
        if count
    ]
    return Reliability(float(np.abs(sums - right).sum() / len(values)), bins)


def coverage_curve(confidences: Confidences, is_right: NDArray[np.bool_]) -> CoverageCurve:
    """Return coverage and accuracy; rows of equal confidence are accepted together."""
    order = np.argsort(-confidences, kind="stable")
    ordered = np.asarray(confidences, np.float64)[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    accepted = np.arange(1, len(ordered) + 1)[is_last]
    right = np.cumsum(is_right[order])[is_last]
    return CoverageCurve(ordered[is_last], accepted / len(ordered), right / accepted)


def measure_calibration(
    task: Task, validation: tuple[Logits, Labels], test: tuple[Logits, Labels]
) -> Calibration | None:
    """Compare the saved model with itself before temperature scaling; None without scaling."""
    if task.temperature == 1:
        return None

    def score(logits: Logits, labels: Labels) -> CalibrationScores:
        loss = float(task.evaluation_losses(logits, labels).mean(dtype=np.float64))
        return CalibrationScores(loss, measure_reliability(*task.confidences(logits, labels)))

    def compare(logits: Logits, labels: Labels) -> dict[str, CalibrationScores]:
        before = logits * np.float32(task.temperature)
        return {"before": score(before, labels), "after": score(logits, labels)}

    return Calibration(task.temperature, compare(*validation), compare(*test))


def threshold_for_precision(
    confidences: Confidences, is_right: NDArray[np.bool_], *, precision: float
) -> float | None:
    """Return the lowest confidence threshold at which a class reaches a precision.

    The precision minus one standard error (Wilson's) is at least the target. The margin makes up
    for choosing among many thresholds on the same rows: without it the precision on other rows is
    below the target about half the time (``tests/evaluation``). Precision 0.95 takes 19 right
    predictions of 19. None if no confidence is high enough.
    """
    if not len(confidences):
        return None
    curve = coverage_curve(confidences, is_right)
    accepted = np.rint(curve.coverages * len(confidences))
    right = np.rint(curve.accuracies * accepted)
    low, _ = wilson_interval(right, accepted, errors=ERRORS_OF_MARGIN)
    good = np.flatnonzero(low >= precision)
    return float(curve.confidences[good[-1]]) if len(good) else None
