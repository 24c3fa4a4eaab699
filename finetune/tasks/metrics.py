"""All metrics: one registry, used to choose the best model, for results, intervals and reports.

A metric is a function of labels, what it ``needs`` of the model, and how often each row counts. To
add one, write it here and register it with ``@metric``; nothing else lists the metrics.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationInvalid, UsageError
from finetune.tasks.shown import Shown
from finetune.tasks.tables import (
    Table,
    format_interval,
    format_number,
    percent,
    quote_name,
    wilson_interval,
)

if TYPE_CHECKING:
    from finetune.tasks.base import Task

Array = NDArray[Any]
Floats = NDArray[np.float64]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
NUMBERS: ProblemType = "regression"
# What a metric reads, with a row for each row of the labels. Predictions are class numbers [rows],
# 0 or 1 for each class [rows, classes], or numbers [rows]; probabilities are [rows, classes].
Needs = Literal["predictions", "probabilities", "losses"]
Compute = Callable[[Array, Array, Floats], float]
# Returns metrics by name from weights: how often each row counts, [rows].
WeightedMetrics = Callable[[Floats], Mapping[str, float]]

# A smaller deviation, relative to the largest value, is rounding noise.
MAX_ROUNDING = 1e-13
BASELINE = "baseline_"
# A model that never gets a class of so many of the rows right is not chosen for its accuracy.
LARGE_CLASS, MIN_ROWS_OF_CLASS = 0.1, 3
# How much better than the baseline is far: a fraction more, or a part of its error.
FAR, FAR_ERROR = 0.2, 0.5
# From so many rows on a percentage has a digit after the point.
MANY_ROWS = 200
# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MAX_CLASSES_OF_MATRIX = 500


@dataclass(frozen=True)
class Metric:
    """A number that says how good predictions are; the title is its name in sentences."""

    name: str
    title: str
    compute: Compute
    problem_types: tuple[ProblemType, ...]
    hub_name: str
    needs: Needs = "predictions"
    sign: int = 1  # -1 if a lower value is better
    is_fraction: bool = True  # in 0..1 and shown in percent
    is_proportion: bool = False  # the fraction of rows that are right, which has an interval
    baseline: str = ""  # what a model that always predicts the same predicts
    sentence: str = "{}"  # how a sentence on the metric begins, where it has a baseline


METRICS: dict[str, Metric] = {}


def metric(
    title: str, *problem_types: ProblemType, hub_name: str, **options: Any
) -> Callable[[Compute], Compute]:
    """Register a function as a metric under its name; the options are fields of ``Metric``."""

    def register(compute: Compute) -> Compute:
        name = compute.__name__
        METRICS[name] = Metric(name, title, compute, problem_types, hub_name, **options)
        return compute

    return register


def metrics_of(problem_type: ProblemType) -> list[Metric]:
    """Return the metrics of a problem type, the most important first."""
    return [metric for metric in METRICS.values() if problem_type in metric.problem_types]


def choose_metric(name: str | None, task: "Task") -> Metric:
    """Return the metric that chooses the best model, by default the first of the task."""
    known = {metric.name: metric for metric in metrics_of(task.problem_type)}
    name = name.replace("-", "_") if name else next(iter(known))
    if name not in known:
        raise ConfigurationInvalid(
            f"--task {task.name} has no metric {name!r} for --metric-for-best-model",
            remedy=f"choose one of {', '.join(known)}",
        )
    return known[name]


def missed_classes(scores: "Scores") -> dict[str, float]:
    """Return large classes, of one a row, that no row rightly got: their fractions of the rows."""
    if "accuracy" not in scores.metrics:
        return {}
    least = max(LARGE_CLASS * scores.samples, MIN_ROWS_OF_CLASS)
    classes = (scores.per_class or {}).items()
    return {
        name: own.support / scores.samples
        for name, own in classes
        if own.support >= least and not own.f1
    }


def selection_score(name: str | None, task: "Task", scores: "Scores") -> float:
    """Return what chooses the best model, the highest: the metric that is named or the default.

    By default a model that misses a large class, or of several labels answers none, comes after all
    others, and what chooses among such models is macro F1, or mean average precision.
    """
    metric, metrics = choose_metric(name, task), scores.metrics
    score = metric.sign * metrics[metric.name]
    if name or task.problem_type == NUMBERS:
        return score
    if task.problem_type == MULTI:
        return score or metrics["mean_average_precision"] - 1
    return metrics["macro_f1"] - 1 if missed_classes(scores) else score


def load_evaluate_metric(name: str) -> Metric:
    """Return a metric of the library ``evaluate``: a folder with its code, or an id of the Hub.

    Its code runs here, so that only a user may name it. It is for all rows, each counted once.
    """
    import evaluate

    def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (OSError, ImportError, TypeError, ValueError) as error:
            raise UsageError(
                f"--evaluate-metric {name} can't be used: {error}",
                remedy="name a folder with a metric, or one of huggingface.co/evaluate-metric",
            ) from error

    def compute(labels: Array, predicted: Array, weights: Floats) -> float:
        result = attempt(module.compute, predictions=predicted, references=labels)
        return float(result.get(module.name, next(iter(result.values()))))

    module = attempt(evaluate.load, name)
    key = f"evaluate_{module.name}"
    METRICS[key] = Metric(key, module.name, compute, (), module.name, is_fraction=False)
    return METRICS[key]


def compute_metrics(
    problem_type: ProblemType, labels: Array, outputs: Mapping[Needs, Array | None], weights: Floats
) -> dict[str, float]:
    """Return the metrics whose needs are among the outputs, by name."""
    return {
        metric.name: metric.compute(labels, needed, weights)
        for metric in metrics_of(problem_type)
        if (needed := outputs.get(metric.needs)) is not None
    }


@metric(
    "accuracy",
    SINGLE,
    hub_name="accuracy",
    is_proportion=True,
    baseline="largest class",
    sentence="{} right",
)
def accuracy(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the fraction of rows whose class is right."""
    return mean(labels == predicted, weights)


@metric("micro F1", MULTI, hub_name="f1", baseline="most frequent classes", sentence="Micro F1 {}")
def micro_f1(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the F1 over the predictions of all classes together."""
    right, chosen, true = count_classes(labels, predicted, weights)
    return float(2 * right.sum() / max((chosen + true).sum(), 1))


@metric("macro F1", SINGLE, MULTI, hub_name="f1")
def macro_f1(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the mean F1 of the classes that are predicted or true."""
    right, chosen, true = count_classes(labels, predicted, weights)
    occurs = chosen + true > 0
    return float((2 * right / np.maximum(chosen + true, 1)).sum() / max(occurs.sum(), 1))


@metric("balanced accuracy", SINGLE, hub_name="balanced_accuracy")
def balanced_accuracy(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the mean recall of the classes that occur."""
    right, _, true = count_classes(labels, predicted, weights)
    return float((right / np.maximum(true, 1)).sum() / max((true > 0).sum(), 1))


@metric("Matthews correlation", SINGLE, hub_name="matthews_correlation", is_fraction=False)
def mcc(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the correlation of predicted and true classes, in -1..1; 0 if one side is constant."""
    right, chosen, true = count_classes(labels, predicted, weights)
    rows = weights.sum()
    spread = (rows**2 - (chosen**2).sum()) * (rows**2 - (true**2).sum())
    return float((right.sum() * rows - chosen @ true) / np.sqrt(spread)) if spread else 0.0


@metric("subset accuracy", MULTI, hub_name="accuracy", is_proportion=True)
def subset_accuracy(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the fraction of rows whose classes are all right, and no other is predicted."""
    return mean((labels == predicted).all(axis=1), weights)


@metric("mean average precision", MULTI, hub_name="map", needs="probabilities")
def mean_average_precision(labels: Array, probabilities: Array, weights: Floats) -> float:
    """Return the mean over the classes that have rows; no threshold is involved."""
    has_rows = weights @ (labels > 0) > 0
    total = average_precisions(labels, probabilities, weights).sum()
    return float(total / max(has_rows.sum(), 1))


@metric("Pearson", NUMBERS, hub_name="pearsonr", is_fraction=False)
def pearson(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the linear correlation, in -1..1; 0 if one side is constant."""
    sides = np.stack([labels, predicted]).astype(np.float64)
    centered = sides - (sides @ weights / weights.sum())[:, None]
    sums = np.sqrt(centered**2 @ weights)
    rounding = MAX_ROUNDING * np.abs(sides).max(axis=1) * np.sqrt(weights.sum())
    if (sums <= rounding).any():
        return 0.0
    return float((centered * weights)[0] @ centered[1] / sums.prod())


@metric("Spearman", NUMBERS, hub_name="spearmanr", is_fraction=False)
def spearman(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the correlation of the ranks."""
    return pearson(_rank(labels, weights), _rank(predicted, weights), weights)


@metric(
    "mean absolute error",
    NUMBERS,
    hub_name="mae",
    sign=-1,
    is_fraction=False,
    baseline="mean",
    sentence="Off by {} on average",
)
def mae(labels: Array, predicted: Array, weights: Floats) -> float:
    """Return the mean distance of predicted and true numbers, in their units."""
    return mean(np.abs(predicted - labels), weights)


@metric("loss", SINGLE, MULTI, NUMBERS, hub_name="loss", needs="losses", sign=-1, is_fraction=False)
def loss(labels: Array, losses: Array, weights: Floats) -> float:
    """Return the mean loss of a row, without class weights."""
    return mean(losses, weights)


def mean(values: Array, weights: Floats) -> float:
    """Return the mean of a value for each row, [rows]."""
    return float(values @ weights / weights.sum())


def count_classes(
    labels: Array, predicted: Array, weights: Floats, *, classes: int = 0
) -> tuple[Array, Array, Array]:
    """Return how often each class is right, predicted and true: each [classes].

    Labels and predictions are class numbers [rows], or 0 and 1: [rows, classes].
    """
    if labels.ndim == 2:
        weights = weights.astype(np.float32)  # exact: these are counts of rows
        return weights @ (labels * predicted), weights @ predicted, weights @ labels
    classes = classes or int(max(labels.max(), predicted.max())) + 1
    return (
        np.bincount(labels, weights * (labels == predicted), classes),
        np.bincount(predicted, weights, classes),
        np.bincount(labels, weights, classes),
    )


def average_precisions(labels: Array, probabilities: Array, weights: Floats) -> Floats:
    """Return the average precision of each class, 0 without rows: [classes]."""
    columns = zip(labels.T > 0, probabilities.T, strict=True)
    return np.array([_average_precision(*column, weights) for column in columns])


def _average_precision(true: NDArray[np.bool_], probabilities: Array, weights: Floats) -> float:
    order = np.argsort(-probabilities, kind="stable")
    ordered, weights = probabilities[order], weights[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    right = np.cumsum(weights * true[order])[is_last]
    precision = right / np.maximum(np.cumsum(weights)[is_last], 1)
    return float(precision @ np.diff(right, prepend=0) / max(right[-1], 1))


def _rank(values: Array, weights: Floats) -> Floats:
    """Return the rank of each row, [rows]; ties get their mean."""
    _, numbers = np.unique(values, return_inverse=True)
    counts = np.bincount(numbers, weights)
    return (np.cumsum(counts) - (counts - 1) / 2)[numbers]


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
    """A metric of a split."""

    metric: Metric
    value: float

    def __str__(self) -> str:
        return percent(self.value) if self.metric.is_fraction else format_number(self.value)


@dataclass(frozen=True, repr=False)
class Scores(Shown):
    """The metrics of a model on a split; each is an attribute too, such as ``accuracy``.

    The baselines are those of always predicting the same. The confusion matrix, [true, predicted],
    is empty for very many classes, None where rows have not exactly one.
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
        metrics = self.metrics.items()
        return [MetricValue(METRICS[name], value) for name, value in metrics if name != "loss"]

    def records(self) -> list[dict[str, Any]]:
        """Return one row with all numbers but those of the classes."""
        return [{name: one for name, one in self.to_json().items() if isinstance(one, float | int)}]

    @property
    def standing(self) -> str:
        """Where the model is from always answering the same: ``above`` or ``far above`` it, or not.

        It ``may be no better than`` a baseline that its interval contains.
        """
        name, baseline = next(iter(self.baselines.items()))
        metric, value = METRICS[name], self.metrics[name]
        lowest = value
        if metric.is_proportion:
            lowest = float(wilson_interval(value * self.samples, self.samples)[0])
        if metric.sign * value <= metric.sign * baseline:
            return "no better than"
        if metric.sign * lowest <= metric.sign * baseline:
            return "may be no better than"
        is_far = lowest - baseline >= FAR if metric.is_fraction else value <= FAR_ERROR * baseline
        return "far " * is_far + ("above" if metric.sign > 0 else "better than")

    @property
    def is_better(self) -> bool:
        """Whether the rows tell the model from always answering the same."""
        return "no better" not in self.standing

    def describe(self, rows: str = "test rows") -> str:
        """Return what the metric with a baseline says, as a sentence; ``rows`` names the rows."""
        name, baseline = next(iter(self.baselines.items()))
        metric, samples = METRICS[name], self.samples
        digits = 0 if samples < MANY_ROWS else 1

        def show(value: float) -> str:
            return percent(value, digits=digits) if metric.is_fraction else format_number(value)

        value, same = self.metrics[name], f"the {metric.baseline}"
        if name == "accuracy" and self.per_class:
            same = quote_name(max(self.per_class.items(), key=lambda one: one[1].support)[0])
        words = f"{metric.sentence.format(show(value))} on {samples:,} {rows}"
        if metric.is_proportion:
            words += f" (95%: {format_interval(value, samples, digits=digits)})"
        is_open = self.standing.startswith("may")
        words += f", {'which ' * is_open}{self.standing} always answering {same} ({show(baseline)})"
        return f"{words}: {samples:,} rows can't tell." if is_open else f"{words}."

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
        self, names: Sequence[str], labels: Array, predicted: Array, *others: Array
    ) -> "Scores":
        """Return the scores with those of each class; ``others`` are more columns of them."""
        count, weights = len(names), np.ones(len(labels))
        right, chosen, true = count_classes(labels, predicted, weights, classes=count)
        f1 = 2 * right / np.maximum(chosen + true, 1)
        columns = (right / np.maximum(chosen, 1), right / np.maximum(true, 1), f1)
        rows = zip(*(own.tolist() for own in (*columns, true.astype(int), *others)), strict=True)
        per_class = {name: ClassScores(*row) for name, row in zip(names, rows, strict=True)}
        matrix: list[list[int]] | None = None if labels.ndim == 2 else []
        if matrix is not None and count <= MAX_CLASSES_OF_MATRIX:
            pairs = np.bincount(labels * count + predicted, minlength=count**2)
            matrix = pairs.reshape(count, count).tolist()
        return replace(self, per_class=per_class, confusion_matrix=matrix)

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
