"""Charts as SVG that fit a phone, styled by the page around them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup

from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import format_number

Points = Sequence[tuple[float, float]]
# A unit of the view box is about a pixel of a phone; margins hold ticks and names.
WIDTH, HEIGHT = 340.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 12.0, 8.0, 36.0
MAX_TICKS = 5
# A smaller range of values, absolute or relative, is drawn as one value.
MIN_SPREAD = 1e-9
# More points than pixels add nothing.
MAX_POINTS = 600
# With fewer points, each point is marked.
MAX_MARKED_POINTS = 25
ANY = math.nan


def in_percent(fraction: float) -> str:
    """Return a fraction in percent: ``97.5%``."""
    return f"{100 * fraction:.3g}%"


@dataclass(frozen=True)
class Series:
    """A line, dots, or a guide: a thin line to compare others with.

    A guide of one point, with ANY in the place of a number, crosses the chart.
    """

    name: str
    points: Points
    kind: Literal["line", "dots", "guide"] = "line"


@dataclass(frozen=True)
class Axis:
    """An axis; by default from a tick below the lowest point to one above the highest."""

    name: str
    low: float | None = None
    high: float | None = None
    show: Callable[[float], str] = format_number


@dataclass(frozen=True)
class Scale:
    """Maps the numbers of an axis to positions in the view box, ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    step: float

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], start: float, end: float) -> "Scale":
        """Return the scale of an axis for some values."""
        values = [value for value in values if not math.isnan(value)]
        low = min(values, default=0.0) if axis.low is None else axis.low
        high = max(values, default=1.0) if axis.high is None else axis.high
        size = max(abs(low), abs(high))
        if high - low <= MIN_SPREAD * max(size, 1.0):
            widens_down = axis.low is None and high > MIN_SPREAD
            low, high = (low - size, high) if widens_down else (low, low + max(size, 1.0))
        step = _round_up((high - low) / MAX_TICKS)
        low = math.floor(low / step + 1e-9) * step if axis.low is None else low
        high = math.ceil(high / step - 1e-9) * step if axis.high is None else high
        return cls(low, high, start, end, step)

    @property
    def ticks(self) -> list[float]:
        """The numbers written along the axis."""
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return [self.step * number for number in range(first, last + 1)]

    def place(self, value: float) -> float:
        """Return the position of a number, to a tenth of a unit."""
        fraction = (value - self.low) / (self.high - self.low)
        return round(self.start + fraction * (self.end - self.start), 1)


@dataclass(frozen=True)
class Chart:
    """Series that share two axes, under a title."""

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis

    @property
    def description(self) -> str:
        """The chart in words, for those who can't see it."""
        words = [f"{self.y.name} by {self.x.name}."]
        for series in self.series:
            if series.points and series.kind != "guide":
                ends = (series.points[0], series.points[-1])
                first, last = (f"{self.y.show(y)} at {self.x.show(x)}" for x, y in ends)
                words.append(f"{series.name}: {first}, {last}.")
        return " ".join(words)

    @property
    def across(self) -> Scale:
        places = [x for series in self.series for x, _ in series.points]
        return Scale.of(self.x, places, LEFT, WIDTH - RIGHT)

    @property
    def up(self) -> Scale:
        heights = [y for series in self.series for _, y in series.points]
        return Scale.of(self.y, heights, HEIGHT - BOTTOM, TOP)

    @property
    def paths(self) -> list[tuple[str, str]]:
        """Each series as classes and data of an SVG path, with marks of few points."""
        paths = []
        for number, series in enumerate(self.series, start=1):
            shapes = [series]
            if series.kind == "line" and len(series.points) <= MAX_MARKED_POINTS:
                shapes.append(replace(series, kind="dots"))
            paths += [(f"{shape.kind} series-{number}", self._path(shape)) for shape in shapes]
        return paths

    def _path(self, series: Series) -> str:
        across, up = self.across, self.up
        if series.kind == "guide" and len(series.points) == 1:
            [(x, y)] = series.points
            if math.isnan(x):
                return f"M{across.start} {up.place(y)}H{across.end}"
            return f"M{across.place(x)} {up.start}V{up.end}"
        every = math.ceil(len(series.points) / MAX_POINTS)
        shown = [*series.points[:-1:every], *series.points[-1:]]
        placed = [(across.place(x), up.place(y)) for x, y in shown]
        if series.kind == "dots":  # lines without length, with round ends
            return "".join(f"M{x} {y}h0" for x, y in placed)
        return "".join(f"{'L' if number else 'M'}{x} {y}" for number, (x, y) in enumerate(placed))

    def draw(self) -> Markup:
        """Return the chart as an ``svg`` element."""
        template = TEMPLATES.get_template("chart.svg.j2")
        size = {"width": WIDTH, "height": HEIGHT}
        return Markup(template.render(chart=self, across=self.across, up=self.up, **size))


def chart_of(title: str, series: Iterable[Series], x: Axis, y: Axis) -> list[Chart]:
    """Return a chart of the non-empty series; nothing if only guides have points."""
    shown = [line for line in series if line.points]
    return [Chart(title, shown, x, y)] if any(line.kind != "guide" for line in shown) else []


def _round_up(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... and their tenths that is large enough."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))
