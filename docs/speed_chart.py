"""Draw the README's chart of speed from the tables in docs/benchmarks.md: make screenshots.

The bars are ratios: how many times as fast as ``transformers.Trainer`` this package is. A lighter
end is the range over two runs. The whole commands both save each epoch.
"""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "benchmarks.md"
CHART = Path(__file__).parent / "screenshots" / "speed.svg"
# A unit is a pixel at the full width of the README.
WIDTH, LEFT, UNIT, ROW = 800, 272, 18, 34
TOP, BOTTOM = 34, 10

# Media queries also hold in an image, and the background makes it readable on any page.
STYLE = """
svg { --page: #ffffff; --text: #1d2129; --muted: #5d6673; --bar: #2563c9; }
@media (prefers-color-scheme: dark) {
  svg { --page: #14171c; --text: #e4e7ec; --muted: #9aa4b2; --bar: #6ea8fe; }
}
.page { fill: var(--page); }
text { fill: var(--text); font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
.muted { fill: var(--muted); }
.ratio { font-weight: 600; }
.bar, .range { fill: var(--bar); }
.range { opacity: .45; }
.trainer { stroke: var(--muted); stroke-dasharray: 4 4; }
"""


class Bar(NamedTuple):
    """The ratio of one workload, over all runs, and the figures behind it."""

    name: str
    low: float
    high: float
    figures: str


def numbers_in(cell: str) -> list[float]:
    """Return the numbers in a cell such as ``4,663; 4,722``."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*", cell)]


def span(numbers: list[float]) -> str:
    """Return the range of some numbers: ``4,663–4,722``."""
    ends = dict.fromkeys((min(numbers), max(numbers)))
    return "–".join(f"{number:,.{0 if number >= 100 else 1}f}" for number in ends)


def read_bars(page: str) -> Iterator[Bar]:
    """Yield the comparisons of all layers: first the training alone, then the whole command."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    for device, trained, *cells in (row for row in rows if len(row) == 5):
        if size := re.match(r"all layers, batch size \d+", trained):
            trainer, ours, ratios = (numbers_in(cell) for cell in cells)
            figures = f"{span(ours)} vs. {span(trainer)} examples/s"
            name = f"{device.partition(',')[0]}, {size[0].removeprefix('all layers, ')}"
            yield Bar(f"Training, {name}", min(ratios), max(ratios), figures)
    for size, *cells in (row for row in rows if len(row) == 5 and row[0].startswith("batch size")):
        _, ours, trainer, ratios = (numbers_in(cell) for cell in cells)
        figures = f"{span(ours)} vs. {span(trainer)} s"
        name = f"Whole command, H200, {size.partition(',')[0]}"
        yield Bar(name, ratios[1], ratios[1], figures)


def draw(bars: list[Bar]) -> str:
    """Return the chart as SVG."""
    height = TOP + ROW * len(bars) + BOTTOM
    title = "Speed relative to transformers.Trainer (dashed line)"
    shapes = []
    for number, bar in enumerate(bars):
        y = TOP + ROW * number
        low, high = round(bar.low * UNIT), round(bar.high * UNIT)
        ratio = span([bar.low, bar.high])
        shapes += [
            f'<text x="{LEFT - 10}" y="{y + 21}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect class="range" x="{LEFT}" y="{y + 7}" width="{high}" height="20"/>',
            f'<rect class="bar" x="{LEFT}" y="{y + 7}" width="{low}" height="20"/>',
            f'<text x="{LEFT + high + 8}" y="{y + 21}"><tspan class="ratio">{ratio}×</tspan>'
            f' <tspan class="muted">{escape(bar.figures)}</tspan></text>',
        ]
    words = " ".join(f"{bar.name}: {span([bar.low, bar.high])} times." for bar in bars)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img" aria-label="{title}. {escape(words)}">',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="6"/>',
            f'<text class="muted" x="{LEFT}" y="18">{title}</text>',
            *shapes,
            f'<path class="trainer" d="M{LEFT + UNIT} {TOP}V{height - BOTTOM}"/>',
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    CHART.write_text(draw([*read_bars(PAGE.read_text(encoding="utf-8"))]), encoding="utf-8")
