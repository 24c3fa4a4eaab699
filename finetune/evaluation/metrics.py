"""The metrics of a classifier, as an ``evaluate.Metric`` of our own.

``evaluate.load("accuracy")`` fetches code from the Hub and fails offline; a class does not. This is
the only module that imports ``evaluate``, which takes seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import evaluate
import numpy as np
import torch
from datasets import Features, Value
from numpy.typing import NDArray
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)

from finetune.events import Emit, WarningMessage

# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MOST_CLASSES_OF_MATRIX = 500


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class: the first three in 0..1, 0 where undefined; support in rows."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Scores:
    """The metrics of a model on a split.

    Args:
        loss: Mean cross-entropy.
        accuracy: Share of the rows whose class is right, in 0..1.
        macro_f1: Mean F1 over the classes that are predicted or true, in 0..1.
        per_class: By class name.
        confusion_matrix: Rows of each true class by predicted class: [classes, classes], and empty
            with more than ``MOST_CLASSES_OF_MATRIX`` classes.
    """

    loss: float
    accuracy: float
    macro_f1: float
    per_class: Mapping[str, ClassScores]
    confusion_matrix: Sequence[Sequence[int]]

    @property
    def baseline_accuracy(self) -> float:
        """Accuracy of always answering with the largest class, in 0..1."""
        return max(scores.support for scores in self.per_class.values()) / self.samples

    @property
    def samples(self) -> int:
        """Rows of the split."""
        return sum(scores.support for scores in self.per_class.values())

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, as ``finetune evaluate --json`` prints them."""
        return {"samples": self.samples, **asdict(self)}


def score_logits(
    logits: NDArray[np.float32], labels: NDArray[np.int64], *, class_names: Sequence[str]
) -> Scores:
    """Compare logits with the true classes.

    Args:
        logits: float32 of shape [rows, classes].
        labels: Numbers of the true classes: int64 of shape [rows].
        class_names: The classes in the order of their numbers.

    Raises:
        ValueError: If there are no rows.
    """
    if len(labels) == 0:
        raise ValueError("there are no rows to compute metrics of")
    metric = ClassificationMetrics(class_names)
    metrics = metric.compute(predictions=logits.argmax(axis=-1), references=labels)
    # Copied: labels that Arrow holds are read-only, of which PyTorch warns.
    loss = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels))
    return Scores(loss=loss.item(), **metrics)


def warn_unless_better(scores: Scores, *, emit: Emit) -> None:
    """Emit a warning where a model is no better than always answering with the largest class."""
    if scores.accuracy <= scores.baseline_accuracy:
        emit(
            WarningMessage(
                f"accuracy {scores.accuracy:.1%} is not better than always answering with the "
                f"largest class, {scores.baseline_accuracy:.1%}",
                remedy="train longer, train more of the model, or look at finetune data check",
            )
        )


class ClassificationMetrics(evaluate.Metric):  # type: ignore[misc]
    """Accuracy, macro F1, scores of each class and confusion matrix.

    They are one metric, since evaluate copies the rows for each that it combines, which takes
    longer than to compute it.

    Args:
        class_names: Names, ``[classes]``; the position is the class.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        super().__init__(keep_in_memory=True)
        self.class_names = class_names

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=Features({"predictions": Value("int64"), "references": Value("int64")}),
        )

    def _build_data_dir(self) -> str:
        # evaluate 0.4.6 makes a folder in the user's cache even for metrics kept in memory.
        return ""

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, Any]:
        classes = range(len(self.class_names))
        macro_f1 = f1_score(references, predictions, average="macro", zero_division=0)
        columns = precision_recall_fscore_support(
            references, predictions, labels=classes, zero_division=0
        )
        scores = (ClassScores(*row) for row in zip(*map(np.ndarray.tolist, columns), strict=True))
        has_matrix = len(classes) <= MOST_CLASSES_OF_MATRIX
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "macro_f1": float(macro_f1),
            "per_class": dict(zip(self.class_names, scores, strict=True)),
            "confusion_matrix": confusion_matrix(references, predictions, labels=classes).tolist()
            if has_matrix
            else [],
        }
