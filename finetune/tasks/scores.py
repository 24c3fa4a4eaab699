"""How good a model is on a split: its metrics, those of each class, and what a table shows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.events import Emit, WarningMessage
from finetune.tasks.metrics import METRICS, Metric
from finetune.tasks.tables import Table, format_interval, format_number, percent

BASELINE = "baseline_"
COLUMNS = {
    "threshold": "threshold", "precision": "precision", "recall": "recall",
    "interval": "95% interval", "f1": "F1", "average_precision": "average precision",
    "support": "rows",
}  # fmt: skip


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class: fractions are 0 where undefined, support is in rows.

    Only a model that gives several labels has thresholds and average precisions.
    """

    precision: float
    recall: float
    f1: float
    support: int
    threshold: float | None = None
    average_precision: float | None = None

    @property
    def cells(self) -> dict[str, str]:
        """The values as a table shows them, by column; the interval is that of the recall."""
        cells = {
            "precision": percent(self.precision),
            "recall": percent(self.recall),
            "interval": format_interval(self.recall, self.support),
            "f1": percent(self.f1),
            "support": str(self.support),
        }
        if self.threshold is not None:
            cells["threshold"] = f"{self.threshold:.2f}"
        if self.average_precision is not None:
            cells["average_precision"] = percent(self.average_precision)
        return cells


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
    """The metrics of a model on a split; each of them is an attribute too.

    Args:
        samples: Rows of the split.
        metrics: By name, ``loss`` among them.
        baselines: The metrics of always predicting the same, as far as they are compared with it.
        per_class: By class name; None where labels are numbers.
        confusion_matrix: Rows of each true class by predicted class, [classes, classes]; empty for
            very many classes, None where rows have not exactly one.
    """

    samples: int
    metrics: dict[str, float]
    baselines: Mapping[str, float] = field(default_factory=dict)
    per_class: Mapping[str, ClassScores] | None = None
    confusion_matrix: Sequence[Sequence[int]] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a metric such as ``accuracy``, or a ``baseline_accuracy``."""
        metrics, baselines = (self.__dict__.get(one, {}) for one in ("metrics", "baselines"))
        if name in metrics:
            return metrics[name]
        if (metric := name.removeprefix(BASELINE)) != name and metric in baselines:
            return baselines[metric]
        raise AttributeError(f"these scores have no {name!r}")

    @property
    def values(self) -> list[MetricValue]:
        """The metrics without the loss, the one that matters most first."""
        return [
            MetricValue(METRICS[name], value, self._note(METRICS[name]))
            for name, value in self.metrics.items()
            if name != "loss"
        ]

    def _note(self, metric: Metric) -> str:
        """Return what a metric is compared with: its interval and its baseline."""
        value, baseline = self.metrics[metric.name], self.baselines.get(metric.name)
        notes = []
        if metric.is_proportion:
            notes.append(f"95% interval {format_interval(value, self.samples)}")
        if baseline is not None:
            shown = MetricValue(metric, baseline)
            notes.append(f"{self.samples:,} rows; baseline ({metric.baseline}): {shown}")
        return ", ".join(notes)

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
        """The metrics of each class."""
        if not self.per_class:
            return None
        rows = {name: one.cells for name, one in self.per_class.items()}
        keys = [key for key in COLUMNS if key in next(iter(rows.values()))]
        return Table(
            "Classes of the test split",
            ("class", *map(COLUMNS.__getitem__, keys)),
            [(name, *map(cells.__getitem__, keys)) for name, cells in rows.items()],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, as ``finetune evaluate --json`` prints them."""
        found: dict[str, Any] = {
            "samples": self.samples,
            **self.metrics,
            **{BASELINE + name: value for name, value in self.baselines.items()},
        }
        if self.per_class is not None:
            classes = {name: asdict(one) for name, one in self.per_class.items()}
            found["per_class"] = {name: _without_none(one) for name, one in classes.items()}
        if self.confusion_matrix is not None:
            found["confusion_matrix"] = self.confusion_matrix
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Scores":
        """Return what ``to_json`` has written.

        Raises:
            KeyError: If something is missing.
            TypeError: If something is of another type.
        """
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


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def warn_unless_better(scores: Scores, *, emit: Emit) -> None:
    """Emit a warning where a model is no better than a baseline."""
    if scores.warning:
        remedy = "train longer, train more of the model, or look at finetune data check"
        emit(WarningMessage(scores.warning, remedy=remedy))
