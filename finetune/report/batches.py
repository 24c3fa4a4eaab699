"""A picture of memory and speed against the batch size."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]


def draw_batches(results: Sequence[Row], *, to: Path) -> None:
    """Draw the probes that fitted: peak memory above, examples a second below.

    Args:
        results: As ``finetune find-batch --json`` prints them.
        to: The picture, by its suffix a ``.svg`` or ``.png``.
    """
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    memory, speed = figure.subplots(2, sharex=True)
    for index, result in enumerate(results):
        color = f"C{index}"
        label = f"{result['device']}, {result['mode']}, {result['max_length']} tokens"
        # The prefix's probes are of another kind than those of updates.
        part = result["probes"][-1]["part"] if result["probes"] else None
        probes = [one for one in result["probes"] if one["part"] == part]
        _plot(memory, probes, "peak_bytes", unit=2**30, label=label, color=color)
        _plot(speed, probes, "examples_per_second", unit=1, label=label, color=color)
        if result["budget_bytes"]:
            memory.axhline(result["budget_bytes"] / 2**30, color=color, linestyle=":", linewidth=1)
        if result["recommended"]:
            speed.axvline(result["recommended"], color=color, linestyle=":", linewidth=1)
    memory.set_ylabel("peak memory, GiB")
    memory.set_title("Dotted: the budget; below, the recommended size", loc="left", fontsize=9)
    speed.set_ylabel("examples/s")
    speed.set_xlabel("batch size")
    speed.set_xscale("log", base=2)
    speed.xaxis.set_major_formatter("{x:,.0f}")
    if memory.get_legend_handles_labels()[0]:
        memory.legend(frameon=False, fontsize=8)
    figure.savefig(to, metadata={"Date": None})


def _plot(
    axes: Axes, probes: Iterable[Row], key: str, *, unit: float, label: str, color: str
) -> None:
    points = sorted((one["batch"], one[key] / unit) for one in probes if one[key] is not None)
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, color=color)
    axes.grid(axis="y", linewidth=0.4)
