"""The page and the charts of a bench, and the charts of a search for batch sizes."""

import statistics
from collections.abc import Sequence
from typing import get_args

from finetune.batch_finder.results import BatchResult
from finetune.bench import Phase
from finetune.bench.results import (
    CPU,
    BenchResults,
    by_device,
    first_faster,
    speedup_of,
    tabulate,
)
from finetune.report.chart import ANY, Axis, Chart, Series, chart_of
from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import Table

SIZES = Axis("batch size", is_log=True)


def render_bench(results: BenchResults) -> str:
    """Return ``bench.html``, which needs no other file."""
    machine = results.machine
    facts = [("CPU", machine.cpu), ("System", machine.platform), *machine.devices.items()]
    rows = [*facts, *machine.versions.items()]
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=tabulate(results),
        charts={group: draw(results) for group, draw in CHARTS.items()},
        machine=Table("Machine", ("name", "value"), rows, text_columns=2),
    )


def draw_inference(results: BenchResults) -> list[Chart]:
    """Return milliseconds by batch size, and from where on a device is faster than the CPU."""
    timed = [row for row in results.of("inference") if row.seconds]
    lines = []
    for device in dict.fromkeys(row.device for row in timed):
        rows = [row for row in timed if row.device == device]
        medians = [(row.rows, 1e3 * statistics.median(row.seconds)) for row in rows]
        lines.append(Series(device, medians))
    crossovers = [
        Series(f"{row.device} is faster from {row.rows} on", [(row.rows, ANY)], "guide")
        for row in timed
        if row.workload == first_faster(timed, row.device)
    ]
    axes = (Axis(name, is_log=True) for name in ("rows of a batch", "ms"))
    return chart_of("Milliseconds a batch", [*lines, *crossovers], *axes)


def draw_speedups(results: BenchResults) -> list[Chart]:
    """Return the speed-up of each device over the CPU, in training and in evaluation."""
    timed = [row for row in results.of("apple") if row.seconds]
    devices = [name for name in dict.fromkeys(row.device for row in timed) if name != CPU]
    charts = []
    for phase in get_args(Phase):
        networks = {name: rows for (name, each), rows in by_device(timed).items() if each == phase}
        series = []
        for device in devices:
            speedups = [speedup_of(rows, device) or 0.0 for rows in networks.values()]
            series.append(Series(device, [*enumerate(speedups)], "dots"))
        series.append(Series("the CPU", [(ANY, 1.0)], "guide"))
        show = [*networks].__getitem__
        x = Axis("", -0.5, len(networks) - 0.5, lambda place, show=show: show(round(place)))  # type: ignore[misc]
        title = f"{phase.capitalize()}, times as fast as the CPU"
        charts += chart_of(title, series, x, Axis("times", low=0.0))
    return charts


CHARTS = {"inference": draw_inference, "apple": draw_speedups}
"""By the group that they are of."""


def draw_batches(results: Sequence[BatchResult]) -> list[Chart]:
    """Return peak memory and speed of the trials that fitted, as far as they are known.

    They are of the part that trains, not of feature extraction. The memory budgets and the
    recommended batch sizes are guides.
    """
    peaks, speeds, budgets, recommended = [], [], {}, []
    for result in results:
        name = f"{result.device}, {result.mode}, {result.padded_length} tokens"
        part = result.trials[-1].part if result.trials else None
        trials = [trial for trial in result.trials if trial.part == part]
        memory = [(one.batch_size, one.peak_bytes / 2**30) for one in trials if one.peak_bytes]
        speed = [(one.batch_size, one.examples_per_second or 0.0) for one in trials]
        peaks.append(Series(name, sorted(memory)))
        speeds.append(Series(name, sorted(point for point in speed if point[1])))
        if result.budget_bytes:
            budget = [(ANY, result.budget_bytes / 2**30)]
            budgets[result.device] = Series(f"budget on {result.device}", budget, "guide")
        if result.recommended:
            title = f"{name}: {result.recommended:,} is recommended"
            recommended.append(Series(title, [(result.recommended, ANY)], "guide"))
    gib, per_second = (Axis(unit, low=0.0) for unit in ("GiB", "examples/s"))
    return [
        *chart_of("Peak memory, GiB", [*peaks, *budgets.values()], SIZES, gib),
        *chart_of("Examples a second", [*speeds, *recommended], SIZES, per_second),
    ]
