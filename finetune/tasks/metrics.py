"""The registry of all metrics, for model selection, results, intervals and reports.

A metric is a function of labels, the model outputs that it ``needs``, and row weights,
[rows]. If it reads predictions or losses, the weights can also be for several resamples,
[resamples, rows], for one value per resample. To add a metric, write it here and register it with
``@metric``. Metrics are listed nowhere else.

A 95% interval computes all metrics on 2,000 resamples. With 5,000 rows and 77 classes, that takes
0.3 s, and with ``sklearn.metrics`` a minute (docs/measurements.md#own-code-and-scikit-learn). The
tests compare the values.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationError, UsageError

Array = NDArray[Any]
Floats = NDArray[np.float64]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
SINGLE: ProblemType = "single_label_classification"
MULTI: ProblemType = "multi_label_classification"
NUMBERS: ProblemType = "regression"
# A metric reads one of these, with one row per label. Predictions are class numbers [rows],
# 0 or 1 per class [rows, classes], or values [rows]. Probabilities are [rows, classes].
Needs = Literal["predictions", "probabilities", "losses"]
# A number from row weights [rows], or an array [resamples] from [resamples, rows].
Values = Any
Compute = Callable[[Array, Array, Floats], Values]
# Computes metrics, by name, from row weights.
WeightedMetrics = Callable[[Floats], Mapping[str, Values]]

# Smaller deviations, relative to the largest value, are rounding noise.
MAX_ROUNDING = 1e-13


@dataclass(frozen=True)
class Metric:
    """A measure of how good predictions are. The title is its name in sentences."""

    name: str
    title: str
    compute: Compute
    problem_types: tuple[ProblemType, ...]
    hub_name: str
    needs: Needs = "predictions"
    sign: int = 1  # -1 if a lower value is better
    is_fraction: bool = True  # in 0..1 and shown in percent
    is_proportion: bool = False  # the fraction of correct rows, which has an interval
    baseline: str = ""  # the best constant prediction
    sentence: str = "{}"  # start of a sentence about the metric, if it has a baseline


class _Registry(dict[str, Metric]):
    """Metrics by name. Other names belong to the user's ``compute_metrics``."""

    def __missing__(self, name: str) -> Metric:
        # Same convention as in ``transformers.Trainer``. Only ``UserMetrics`` computes these
        # metrics.
        sign = -1 if name.endswith("loss") else 1
        return Metric(name, name, lambda *_: np.nan, (), name, sign=sign, is_fraction=False)


METRICS = _Registry()


def metric(title: str, *problem_types: ProblemType, **options: Any) -> Callable[[Compute], Compute]:
    """Register a function as a metric under its name. The options are fields of ``Metric``."""

    def register(compute: Compute) -> Compute:
        name = compute.__name__
        options.setdefault("hub_name", name)
        METRICS[name] = Metric(name, title, compute, problem_types, **options)
        return compute

    return register


def metrics_of(problem_type: ProblemType) -> list[Metric]:
    """Return the metrics for a problem type, the most important first."""
    return [metric for metric in METRICS.values() if problem_type in metric.problem_types]


def choose_metric(name: str | None, problem_type: ProblemType) -> Metric:
    """Return the metric that selects the best model, by default the first of the problem type."""
    known = [metric.name for metric in metrics_of(problem_type)]
    if name is None:
        return METRICS[known[0]]
    if user := _user_metrics.get():
        known += user.names
    if (spelled := spelled_as(name, known)) is None:
        words = problem_type.replace("_", " ")
        raise ConfigurationError(
            f"--metric-for-best-model {name} is not a metric for {words}",
            remedy=f"choose one of {', '.join(known)}, or a name that compute_metrics returns",
        )
    return METRICS[spelled]


def spelled_as(name: str, known: Collection[str]) -> str | None:
    """Return the registered name for a name with or without the ``eval_`` prefix, or None."""
    plain = name.removeprefix("eval_")
    spellings = (name, plain, plain.replace("-", "_"))
    return next((spelling for spelling in spellings if spelling in known), None)


UserFunction = Callable[[Any], Mapping[str, Any]]
# Names of all_results.json.
_RESERVED = ("samples", "per_class", "confusion_matrix", "intervals", "distinct", "kind")
# Metrics that user functions may round to four digits.
_ROUNDING = 1e-4


class UserMetrics:
    """Metrics from a user's ``compute_metrics``, with the signature of ``transformers.Trainer``.

    ``names`` are known after the first call.
    """

    def __init__(self, function: UserFunction) -> None:
        self.function, self.names = function, list[str]()

    def compute(
        self, predictions: Array, labels: Array, *, known: Mapping[str, float]
    ) -> dict[str, float]:
        """Compute the user metrics, without metrics that have a known name and value."""
        from transformers import EvalPrediction

        returned = self.function(EvalPrediction(predictions=predictions, label_ids=labels))
        try:
            metrics = {
                str(key).removeprefix("eval_"): float(value) for key, value in returned.items()
            }
        except (AttributeError, TypeError, ValueError):
            metrics = {"": np.nan}
        if not np.isfinite([*metrics.values()]).all():
            raise UsageError(
                f"compute_metrics returned {str(returned)[:60]}, not a dict of finite numbers",
                remedy='return a dict such as {"f1": 0.9}',
            )
        for name, value in metrics.items():
            is_other = name in known and abs(value - known[name]) > _ROUNDING
            if is_other or name in _RESERVED or name.startswith("baseline_"):
                raise UsageError(
                    f"compute_metrics returned {value:.4g} as {name}, but results have another "
                    "value of this name",
                    remedy="choose another name for it",
                )
        metrics = {name: value for name, value in metrics.items() if name not in known}
        self.names = [*metrics]
        return metrics


_user_metrics: ContextVar[UserMetrics | None] = ContextVar("user_metrics", default=None)
user_metrics = _user_metrics.get


@contextmanager
def computing(function: UserFunction | None) -> Iterator[None]:
    """Add the metrics of a user function, if any, to all scores."""
    token = _user_metrics.set(UserMetrics(function) if function else None)
    try:
        yield
    finally:
        _user_metrics.reset(token)


def load_evaluate_metric(name: str) -> Metric:
    """Load a metric of the ``evaluate`` library: a folder with its code, or a Hub ID.

    Its code runs in this process, so only the user can choose it. It is computed once on all rows.
    """
    import evaluate

    def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except (OSError, ImportError, TypeError, ValueError) as error:
            remedy = "pass a folder with a metric, or a metric of huggingface.co/evaluate-metric"
            message = f"--evaluate-metric {name} can't be used: {error}"
            raise UsageError(message, remedy=remedy) from error

    def compute(labels: Array, predicted: Array, weights: Floats) -> float:
        result = attempt(module.compute, predictions=predicted, references=labels)
        return float(result.get(module.name, next(iter(result.values()))))

    module = attempt(evaluate.load, name)
    key = f"evaluate_{module.name}"
    METRICS[key] = Metric(key, module.name, compute, (), module.name, is_fraction=False)
    return METRICS[key]


def compute_metrics(
    problem_type: ProblemType, labels: Array, outputs: Mapping[Needs, Array | None], weights: Floats
) -> dict[str, Any]:
    """Compute the metrics whose needs are among the outputs, by name: floats, or [resamples]."""
    values = {
        metric.name: metric.compute(labels, needed, weights)
        for metric in metrics_of(problem_type)
        if (needed := outputs.get(metric.needs)) is not None
    }
    return values if weights.ndim > 1 else {name: float(value) for name, value in values.items()}


@metric("accuracy", SINGLE, is_proportion=True, baseline="largest class", sentence="Accuracy {}")
def accuracy(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the fraction of rows with the correct class."""
    return mean(labels == predicted, weights)


@metric("micro F1", MULTI, hub_name="f1", baseline="most frequent classes", sentence="Micro F1 {}")
def micro_f1(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the F1 over the pooled predictions of all classes."""
    right, chosen, true = count_classes(labels, predicted, weights)
    doubled = 2 * right.sum(axis=-1, dtype=np.float64)
    return doubled / np.maximum((chosen + true).sum(axis=-1), 1)


@metric("macro F1", SINGLE, MULTI, hub_name="f1")
def macro_f1(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the mean F1 of the classes that occur in the labels or predictions."""
    right, chosen, true = count_classes(labels, predicted, weights)
    occurring = (chosen + true > 0).sum(axis=-1)
    return (2 * right / np.maximum(chosen + true, 1)).sum(axis=-1) / np.maximum(occurring, 1)


@metric("balanced accuracy", SINGLE)
def balanced_accuracy(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the mean recall of the classes that occur."""
    right, _, true = count_classes(labels, predicted, weights)
    occurring = (true > 0).sum(axis=-1)
    return (right / np.maximum(true, 1)).sum(axis=-1) / np.maximum(occurring, 1)


@metric("Matthews correlation", SINGLE, hub_name="matthews_correlation", is_fraction=False)
def mcc(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the correlation of predicted and true classes, in -1..1, or 0 if one is constant."""
    right, chosen, true = count_classes(labels, predicted, weights)
    rows = weights.sum(axis=-1)
    spread = (rows**2 - (chosen**2).sum(axis=-1)) * (rows**2 - (true**2).sum(axis=-1))
    covariance = right.sum(axis=-1) * rows - (chosen * true).sum(axis=-1)
    return covariance / np.sqrt(np.where(spread > 0, spread, np.inf))


@metric("subset accuracy", MULTI, hub_name="accuracy", is_proportion=True)
def subset_accuracy(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the fraction of rows whose predicted classes are all correct."""
    return mean((labels == predicted).all(axis=1), weights)


@metric("mean average precision", MULTI, hub_name="map", needs="probabilities")
def mean_average_precision(labels: Array, probabilities: Array, weights: Floats) -> float:
    """Return the mean average precision over classes with rows, which needs no threshold."""
    has_rows = weights @ (labels > 0) > 0
    total = average_precisions(labels, probabilities, weights).sum()
    return float(total / max(has_rows.sum(), 1))


@metric("Pearson", NUMBERS, hub_name="pearsonr", is_fraction=False)
def pearson(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the linear correlation, in -1..1, or 0 if one side is constant."""
    sides = np.stack(np.broadcast_arrays(labels, predicted, weights)[:2]).astype(np.float64)
    rows = weights.sum(axis=-1)
    centered = sides - ((sides * weights).sum(axis=-1) / rows)[..., None]
    sums = np.sqrt((centered**2 * weights).sum(axis=-1))
    rounding = MAX_ROUNDING * np.abs(sides).max(axis=-1) * np.sqrt(rows)
    is_constant = (sums <= rounding).any(axis=0)
    covariance = (centered[0] * centered[1] * weights).sum(axis=-1)
    return covariance / np.where(is_constant, np.inf, sums.prod(axis=0))


@metric("Spearman", NUMBERS, hub_name="spearmanr", is_fraction=False)
def spearman(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the rank correlation, in -1..1."""
    return pearson(_rank(labels, weights), _rank(predicted, weights), weights)


@metric(
    "mean absolute error",
    NUMBERS,
    sign=-1,
    is_fraction=False,
    baseline="mean",
    sentence="Off by {} on average",
)
def mae(labels: Array, predicted: Array, weights: Floats) -> Values:
    """Return the mean distance between predicted and true values, in label units."""
    return mean(np.abs(predicted - labels), weights)


@metric("loss", SINGLE, MULTI, NUMBERS, needs="losses", sign=-1, is_fraction=False)
def loss(labels: Array, losses: Array, weights: Floats) -> Values:
    """Return the mean loss per row, without class weights."""
    return mean(losses, weights)


def mean(values: Array, weights: Floats) -> Values:
    """Return the weighted mean of values, [rows]."""
    return weights @ values / weights.sum(axis=-1)


def count_classes(
    labels: Array, predicted: Array, weights: Floats, *, classes: int = 0
) -> tuple[Array, Array, Array]:
    """Count how often each class is correct, predicted and true: each [..., classes].

    Labels and predictions are class numbers [rows], or 0 and 1: [rows, classes].
    """
    if labels.ndim == 2:
        weights = weights.astype(np.float32)  # exact: these are counts of rows
        return weights @ (labels * predicted), weights @ predicted, weights @ labels
    classes = classes or int(max(labels.max(), predicted.max())) + 1
    return (
        count_numbers(labels, weights * (labels == predicted), classes),
        count_numbers(predicted, weights, classes),
        count_numbers(labels, weights, classes),
    )


def count_numbers(numbers: Array, weights: Floats, size: int) -> Array:
    """Sum the weights, [..., rows], of each number below ``size``: [..., size]."""
    resamples = weights.size // weights.shape[-1]
    cells = numbers + size * np.arange(resamples)[:, None]
    counts = np.bincount(cells.ravel(), weights.ravel(), size * resamples)
    return counts.reshape(*weights.shape[:-1], size)


def average_precisions(labels: Array, probabilities: Array, weights: Floats) -> Floats:
    """Return the average precision of each class, 0 for classes without rows: [classes]."""
    columns = zip(labels.T > 0, probabilities.T, strict=True)
    return np.array([_average_precision(*column, weights) for column in columns])


def _average_precision(true: NDArray[np.bool_], probabilities: Array, weights: Floats) -> float:
    order = np.argsort(-probabilities, kind="stable")
    ordered, weights = probabilities[order], weights[order]
    is_last = np.append(ordered[1:] != ordered[:-1], True)
    right = np.cumsum(weights * true[order])[is_last]
    precision = right / np.maximum(np.cumsum(weights)[is_last], 1)
    return float(precision @ np.diff(right, prepend=0) / max(right[-1], 1))


def _rank(values: Array, weights: Floats) -> Array:
    """Return the rank of each row, [..., rows]. Ties get their mean rank."""
    _, numbers = np.unique(values, return_inverse=True)
    counts = count_numbers(numbers, weights, int(numbers.max()) + 1)
    return (np.cumsum(counts, axis=-1) - (counts - 1) / 2)[..., numbers]
