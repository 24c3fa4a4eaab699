"""How good a model is on a split: its metrics, those of each class, and their baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit, WarningMessage
from finetune.tasks.metrics import METRICS, Metric, count_classes
from finetune.tasks.tables import Table, format_interval, format_number, percent

BASELINE = "baseline_"
# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MAX_CLASSES_OF_MATRIX = 500
Array = NDArray[Any]


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class: fractions are 0 where undefined, support is in rows."""

    precision: float
    recall: float
    f1: float
    support: int
    threshold: float | None = None
    average_precision: float | None = None


@dataclass(frozen=True)
class MetricValue:
    """A metric of a split, and a note such as its interval and baseline."""

    metric: Metric
    value: float
    note: str = ""

    def __str__(self) -> str:
        return percent(self.value) if self.metric.is_fraction else format_number(self.value)


@dataclass(frozen=True)
class Scores:
    """The metrics of a model on a split; each is an attribute too, such as ``accuracy``.

    Args:
        baselines: The metrics of always predicting the same, as far as they are compared with it.
        confusion_matrix: Rows of each true class by predicted class, [classes, classes]; empty for
            very many classes, None where rows have not exactly one.
    """

    samples: int
    metrics: dict[str, float]
    baselines: Mapping[str, float] = field(default_factory=dict)
    per_class: Mapping[str, ClassScores] | None = None
    confusion_matrix: Sequence[Sequence[int]] | None = None

    def __getattr__(self, name: str) -> Any:
        part = "baselines" if name.startswith(BASELINE) else "metrics"
        try:
            return vars(self)[part][name.removeprefix(BASELINE)]
        except KeyError:
            raise AttributeError(f"these scores have no {name!r}") from None

    @property
    def values(self) -> list[MetricValue]:
        """The metrics without the loss, the most important first."""
        values = []
        for metric in (METRICS[name] for name in self.metrics if name != "loss"):
            value, notes = self.metrics[metric.name], []
            if metric.is_proportion:
                notes.append(f"95% interval {format_interval(value, self.samples)}")
            if metric.name in self.baselines:
                baseline = MetricValue(metric, self.baselines[metric.name])
                notes.append(f"{self.samples:,} rows; baseline ({metric.baseline}): {baseline}")
            values.append(MetricValue(metric, value, ", ".join(notes)))
        return values

    @property
    def warning(self) -> str:
        """A sentence if the model is no better than a baseline, else empty."""
        for name, baseline in self.baselines.items():
            metric, value = METRICS[name], self.metrics[name]
            if metric.sign * value <= metric.sign * baseline:
                return (
                    f"{metric.title} {MetricValue(metric, value)} is not better than always "
                    f"predicting the {metric.baseline}, {MetricValue(metric, baseline)}"
                )
        return ""

    @property
    def table(self) -> Table | None:
        """The metrics of each class; the interval is that of the recall."""
        if not self.per_class:
            return None
        rows: list[dict[str, str]] = []
        for name, own in self.per_class.items():
            row = {"class": name}
            if own.threshold is not None:
                row["threshold"] = f"{own.threshold:.2f}"
            row["precision"], row["recall"] = percent(own.precision), percent(own.recall)
            row["95% interval"] = format_interval(own.recall, own.support)
            row["F1"] = percent(own.f1)
            if own.average_precision is not None:
                row["average precision"] = percent(own.average_precision)
            rows.append({**row, "rows": str(own.support)})
        return Table("Classes of the test split", [*rows[0]], [[*row.values()] for row in rows])

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, as ``finetune evaluate --json`` prints them."""
        values: dict[str, Any] = {"samples": self.samples, **self.metrics}
        values |= {BASELINE + name: value for name, value in self.baselines.items()}
        if self.per_class is not None:
            values["per_class"] = {
                name: {key: value for key, value in vars(own).items() if value is not None}
                for name, own in self.per_class.items()
            }
        if self.confusion_matrix is not None:
            values["confusion_matrix"] = self.confusion_matrix
        return values

    def with_classes(
        self, names: Sequence[str], labels: Array, predicted: Array, **others: Sequence[float]
    ) -> "Scores":
        """Return the scores with those of each class; ``others`` are more fields of them."""
        classes = len(names)
        weights = np.ones(len(labels))
        right, chosen, true = count_classes(labels, predicted, weights, classes=classes)
        columns: dict[str, Sequence[float]] = {
            "precision": (right / np.maximum(chosen, 1)).tolist(),
            "recall": (right / np.maximum(true, 1)).tolist(),
            "f1": (2 * right / np.maximum(chosen + true, 1)).tolist(),
            "support": true.astype(np.int64).tolist(),
            **others,
        }
        rows = (ClassScores(**row) for row in rows_of(columns))
        matrix: list[list[int]] | None = None if labels.ndim == 2 else []
        if matrix is not None and classes <= MAX_CLASSES_OF_MATRIX:
            pairs = np.bincount(labels * classes + predicted, minlength=classes**2)
            matrix = pairs.reshape(classes, classes).tolist()
        return replace(self, per_class=dict(zip(names, rows, strict=True)), confusion_matrix=matrix)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Scores":
        """Undo ``to_json``."""
        metrics, baselines = (
            {name: float(values[prefix + name]) for name in METRICS if prefix + name in values}
            for prefix in ("", BASELINE)
        )
        classes = values.get("per_class")
        per_class = classes and {name: ClassScores(**own) for name, own in classes.items()}
        return cls(values["samples"], metrics, baselines, per_class, values.get("confusion_matrix"))


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return columns of one length as rows."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def warn_unless_better(scores: Scores, *, emit: Emit) -> None:
    """Emit a warning where a model is no better than a baseline."""
    if scores.warning:
        remedy = "train longer, train more of the model, or look at finetune data check"
        emit(WarningMessage(scores.warning, remedy=remedy))
