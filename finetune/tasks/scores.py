"""The metrics of a model on a split, overall and per class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from finetune.tasks.labels import listed
from finetune.tasks.metrics import (
    METRICS,
    MULTI,
    NUMBERS,
    Array,
    Metric,
    ProblemType,
    choose_metric,
    count_classes,
    spelled_as,
)
from finetune.tasks.tables import (
    DisplayMixin,
    Table,
    format_interval,
    format_number,
    percent,
    quote_name,
    wilson_interval,
)

BASELINE = "baseline_"
MULTI_LABEL = ("threshold", "average_precision")
# Models that miss a class with this fraction of the rows are not selected by accuracy.
LARGE_CLASS, MIN_CLASS_ROWS = 0.1, 3
# "Far above" the baseline: this much higher, or at most this fraction of its error.
FAR, FAR_ERROR = 0.2, 0.5
# Near duplicates in training are reported from this fraction of the rows on.
NOTABLE = 0.05
# From this many rows on, percentages have a decimal place.
MANY_ROWS = 200
# The confusion matrix grows with the square of the classes: with 10,000 it would take gigabytes.
MAX_MATRIX_CLASSES = 500


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class. Undefined fractions are None; support is in rows.

    Without rows, all metrics are undefined, and so is the precision without predictions.
    """

    precision: float | None
    recall: float | None
    f1: float | None
    support: int
    threshold: float | None = None
    average_precision: float | None = None


class MetricValue(NamedTuple):
    """A metric and its value on a split."""

    metric: Metric
    value: float

    def __str__(self) -> str:
        return percent(self.value) if self.metric.is_fraction else format_number(self.value)


@dataclass(frozen=True, repr=False)
class Scores(DisplayMixin):
    """The metrics of a model on a split. Each is also an attribute, such as ``accuracy``.

    ``baselines`` are the metrics of the best constant prediction. The confusion matrix, [true,
    predicted], is empty for very many classes, and None unless each row has exactly one class.
    ``intervals`` contains known 95% intervals of metrics that are not proportions.
    ``distinct`` contains the metrics and ``samples`` of rows without near duplicates in training.
    """

    samples: int
    metrics: dict[str, float]
    baselines: Mapping[str, float] = field(default_factory=dict)
    per_class: Mapping[str, ClassScores] | None = None
    confusion_matrix: Sequence[Sequence[int]] | None = None
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    distinct: Mapping[str, float] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        part = "baselines" if name.startswith(BASELINE) else "metrics"
        try:
            return vars(self)[part][name.removeprefix(BASELINE)]
        except KeyError:
            raise AttributeError(f"these scores have no {name!r}") from None

    @property
    def values(self) -> list[MetricValue]:
        """All metrics except the loss, the most important first."""
        metrics = self.metrics.items()
        return [MetricValue(METRICS[name], value) for name, value in metrics if name != "loss"]

    def records(self) -> list[dict[str, Any]]:
        """Return one row with all metrics except per-class metrics."""
        values = self.to_json().items()
        return [{name: value for name, value in values if isinstance(value, float | int)}]

    def limits(self, name: str) -> tuple[float, float] | None:
        """Return the ends of the 95% interval of a metric, or None if unknown."""
        if METRICS[name].is_proportion and self.samples:
            low, high = wilson_interval(self.metrics[name] * self.samples, self.samples)
            return float(low), float(high)
        return self.intervals.get(name)

    def interval(self, name: str, *, digits: int = 1) -> str:
        """Format the 95% interval of a metric, such as ``88.8–97.8%``, or "" if unknown."""
        if not (limits := self.limits(name)):
            return ""
        if METRICS[name].is_fraction:
            return "{:.{digits}f}–{:.{digits}f}%".format(*(100 * x for x in limits), digits=digits)
        return "–".join(map(format_number, limits))

    @property
    def standing(self) -> str:
        """How the model compares with a constant prediction: ``above``, ``far above`` it, or not.

        It ``may be no better than`` a baseline that its interval contains.
        """
        name, baseline = next(iter(self.baselines.items()))
        metric, value = METRICS[name], self.metrics[name]
        low, high = self.limits(name) or (value, value)
        lowest = low if metric.sign > 0 else high
        if metric.sign * value <= metric.sign * baseline:
            return "no better than"
        if metric.sign * lowest <= metric.sign * baseline:
            return "may be no better than"
        is_far = lowest - baseline >= FAR if metric.is_fraction else value <= FAR_ERROR * baseline
        return "far " * is_far + ("above" if metric.sign > 0 else "better than")

    @property
    def is_better(self) -> bool:
        """Whether the interval shows that the model is better than a constant prediction."""
        return not self.samples or "no better" not in self.standing

    def describe(self, rows: str = "test rows") -> str:
        """Describe the metric with a baseline in a sentence. ``rows`` describes the rows."""
        name, baseline = next(iter(self.baselines.items()))
        metric, samples = METRICS[name], self.samples
        digits = 0 if samples < MANY_ROWS else 1

        def show(value: float) -> str:
            return percent(value, digits=digits) if metric.is_fraction else format_number(value)

        value, constant = self.metrics[name], f"always predicting the {metric.baseline} ("
        if name == "accuracy" and self.per_class:
            largest, _ = max(self.per_class.items(), key=lambda item: item[1].support)
            constant = f"the majority-class baseline ({quote_name(largest)}, "
        words = f"{metric.sentence.format(show(value))} on {samples:,} {rows}"
        if interval := self.interval(name, digits=digits):
            words += f" (95% CI {interval})"
        is_open = self.standing.startswith("may")
        words += f", {'which ' * is_open}{self.standing} {constant}{show(baseline)})"
        words += f": {samples:,} rows are too few to tell." if is_open else "."
        return words + self._describe_distinct(metric, digits=digits)

    def _describe_distinct(self, metric: Metric, *, digits: int) -> str:
        """Describe near duplicates in training, if there are many."""
        near = self.samples - int(self.distinct.get("samples", self.samples))
        if near < NOTABLE * self.samples:
            return ""
        what = "numbers or punctuation"
        sentence = f" {near:,} of these rows differ from a training row only in {what}"
        if near == self.samples:
            return f"{sentence}, so it is unknown how well the model does on other texts."
        others = Scores(self.samples - near, {metric.name: self.distinct[metric.name]})
        interval = others.interval(metric.name, digits=digits)
        limits = f" (95% CI {interval})" if interval else ""
        value = metric.sentence.format(others.values[0])
        return f"{sentence}. {value} on the other {others.samples:,}{limits}."

    @property
    def table(self) -> Table | None:
        """The per-class metrics, with the interval of the recall."""
        if not self.per_class:
            return None

        def show(fraction: float | None) -> str:
            return percent(fraction) if fraction is not None and of_class.support else "–"

        rows = []
        for name, of_class in self.per_class.items():
            row = {"class": name}
            if of_class.threshold is not None:
                row["threshold"] = f"{of_class.threshold:.2f}"
            row |= {"precision": show(of_class.precision), "recall": show(of_class.recall)}
            row["95% CI"] = format_interval(of_class.recall or 0.0, of_class.support)
            row["F1"] = show(of_class.f1)
            if of_class.threshold is not None:
                row["average precision"] = show(of_class.average_precision)
            rows.append({**row, "rows": str(of_class.support)})
        untested = [name for name, of_class in self.per_class.items() if not of_class.support]
        note = f"Untested, because none of these rows has the label: {listed(untested)}."
        cells = [[*row.values()] for row in rows]
        title = "Classes of the test split"
        return Table(title, [*rows[0]], cells, note=note if untested else "")

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, in the JSON format of ``finetune evaluate``."""
        values: dict[str, Any] = {"samples": self.samples, **self.metrics}
        values |= {BASELINE + name: value for name, value in self.baselines.items()}
        if self.per_class is not None:
            values["per_class"] = {
                name: {
                    key: value
                    for key, value in vars(of_class).items()
                    if key not in MULTI_LABEL or of_class.threshold is not None
                }
                for name, of_class in self.per_class.items()
            }
        if self.confusion_matrix is not None:
            values["confusion_matrix"] = self.confusion_matrix
        if self.intervals:
            values["intervals"] = dict(self.intervals)
        if self.distinct:
            values["distinct"] = dict(self.distinct)
        return values

    def with_classes(
        self, names: Sequence[str], labels: Array, predicted: Array, *others: Array
    ) -> "Scores":
        """Add per-class metrics to scores. ``others`` are more columns."""
        count, weights = len(names), np.ones(len(labels))
        right, chosen, true = count_classes(labels, predicted, weights, classes=count)
        untested = true == 0
        # A masked value becomes None.
        columns: list[Array] = [
            np.ma.masked_where(untested | (chosen == 0), right / np.maximum(chosen, 1)),
            np.ma.masked_where(untested, right / np.maximum(true, 1)),
            np.ma.masked_where(untested, 2 * right / np.maximum(chosen + true, 1)),
            true.astype(int),
            *others,
        ]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        per_class = {name: ClassScores(*row) for name, row in zip(names, rows, strict=True)}
        matrix: list[list[int]] | None = None if labels.ndim == 2 else []
        if matrix is not None and count <= MAX_MATRIX_CLASSES:
            pairs = np.bincount(labels * count + predicted, minlength=count**2)
            matrix = pairs.reshape(count, count).tolist()
        return replace(self, per_class=per_class, confusion_matrix=matrix)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Scores":
        """Undo ``to_json``."""
        metrics = {name: value for name, value in values.items() if isinstance(value, float)}
        names = [name for name in metrics if name.startswith(BASELINE)]
        baselines = {name.removeprefix(BASELINE): metrics.pop(name) for name in names}
        # Files of earlier versions may have a different order.
        metrics = {name: metrics[name] for name in METRICS if name in metrics} | metrics
        classes = values.get("per_class")
        per_class = classes and {name: ClassScores(**columns) for name, columns in classes.items()}
        intervals = {name: (low, high) for name, (low, high) in values.get("intervals", {}).items()}
        matrix, distinct = values.get("confusion_matrix"), values.get("distinct", {})
        return cls(values["samples"], metrics, baselines, per_class, matrix, intervals, distinct)


def missed_classes(scores: Scores) -> dict[str, float]:
    """Return the row fraction of each large single-label class without a correct prediction."""
    if "accuracy" not in scores.metrics:
        return {}
    least = max(LARGE_CLASS * scores.samples, MIN_CLASS_ROWS)
    return {
        name: of_class.support / scores.samples
        for name, of_class in (scores.per_class or {}).items()
        if of_class.support >= least and not of_class.f1
    }


def selection_score(name: str | None, problem_type: ProblemType, scores: Scores) -> float:
    """Return the score for selecting the best model, from the given or default metric.

    By default, a model that misses a large class ranks below all others, and so does a multi-label
    model that predicts nothing. Among such models, macro F1 or mean average precision decides.
    """
    metrics = scores.metrics
    spelled = spelled_as(name, metrics) if name else None
    metric = METRICS[spelled] if spelled else choose_metric(name, problem_type)
    score = metric.sign * metrics[metric.name]
    if name or problem_type == NUMBERS:
        return score
    if problem_type == MULTI:
        return score or metrics["mean_average_precision"] - 1
    return metrics["macro_f1"] - 1 if missed_classes(scores) else score
