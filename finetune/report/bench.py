"""The page and the pictures of ``finetune bench``."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.bench.results import BenchResults, Row
from finetune.bench.results import Table as BenchTable
from finetune.bench.tables import CPU, by_device, first_faster, speedup_of, tabulate
from finetune.report.templates import TEMPLATES
from finetune.tasks.figures import Table

# Matplotlib can't write a CSS variable, so it draws in colours that occur nowhere else, which
# are replaced in the SVG. So the curves follow the page between light and dark.
_CSS_COLOURS = {
    "#010101": "var(--muted)",
    "#020202": "var(--line)",
    "#030303": "var(--first)",
    "#040404": "var(--second)",
}
_MUTED, _LINE, _FIRST, _SECOND = _CSS_COLOURS

_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.color": _LINE,
    "legend.frameon": False,
    "legend.labelcolor": _MUTED,
    "svg.fonttype": "none",
    "svg.hashsalt": "finetune",
    "text.color": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
}
_NO_METADATA = dict.fromkeys(["Creator", "Date", "Format", "Type"])

# In a file of its own a picture has no page to take its colours from: these suit light and dark.
_STANDALONE_COLOURS = {
    "var(--muted)": "#7d8590",
    "var(--line)": "#b5bcc4",
    "var(--first)": "#2f7de1",
    "var(--second)": "#d9730d",
}
# A third kind of device in one machine is rare.
_COLOURS = (_FIRST, _SECOND, _MUTED)


def render_bench(results: BenchResults) -> str:
    """Return ``bench.html``, which needs no other file."""
    pictures = {name: draw(results) for name, draw in PICTURES.items()}
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=[(one, _as_shown(one)) for one in tabulate(results)],
        pictures=pictures,
        machine=_tabulate_machine(results),
    )


def _as_shown(table: BenchTable) -> Table:
    return Table(table.title, table.columns, table.rows, text_columns=2)


def _tabulate_machine(results: BenchResults) -> Table:
    machine = results.machine
    found = [
        (f"find-batch, {device}", f"{mode} {size} at 512 tokens")
        for device, sizes in results.found_batches.items()
        for mode, size in sizes.items()
    ]
    rows = [
        ("CPU", machine.cpu),
        ("System", machine.platform),
        *machine.devices.items(),
        *machine.versions.items(),
        *found,
    ]
    return Table("Machine", ("what", "value"), rows, text_columns=2)


def draw_inference(results: BenchResults) -> str:
    """Draw the milliseconds of a batch against its rows, with a line where a device beats the CPU.

    Returns:
        An ``svg`` element in the colours of the page; empty if nothing was measured.
    """
    rows = [row for row in results.of("inference") if row.seconds]
    if not rows:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 3.4), layout="constrained")
        axes = figure.subplots()
        for device, color in zip(dict.fromkeys(row.device for row in rows), _COLOURS, strict=False):
            _draw_line(axes, [row for row in rows if row.device == device], color=color)
            first = first_faster(rows, device)
            for row in rows:
                if (row.device, row.workload) == (device, first):
                    axes.axvline(row.rows, color=color, linestyle=":", linewidth=1)
                    axes.text(
                        row.rows, 0.98, f" {device} is faster from {row.rows} on", color=color,
                        va="top", transform=axes.get_xaxis_transform(),
                    )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")
        axes.set(xlabel="rows of a batch", ylabel="milliseconds a batch")
        axes.grid(axis="y", linewidth=0.6)
        axes.legend(loc="lower right")
        return _svg_of(figure)


def draw_speedups(results: BenchResults) -> str:
    """Draw the speed-up of each device over the CPU as bars: training to the left of evaluation.

    Returns:
        As ``draw_inference``; empty as well if there is no other device than the CPU.
    """
    grouped = by_device(results.of("apple"))
    devices = [
        device for device in dict.fromkeys(row.device for row in results.of("apple"))
        if device != CPU and any(speedup_of(one, device) for one in grouped.values())
    ]  # fmt: skip
    if not devices:
        return ""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 3.0), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for axes, phase in zip(panels, ("training", "evaluation"), strict=True):
            of_phase = [(key[1], one) for key, one in grouped.items() if key[2] == phase]
            _draw_bars(axes, of_phase, devices)
            axes.set_title(phase.capitalize(), loc="left", fontweight="bold")
        panels[0].set_ylabel("times as fast as the CPU")
        panels[1].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
        return _svg_of(figure)


def _svg_of(figure: Figure) -> str:
    """Return a figure drawn in ``_STYLE`` as an ``svg`` element in the colours of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = buffer.getvalue()
    for drawn, shown in _CSS_COLOURS.items():
        svg = svg.replace(drawn, shown)
    return svg[svg.index("<svg") :]


def standalone(svg: str) -> str:
    """Return a picture in colours of its own, for a file."""
    for variable, colour in _STANDALONE_COLOURS.items():
        svg = svg.replace(variable, colour)
    return svg


PICTURES: Mapping[str, Callable[[BenchResults], str]] = {
    "inference": draw_inference,
    "apple": draw_speedups,
}
"""By the group that they are of."""


def _draw_line(axes: Axes, rows: Sequence[Row], *, color: str) -> None:
    sizes = [row.rows for row in rows]
    milliseconds = [1e3 * (row.median_seconds or 0.0) for row in rows]
    axes.plot(sizes, milliseconds, label=rows[0].device, color=color, marker="o", markersize=4)
    lowest = [1e3 * min(row.seconds) for row in rows]
    highest = [1e3 * max(row.seconds) for row in rows]
    axes.fill_between(sizes, lowest, highest, color=color, alpha=0.2, linewidth=0)


def _draw_bars(
    axes: Axes, grouped: Sequence[tuple[str, Mapping[str, Row]]], devices: Sequence[str]
) -> None:
    width = 0.8 / len(devices)
    for number, (device, color) in enumerate(zip(devices, _COLOURS, strict=False)):
        heights = [speedup_of(one, device) or 0.0 for _, one in grouped]
        shift = (number - (len(devices) - 1) / 2) * width
        places = [index + shift for index in range(len(heights))]
        bars = axes.bar(places, heights, width, label=device, color=color)
        axes.bar_label(bars, fmt="{:.1f}", color=_MUTED)
    axes.axhline(1, color=_MUTED, linewidth=0.8)
    axes.set_xticks(range(len(grouped)), [name for name, _ in grouped])
    axes.tick_params(length=0)
