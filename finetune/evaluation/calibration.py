"""Whether probabilities can be believed, and what abstaining on unsure rows gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.base import Labels, Task
from finetune.tasks.metrics import wilson_interval

# As in Guo et al. 2017.
BINS = 15
ERRORS_OF_MARGIN = 1.0


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
        ece: The expected calibration error, in 0..1: confidence against accuracy, mean over rows.
            On few rows it is above 0 even if the probabilities are right, since the accuracy of a
            bin is that of a sample.
        bins: Of equal width, by confidence ascending; those without rows are left out.
    """

    ece: float
    bins: Sequence[ConfidenceBin]

    @property
    def samples(self) -> int:
        """Rows of all bins."""
        return sum(one.count for one in self.bins)


@dataclass(frozen=True)
class CalibrationScores:
    """How good the probabilities of a split are.

    Args:
        loss: The mean loss of a row, as the task's scores have it.
        reliability: Confidence against accuracy; of any number of labels, of each row and class.
    """

    loss: float
    reliability: Reliability


@dataclass(frozen=True)
class BeforeAndAfter:
    """A split before its logits were divided by the temperature, and after."""

    before: CalibrationScores
    after: CalibrationScores


@dataclass(frozen=True)
class Calibration:
    """What temperature scaling has done: the saved model is that after it.

    Args:
        temperature: By which the last layer was divided.
        validation: The split that it was fitted on.
        test: The test split.
    """

    temperature: float
    validation: BeforeAndAfter
    test: BeforeAndAfter


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
    found = [
        ConfidenceBin(
            lower=number / bins,
            upper=(number + 1) / bins,
            count=int(counts[number]),
            confidence=float(sums[number] / counts[number]),
            accuracy=float(right[number] / counts[number]),
        )
        for number in np.flatnonzero(counts).tolist()
    ]
    return Reliability(float(np.abs(sums - right).sum() / len(values)), found)


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


def measure_calibration(
    task: Task,
    validation: tuple[NDArray[np.float32], Labels],
    test: tuple[NDArray[np.float32], Labels],
) -> Calibration | None:
    """Compare the splits with what they were before the temperature; None where there is none.

    Args:
        task: Of the saved model.
        validation: The saved model's logits, [rows, outputs], and the labels.
        test: Those of the test split.
    """
    if task.temperature == 1:
        return None
    return Calibration(
        task.temperature, _before_and_after(task, *validation), _before_and_after(task, *test)
    )


def _before_and_after(task: Task, logits: NDArray[np.float32], labels: Labels) -> BeforeAndAfter:
    before = logits * np.float32(task.temperature)
    return BeforeAndAfter(_scores(task, before, labels), _scores(task, logits, labels))


def _scores(task: Task, logits: NDArray[np.float32], labels: Labels) -> CalibrationScores:
    loss = float(task.evaluation_losses(logits, labels).mean(dtype=np.float64))
    return CalibrationScores(loss, measure_reliability(*task.confidences(logits, labels)))


def threshold_for_precision(
    confidences: NDArray[np.floating[Any]], is_right: NDArray[np.bool_], *, precision: float
) -> float | None:
    """Return from which confidence on answers of a class are right often enough.

    From there on their precision, less one standard error (Wilson's), is at least the target. The
    margin makes up for choosing among many thresholds on the same rows: without it the precision on
    other rows is below the target about as often as not (``tests/evaluation``). Precision 0.95
    takes 19 right answers of 19.

    Args:
        confidences: Of the answers of a class to validation rows, in 0..1: [answers].
        is_right: Whether each answer is right: [answers].
        precision: The target, in 0..1.

    Returns:
        None where no confidence is high enough.
    """
    if not len(confidences):
        return None
    curve = coverage_curve(confidences, is_right)
    answered = np.rint(curve.coverages * len(confidences)).astype(np.int64)
    right = np.rint(curve.accuracies * answered).astype(np.int64)
    low, _ = wilson_interval(right, answered, errors=ERRORS_OF_MARGIN)
    good = np.flatnonzero(low >= precision)
    return float(curve.confidences[good[-1]]) if len(good) else None
