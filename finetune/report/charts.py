"""The charts of a report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.evaluation.calibration import Reliability, coverage_curve
from finetune.report.chart import Axis, Chart, Points, Series, chart_of, in_percent
from finetune.runs.results import TextLengths
from finetune.tasks.metrics import METRICS

Rows = Sequence[Mapping[str, Any]]
# Of which the style sheet has colours.
MAX_CURVES = 3
# Below so many answers their accuracy says more about them than about the model.
MIN_ANSWERS = 10


def draw_curves(rows: Rows, metrics: Iterable[str]) -> list[Chart]:
    """Return the loss over the steps and, where there were validations, their metrics.

    Args:
        rows: Of ``metrics.jsonl``.
        metrics: Names of metrics; the first of those that have a curve share one scale.
    """
    losses = [
        Series("training", _points(rows, "loss")),
        Series("validation", _points(rows, "eval_loss")),
    ]
    drawn = [METRICS[name] for name in metrics if METRICS[name].has_curve][:MAX_CURVES]
    curves = [Series(one.title, _points(rows, f"eval_{one.name}")) for one in drawn]
    values = (
        Axis("metric", show=in_percent) if any(one.is_fraction for one in drawn) else Axis("metric")
    )
    return [
        *chart_of("Loss", losses, _steps(rows), Axis("loss")),
        *chart_of("Validation metrics", curves, _steps(rows), values),
    ]


def draw_speed_and_memory(rows: Rows) -> list[Chart]:
    """Return examples a second and memory over the steps."""
    speed = [Series("examples/s", _points(rows, "examples_per_second"))]
    memory = [
        Series(name, [(step, size / 2**30) for step, size in _points(rows, key)])
        for name, key in (("held by the process", "held_bytes"), ("in use", "memory_bytes"))
    ]
    return [
        *chart_of("Examples a second", speed, _steps(rows), Axis("examples/s", low=0.0)),
        *chart_of("Memory of the device, GiB", memory, _steps(rows), Axis("GiB", low=0.0)),
    ]


def draw_lengths(lengths: Mapping[str, TextLengths]) -> list[Chart]:
    """Return how many texts of the training split have how many tokens."""
    own = lengths["train"]
    starts = (1 + number * own.bin_tokens for number in range(len(own.bins)))
    bars = [*zip(map(float, starts), map(float, own.bins), strict=True)]
    series = Series("training texts", bars, "bars", bar_width=own.bin_tokens)
    what = "windows" if own.windows else "texts"
    return chart_of(
        f"Training {what} by length", [series], Axis("tokens", low=1.0), Axis(what, low=0.0)
    )


def draw_reliability(splits: Mapping[str, Reliability]) -> list[Chart]:
    """Return accuracy by confidence, as a reliability diagram, of some probabilities by name."""
    series = [
        Series(name, [(one.confidence, one.accuracy) for one in reliability.bins])
        for name, reliability in splits.items()
    ]
    right = Series("as they should be", [(0.0, 0.0), (1.0, 1.0)], "guide")
    axes = (Axis(name, 0.0, 1.0, in_percent) for name in ("probability of the answer", "accuracy"))
    return chart_of("Accuracy by probability", [*series, right], *axes)


def draw_coverage(probabilities: NDArray[np.float64], is_right: NDArray[np.bool_]) -> list[Chart]:
    """Return the accuracy of the surest answers by their share of all."""
    curve = coverage_curve(probabilities, is_right)
    least = MIN_ANSWERS / len(is_right)
    points = zip(curve.coverages.tolist(), curve.accuracies.tolist(), strict=True)
    series = Series("accuracy", [one for one in points if one[0] >= least])
    axes = (
        Axis("answered, the surest first", low=0.0, high=1.0, show=in_percent),
        Axis("accuracy", high=1.0, show=in_percent),
    )
    return chart_of("Accuracy by coverage", [series], *axes)


def draw_scatter(points: Points) -> list[Chart]:
    """Return predicted over true numbers, and the line on which they are the same."""
    numbers = [one for point in points for one in point]
    ends = min(numbers, default=0.0), max(numbers, default=0.0)
    series = [
        Series("test rows", sorted(points), "dots"),
        Series("equal", [(one, one) for one in ends], "guide"),
    ]
    return chart_of("Predicted by true numbers", series, Axis("true"), Axis("predicted"))


def _steps(rows: Rows) -> Axis:
    """Return the axis of the steps, from the first to the last of the run."""
    return Axis("step", low=0.0, high=float(max((row["step"] for row in rows), default=1)))


def _points(rows: Rows, key: str) -> Points:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]
