"""The figures of a classifier, as ``evaluate.Metric`` classes of our own.

``evaluate.load("accuracy")`` fetches code from the Hub and fails offline; classes do not. This is
the only module that imports ``evaluate``, which takes seconds.
"""

from collections.abc import Sequence
from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    precision_recall_fscore_support,
)


def compute_metrics(
    *, predictions: np.ndarray, references: np.ndarray, class_names: Sequence[str]
) -> dict[str, Any]:
    """Compare predicted with true classes.

    Args:
        predictions: Predicted classes, ``[rows]``, integers in ``0..classes-1``.
        references: True classes, ``[rows]``, integers in ``0..classes-1``.
        class_names: Names, ``[classes]``; the position is the class.

    Returns:
        ``accuracy`` and ``macro_f1`` in 0..1, where ``macro_f1`` is the mean over the classes that
        occur in ``predictions`` or ``references``; ``per_class``, which has ``precision``,
        ``recall``, ``f1`` in 0..1 (0 where undefined) and ``support`` in rows by class name; and
        ``confusion_matrix``, ``[classes, classes]`` in rows, of true by predicted class.

    Raises:
        ValueError: If there are no rows, or not as many predictions as references.
    """
    if len(predictions) == 0:
        raise ValueError("there are no rows to compute metrics of")
    combined = evaluate.combine(
        [metric(class_names) for metric in (Accuracy, MacroF1, PerClass, ConfusionMatrix)]
    )
    computed: dict[str, Any] = combined.compute(predictions=predictions, references=references)
    return computed


class _ClassMetric(evaluate.Metric):  # type: ignore[misc]
    """Hold what the metrics below share: two columns of classes, kept in memory.

    Args:
        class_names: Names, ``[classes]``; the position is the class.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        super().__init__(keep_in_memory=True)
        self.class_names = class_names
        self.classes = range(len(class_names))

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=Features({"predictions": Value("int64"), "references": Value("int64")}),
        )

    def _build_data_dir(self) -> str:
        # evaluate 0.4.6 makes a folder in the user's cache even for metrics kept in memory.
        return ""


class Accuracy(_ClassMetric):
    """Share of the rows whose class is right."""

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(accuracy_score(references, predictions))}


class MacroF1(_ClassMetric):
    """Mean F1 over the classes that occur."""

    def _compute(self, *, predictions: list[int], references: list[int]) -> dict[str, float]:
        score = f1_score(references, predictions, average="macro", zero_division=0)
        return {"macro_f1": float(score)}


class PerClass(_ClassMetric):
    """Precision, recall, F1 and number of rows of each class."""

    def _compute(
        self, *, predictions: list[int], references: list[int]
    ) -> dict[str, dict[str, dict[str, float]]]:
        columns = precision_recall_fscore_support(
            references, predictions, labels=self.classes, zero_division=0
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        names = ("precision", "recall", "f1", "support")
        metrics = [dict(zip(names, row, strict=True)) for row in rows]
        return {"per_class": dict(zip(self.class_names, metrics, strict=True))}


class ConfusionMatrix(_ClassMetric):
    """Rows of each true class by predicted class."""

    def _compute(
        self, *, predictions: list[int], references: list[int]
    ) -> dict[str, list[list[int]]]:
        matrix = confusion_matrix(references, predictions, labels=self.classes)
        return {"confusion_matrix": matrix.tolist()}
