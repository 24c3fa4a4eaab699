"""The curves of a run, as an SVG that takes its colours from the page around it."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from finetune.tasks.base import Figure as Metric

# Matplotlib can't write a CSS variable, so it draws in colours that occur nowhere else, which
# are replaced in the SVG. So the curves follow the page between light and dark.
CSS_COLOURS = {
    "#010101": "var(--muted)",
    "#020202": "var(--line)",
    "#030303": "var(--first)",
    "#040404": "var(--second)",
}
MUTED, LINE, FIRST, SECOND = CSS_COLOURS

STYLE: dict[Any, Any] = {
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.color": LINE,
    "legend.frameon": False,
    "legend.labelcolor": MUTED,
    "svg.fonttype": "none",
    "svg.hashsalt": "finetune",
    "text.color": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
NO_METADATA = dict.fromkeys(["Creator", "Date", "Format", "Type"])

Rows = Sequence[Mapping[str, Any]]


def draw_curves(rows: Rows, figures: Sequence[Metric]) -> str:
    """Draw the loss over the updates and, below, the validation metrics.

    Args:
        rows: Of ``metrics.jsonl``. Without validations there is no lower panel.
        figures: The metrics; those that have a curve share one scale.

    Returns:
        An ``svg`` element that uses the CSS variables of ``CSS_COLOURS``.
    """
    drawn = [figure for figure in figures if figure.has_curve]
    panels = 2 if any(f"eval_{drawn[0].key}" in row for row in rows) else 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.6, 2.5 * panels), layout="constrained")
        loss, *below = figure.subplots(panels, sharex=True, squeeze=False)[:, 0]
        _plot(loss, rows, key="loss", label="training", color=FIRST)
        _plot(loss, rows, key="eval_loss", label="validation", color=SECOND, marker="o")
        _finish(loss, title="Loss")
        for score in below:
            for one, color in zip(drawn, (FIRST, SECOND), strict=False):
                _plot(score, rows, key=f"eval_{one.key}", label=one.name, color=color, marker="o")
            _finish(score, title="Validation")
            if drawn[0].is_share:
                score.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        figure.axes[-1].set_xlabel("update")
        return svg_of(figure)


def draw_scatter(points: Sequence[tuple[float, float]]) -> str:
    """Draw predicted over true numbers, and the line on which they are the same."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.0, 4.4), layout="constrained")
        axes = figure.subplots()
        true, predicted = zip(*points, strict=True)
        axes.scatter(true, predicted, s=9, color=FIRST, alpha=0.5)
        axes.axline((true[0], true[0]), slope=1, color=MUTED, linewidth=0.8)
        axes.set(xlabel="true", ylabel="predicted")
        axes.tick_params(length=0)
        return svg_of(figure)


def _plot(axes: Axes, rows: Rows, *, key: str, label: str, color: str, marker: str = "") -> None:
    points = [(row["update"], row[key]) for row in rows if key in row]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, color=color, marker=marker, markersize=4)


def _finish(axes: Axes, *, title: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(axis="y", linewidth=0.6)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)


def svg_of(figure: Figure) -> str:
    """Return a figure drawn in ``STYLE`` as an ``svg`` element in the colours of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    svg = buffer.getvalue()
    for drawn, shown in CSS_COLOURS.items():
        svg = svg.replace(drawn, shown)
    return svg[svg.index("<svg") :]
