"""The page and the charts of ``finetune bench``."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from finetune.bench.results import BenchResults, Phase, Row
from finetune.bench.tables import CPU, Key, by_device, first_faster, speedup_of, tabulate
from finetune.report.chart import Axis, Chart, Series, chart_of
from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import Table

# What the bars of a network take of the distance to the next.
_BARS_SHARE = 0.8


def render_bench(results: BenchResults) -> str:
    """Return ``bench.html``, which needs no other file."""
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=tabulate(results),
        charts={group: draw(results) for group, draw in CHARTS.items()},
        machine=_tabulate_machine(results),
    )


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


def draw_inference(results: BenchResults) -> list[Chart]:
    """Return the milliseconds of a batch over its rows, and from where on a device beats the CPU.

    Nothing if nothing was measured.
    """
    timed = [row for row in results.of("inference") if row.seconds]
    devices = [*dict.fromkeys(row.device for row in timed)]
    lines = [
        _draw_line(device, [row for row in timed if row.device == device]) for device in devices
    ]
    heights = [y for line in lines for _, y in line.band]
    crossovers = [
        Series(
            f"{row.device} is faster from {row.rows} on",
            [(row.rows, min(heights)), (row.rows, max(heights))],
            "guide",
        )
        for row in timed
        if row.workload == first_faster(timed, row.device)
    ]
    axes = (Axis(name, is_log=True) for name in ("rows of a batch", "ms"))
    return chart_of("Milliseconds a batch", [*lines, *crossovers], *axes)


def _draw_line(device: str, rows: Sequence[Row]) -> Series:
    """Return the medians of a device, with the range of its timings."""
    lowest = [(row.rows, 1e3 * min(row.seconds)) for row in rows]
    highest = [(row.rows, 1e3 * max(row.seconds)) for row in rows]
    medians = [(row.rows, 1e3 * statistics.median(row.seconds)) for row in rows]
    return Series(device, medians, band=[*lowest, *reversed(highest)])


def draw_speedups(results: BenchResults) -> list[Chart]:
    """Return the speed-up of each device over the CPU, in training and in evaluation.

    Nothing if nothing was measured, or on the CPU alone.
    """
    grouped = by_device(results.of("apple"))
    devices = [
        device for device in dict.fromkeys(row.device for row in results.of("apple"))
        if device != CPU and any(speedup_of(one, device) for one in grouped.values())
    ]  # fmt: skip
    return [_draw_bars(phase, grouped, devices) for phase in get_args(Phase) if devices]


def _draw_bars(
    phase: Phase, grouped: Mapping[Key, Mapping[str, Row]], devices: Sequence[str]
) -> Chart:
    networks = {key[1]: one for key, one in grouped.items() if key[2] == phase}
    width = _BARS_SHARE / len(devices)
    bars = [
        Series(
            device,
            [
                (place - _BARS_SHARE / 2 + number * width, speedup_of(one, device) or 0.0)
                for place, one in enumerate(networks.values())
            ],
            "bars",
            bar_width=width,
        )
        for number, device in enumerate(devices)
    ]
    names = [*networks]
    low, high = -0.5, len(names) - 0.5
    cpu = Series("the CPU", [(low, 1.0), (high, 1.0)], "guide")
    return Chart(
        f"{phase.capitalize()}, times as fast as the CPU",
        [*bars, cpu],
        Axis("", low, high, lambda place: names[round(place)]),
        Axis("times", low=0.0),
    )


CHARTS: Mapping[str, Callable[[BenchResults], list[Chart]]] = {
    "inference": draw_inference,
    "apple": draw_speedups,
}
"""By the group that they are of."""
