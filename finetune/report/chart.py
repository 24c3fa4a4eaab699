"""SVG charts that fit on a phone, styled by the surrounding page."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from markupsafe import Markup

from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import format_number

Points = Sequence[tuple[float, float]]
# A unit of the view box is about a pixel of a phone; margins hold ticks and names.
WIDTH, HEIGHT = 340.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 8.0, 36.0
MAX_TICKS = 5
# Smaller ranges of values, absolute or relative, are drawn as one value.
MIN_SPREAD = 1e-9
# More points than pixels are useless. If there are few points, each is marked.
MAX_POINTS, MAX_MARKED_POINTS = 600, 25


def in_percent(fraction: float) -> str:
    """Format a fraction in percent: ``97.5%``."""
    return f"{100 * fraction:.3g}%"


class Series(NamedTuple):
    """A line, dots, or a guide, which is a thin line for comparison.

    A guide with one point is vertical. Its second number is NaN.
    """

    name: str
    points: Points
    kind: Literal["line", "dots", "guide"] = "line"


class Axis(NamedTuple):
    """An axis, by default from a tick below the lowest point to a tick above the highest."""

    name: str
    low: float | None = None
    high: float | None = None
    show: Callable[[float], str] = format_number


class Scale:
    """Maps axis values to positions in the view box, from ``start`` to ``end``."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        values = [value for value in values if not math.isnan(value)]
        low = min(values, default=0.0) if axis.low is None else axis.low
        high = max(values, default=1.0) if axis.high is None else axis.high
        size = max(abs(low), abs(high))
        if high - low <= MIN_SPREAD * max(size, 1.0):
            widens_down = axis.low is None and high > MIN_SPREAD
            low, high = (low - size, high) if widens_down else (low, low + max(size, 1.0))
        step = _round_up((high - low) / MAX_TICKS)
        self.low = math.floor(low / step + 1e-9) * step if axis.low is None else low
        self.high = math.ceil(high / step - 1e-9) * step if axis.high is None else high
        self.start, self.end = start, end
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        self.ticks = [step * number for number in range(first, last + 1)]

    def place(self, value: float) -> float:
        """Return the position of a value, rounded to 0.1 units."""
        fraction = (value - self.low) / (self.high - self.low)
        return round(self.start + fraction * (self.end - self.start), 1)


@dataclass(frozen=True)
class Chart:
    """Series that share two axes, with a title."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis

    @property
    def description(self) -> str:
        """The alternative text of the chart."""
        words = [f"{self.y.name} by {self.x.name}."]
        for series in self.series:
            if series.points and series.kind != "guide":
                ends = (series.points[0], series.points[-1])
                first, last = (f"{self.y.show(y)} at {self.x.show(x)}" for x, y in ends)
                words.append(f"{series.name}: {first}, {last}.")
        return " ".join(words)

    @cached_property
    def across(self) -> Scale:
        """The scale of the horizontal axis."""
        places = [x for series in self.series for x, _ in series.points]
        return Scale(self.x, places, LEFT, WIDTH - RIGHT)

    @cached_property
    def up(self) -> Scale:
        """The scale of the vertical axis."""
        heights = [y for series in self.series for _, y in series.points]
        return Scale(self.y, heights, HEIGHT - BOTTOM, TOP)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """The CSS classes and SVG path data of each series, with marks if points are few."""
        paths = []
        for number, series in enumerate(self.series, start=1):
            shapes = [series]
            if series.kind == "line" and len(series.points) <= MAX_MARKED_POINTS:
                shapes.append(series._replace(kind="dots"))
            paths += [(f"{shape.kind} series-{number}", self._path(shape)) for shape in shapes]
        return paths

    def _path(self, series: Series) -> str:
        across, up = self.across, self.up
        if series.kind == "guide" and len(series.points) == 1:
            return f"M{across.place(series.points[0][0])} {up.start}V{up.end}"
        every = math.ceil(len(series.points) / MAX_POINTS)
        shown = [*series.points[:-1:every], *series.points[-1:]]
        placed = [f"{across.place(x)} {up.place(y)}" for x, y in shown]
        if series.kind == "dots":  # zero-length lines with round ends
            return "".join(f"M{place}h0" for place in placed)
        return f"M{'L'.join(placed)}"

    def draw(self) -> Markup:
        """Render the chart as an ``svg`` element."""
        template = TEMPLATES.get_template("chart.svg.j2")
        return Markup(template.render(chart=self, width=WIDTH, height=HEIGHT))


def chart_of(title: str, series: Iterable[Series], x: Axis, y: Axis) -> list[Chart]:
    """Return a chart of the non-empty series, or none if only guides have points."""
    shown = [line for line in series if line.points]
    return [Chart(title, shown, x, y)] if any(line.kind != "guide" for line in shown) else []


def _round_up(least: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
