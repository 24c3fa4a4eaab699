"""Whether probabilities can be believed, and what leaving unsure rows unanswered gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# As in Guo et al. 2017.
BINS = 15


@dataclass(frozen=True)
class ConfidenceBin:
    """The rows whose confidence is above ``lower`` and at most ``upper``.

    Args:
        lower: In 0..1; the first bin has confidence 0 too.
        upper: In 0..1.
        count: Rows, at least one.
        confidence: The mean of theirs, in 0..1.
        accuracy: Share of them whose answer is right, in 0..1.
    """

    lower: float
    upper: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Reliability:
    """Accuracy by confidence, as a reliability diagram shows it.

    Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural Networks, ICML 2017, section 2
    (arXiv 1706.04599).

    Args:
        bins: Of equal width, by confidence ascending; those without rows are left out.
    """

    bins: Sequence[ConfidenceBin]

    @property
    def samples(self) -> int:
        """Rows of all bins."""
        return sum(one.count for one in self.bins)

    @property
    def ece(self) -> float:
        """The expected calibration error, in 0..1: confidence against accuracy, mean over rows.

        On few rows it is above 0 even if the probabilities are right, since the accuracy of a bin
        is that of a sample.
        """
        gaps = (one.count * abs(one.confidence - one.accuracy) for one in self.bins)
        return sum(gaps) / self.samples

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Reliability":
        """Return what ``dataclasses.asdict`` has made of one."""
        return cls([ConfidenceBin(**one) for one in values["bins"]])


@dataclass(frozen=True)
class CoverageCurve:
    """What answering only above a confidence gives, at every confidence that a row has.

    El-Yaniv and Wiener, On the Foundations of Noise-free Selective Classification, JMLR 2010.

    Args:
        confidences: The lowest confidence that is answered, descending: float64 of shape [points].
        coverages: Share of all rows that are answered, in 0..1, ascending to 1: [points].
        accuracies: Share of the answered rows whose answer is right, in 0..1: [points].
    """

    confidences: NDArray[np.float64]
    coverages: NDArray[np.float64]
    accuracies: NDArray[np.float64]


def measure_reliability(
    confidences: NDArray[np.floating[Any]], is_right: NDArray[np.bool_], *, bins: int = BINS
) -> Reliability:
    """Compare confidence with accuracy in bins of equal width.

    Args:
        confidences: Of the answers, in 0..1: of shape [rows], one or more.
        is_right: Whether each answer is right: of shape [rows].
        bins: How many of equal width there are between 0 and 1.

    >>> measure_reliability(np.array([0.9, 0.9]), np.array([True, False])).ece
    0.4
    """
    # Summed in float64: a thousand float32 confidences near 1 would lose their last digits.
    values = np.asarray(confidences, np.float64)
    numbers = np.clip(np.ceil(values * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(numbers, minlength=bins)
    sums = np.bincount(numbers, weights=values, minlength=bins)
    right = np.bincount(numbers, weights=is_right, minlength=bins)
    return Reliability(
        [
            ConfidenceBin(
                lower=number / bins,
                upper=(number + 1) / bins,
                count=int(counts[number]),
                confidence=float(sums[number] / counts[number]),
                accuracy=float(right[number] / counts[number]),
            )
            for number in np.flatnonzero(counts).tolist()
        ]
    )


def coverage_curve(
    confidences: NDArray[np.floating[Any]], is_right: NDArray[np.bool_]
) -> CoverageCurve:
    """Return coverage against accuracy: rows of equal confidence are answered together.

    Args:
        confidences: Of the answers, in 0..1: of shape [rows], one or more.
        is_right: Whether each answer is right: of shape [rows].

    >>> coverage_curve(np.array([0.5, 0.9]), np.array([False, True])).accuracies.tolist()
    [1.0, 0.5]
    """
    order = np.argsort(-confidences, kind="stable")
    ordered = np.asarray(confidences, np.float64)[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    answered = np.arange(1, len(ordered) + 1)[is_last]
    right = np.cumsum(is_right[order])[is_last]
    return CoverageCurve(ordered[is_last], answered / len(ordered), right / answered)
