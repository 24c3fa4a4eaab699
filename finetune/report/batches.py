"""A picture of memory and speed by batch size."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from finetune.batch_finder.results import BatchResult


def draw_batches(results: Sequence[BatchResult], *, to: Path) -> None:
    """Draw the probes that fitted: peak memory above, examples per second below.

    The suffix of the picture's name says its format: ``.svg`` or ``.png``.
    """
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    memory, speed = figure.subplots(2, sharex=True)
    for index, result in enumerate(results):
        _draw_result(result, memory, speed, color=f"C{index}")
    memory.set_ylabel("peak memory, GiB")
    memory.set_title("Dotted: the budget; below, the recommended size", loc="left", fontsize=9)
    speed.set(xlabel="batch size", ylabel="examples/s")
    speed.set_xscale("log", base=2)
    speed.xaxis.set_major_formatter("{x:,.0f}")
    if memory.get_legend_handles_labels()[0]:
        memory.legend(frameon=False, fontsize=8)
    figure.savefig(to, metadata={"Date": None})


def _draw_result(result: BatchResult, memory: Axes, speed: Axes, *, color: str) -> None:
    label = f"{result.device}, {result.mode}, {result.padded_length} tokens"
    # Probes of feature extraction can't be compared with those of updates.
    part = result.probes[-1].part if result.probes else None
    outcomes = [probe.outcome for probe in result.probes if probe.part == part]
    peaks = [(one.batch_size, one.peak_bytes / 2**30) for one in outcomes if one.peak_bytes]
    speeds = [
        (one.batch_size, one.examples_per_second) for one in outcomes if one.examples_per_second
    ]
    for axes, points in ((memory, peaks), (speed, speeds)):
        if points:
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", markersize=4, label=label, color=color)
        axes.grid(axis="y", linewidth=0.4)
    if result.budget_bytes:
        memory.axhline(result.budget_bytes / 2**30, color=color, linestyle=":", linewidth=1)
    if result.recommended:
        speed.axvline(result.recommended, color=color, linestyle=":", linewidth=1)
