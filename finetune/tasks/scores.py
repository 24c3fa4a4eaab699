"""How good a model is on a split: its metrics, those of each class, and their baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit, WarningMessage
from finetune.tasks.metrics import METRICS, Metric, count_classes
from finetune.tasks.tables import Table, format_interval, format_number, percent

BASELINE = "baseline_"
# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MAX_CLASSES_OF_MATRIX = 500


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class: fractions are 0 where undefined, support is in rows."""

    precision: float
    recall: float
    f1: float
    support: int
    threshold: float | None = None
    average_precision: float | None = None

    @property
    def cells(self) -> dict[str, str]:
        """The values that there are, as a table shows them, by column."""
        cells = {
            "threshold": None if self.threshold is None else f"{self.threshold:.2f}",
            "precision": percent(self.precision),
            "recall": percent(self.recall),
            "95% interval": format_interval(self.recall, self.support),
            "F1": percent(self.f1),
            "average precision": None
            if self.average_precision is None
            else percent(self.average_precision),
            "rows": str(self.support),
        }
        return {name: cell for name, cell in cells.items() if cell is not None}


@dataclass(frozen=True)
class MetricValue:
    """A metric of a split, and what it is to be compared with."""

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

    @classmethod
    def of(
        cls, metrics: Mapping[str, NDArray[Any]], labels: NDArray[Any], baseline: NDArray[Any]
    ) -> "Scores":
        """Return the scores of a split from its metrics, labels and baseline predictions."""
        weights = np.ones((1, len(labels)))
        baselines = {
            name: METRICS[name].compute(labels, baseline, weights).item()
            for name in metrics
            if METRICS[name].baseline
        }
        return cls(len(labels), {name: one.item() for name, one in metrics.items()}, baselines)

    def __getattr__(self, name: str) -> Any:
        metrics, baselines = (self.__dict__.get(one, {}) for one in ("metrics", "baselines"))
        found = metrics | {BASELINE + metric: value for metric, value in baselines.items()}
        if name not in found:
            raise AttributeError(f"these scores have no {name!r}")
        return found[name]

    @property
    def values(self) -> list[MetricValue]:
        """The metrics without the loss, the one that matters most first."""
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
        """Says that the model is no better than a baseline; empty if it is."""
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
        rows = {name: one.cells for name, one in self.per_class.items()}
        columns = ("class", *next(iter(rows.values())))
        cells = [(name, *own.values()) for name, own in rows.items()]
        return Table("Classes of the test split", columns, cells)

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, as ``finetune evaluate --json`` prints them."""
        found: dict[str, Any] = {
            "samples": self.samples,
            **self.metrics,
            **{BASELINE + name: value for name, value in self.baselines.items()},
        }
        if self.per_class is not None:
            found["per_class"] = {
                label: {name: one for name, one in asdict(own).items() if one is not None}
                for label, own in self.per_class.items()
            }
        if self.confusion_matrix is not None:
            found["confusion_matrix"] = self.confusion_matrix
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Scores":
        """Undo ``to_json``."""
        classes: Mapping[str, Any] | None = found.get("per_class")
        baselines = {
            name.removeprefix(BASELINE): float(value)
            for name, value in found.items()
            if name.startswith(BASELINE)
        }
        return cls(
            samples=found["samples"],
            metrics={name: float(found[name]) for name in METRICS if name in found},
            baselines=baselines,
            per_class=classes and {name: ClassScores(**own) for name, own in classes.items()},
            confusion_matrix=found.get("confusion_matrix"),
        )


def score_classes(
    scores: Scores,
    names: Sequence[str],
    labels: NDArray[Any],
    predicted: NDArray[Any],
    **others: Sequence[float],
) -> Scores:
    """Return scores with those of each class, which may have other fields of ``ClassScores``."""
    classes = len(names)
    counts = count_classes(labels, predicted, np.ones((1, len(labels))), classes=classes)
    right, chosen, true = (one[0] for one in counts)
    precision, recall = right / np.maximum(chosen, 1), right / np.maximum(true, 1)
    f1 = 2 * right / np.maximum(chosen + true, 1)
    columns: dict[str, Sequence[float]] = {
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "support": true.astype(np.int64).tolist(),
        **others,
    }
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    per_class = {name: ClassScores(**row) for name, row in zip(names, rows, strict=True)}
    matrix: list[list[int]] | None = None
    if labels.ndim == 1:
        matrix = []
        if classes <= MAX_CLASSES_OF_MATRIX:
            pairs = np.bincount(labels * classes + predicted, minlength=classes**2)
            matrix = pairs.reshape(classes, classes).tolist()
    return replace(scores, per_class=per_class, confusion_matrix=matrix)


def warn_unless_better(scores: Scores, *, emit: Emit) -> None:
    """Emit a warning where a model is no better than a baseline."""
    if scores.warning:
        remedy = "train longer, train more of the model, or look at finetune data check"
        emit(WarningMessage(scores.warning, remedy=remedy))
