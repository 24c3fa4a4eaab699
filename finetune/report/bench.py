"""The page and the chart of a bench."""

import statistics

from finetune.bench.results import BenchResults, first_faster, tabulate
from finetune.report.chart import ANY, Axis, Chart, Series, chart_of
from finetune.report.templates import TEMPLATES
from finetune.tasks.tables import Table


def render_bench(results: BenchResults) -> str:
    """Return ``bench.html``, which needs no other file."""
    machine = results.machine
    facts = [("CPU", machine.cpu), ("System", machine.platform), *machine.devices.items()]
    rows = [*facts, *machine.versions.items()]
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=tabulate(results),
        charts={"inference": draw_inference(results)},
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
