"""The tables and the page of ``finetune compare``."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.report.templates import TEMPLATES, without_folder
from finetune.runs.compare import ComparedRun, Comparison
from finetune.tasks.metrics import METRICS, MetricValue
from finetune.tasks.tables import Table, capitalize, format_number, format_value


def render_comparison(comparison: Comparison) -> str:
    """Return ``compare.html``, which needs no other file and names no folders of this machine."""
    options = {
        option: [without_folder(option, value) for value in values]
        for option, values in comparison.options.items()
    }
    tables = tabulate(replace(comparison, options=options))
    return TEMPLATES.get_template("tables.html.j2").render(
        title=" · ".join(run.name for run in comparison.runs),
        subtitle=f"finetune compare · {comparison.samples:,} test rows",
        tables=tables,
    )


def tabulate(comparison: Comparison) -> list[Table]:
    """Return metrics, rows that differ and options that differ, as tables."""
    columns = ("option", *(run.name for run in comparison.runs))
    rows = [
        (option.replace("_", " "), *map(format_value, values))
        for option, values in comparison.options.items()
    ]
    options = Table("Options that differ", columns, rows, text_columns=len(columns))
    return [
        _tabulate_metrics(comparison),
        _tabulate_counts(comparison),
        *([options] if rows else []),
        *(table for run in comparison.runs for table in _tabulate_rows(comparison, run)),
    ]


def _tabulate_metrics(comparison: Comparison) -> Table:
    runs = comparison.runs
    rows = [
        (capitalize(METRICS[name].title) if run is runs[0] else "", run.name,
         str(MetricValue(METRICS[name], run.metrics[name])), _format_difference(run, name))
        for name in runs[0].metrics
        for run in runs
        if name in run.metrics
    ]  # fmt: skip
    note = (
        "Differences are paired: both models on the same resamples of the test rows. In brackets "
        "is the 95% interval of the bootstrap; where it contains 0, the difference may be chance."
    )
    if len(runs) > 2:
        note += " Among many comparisons some look significant by chance."
    columns = ("metric", "run", "value", f"difference to {comparison.baseline}")
    title = f"Metrics on {comparison.samples:,} test rows"
    return Table(title, columns, rows, text_columns=2, note=note)


def _format_difference(run: ComparedRun, name: str) -> str:
    """Return a difference such as ``+1.2 [−0.4, +2.9]``, of fractions in percentage points."""
    if run.versus_baseline is None:
        return ""
    if name not in run.versus_baseline.differences:
        return "–"
    interval, is_fraction = run.versus_baseline.differences[name], METRICS[name].is_fraction
    low, value, high = (
        f"{100 * end:+.1f}" if is_fraction else format_number(end, sign="+", digits=3)
        for end in (interval.low, interval.value, interval.high)
    )
    return f"{value} [{low}, {high}]".replace("-", "−")


def _tabulate_counts(comparison: Comparison) -> Table:
    name = comparison.baseline
    rows = [
        (run.name, f"{versus.worse:,}", f"{versus.better:,}", f"{versus.p_value or 0:.3g}")
        for run in comparison.runs
        if (versus := run.versus_baseline)
    ]
    if not comparison.task.class_names:
        columns = ("run", f"{name} closer", "run closer")
        return Table("Rows where one is closer", columns, [row[:3] for row in rows])
    titles = ("run", f"only {name} correct", "only run correct", "McNemar's p")
    note = "The p-value is that of McNemar's exact test, two-sided."
    return Table("Rows that only one predicts correctly", titles, rows, note=note)


def _tabulate_rows(comparison: Comparison, run: ComparedRun) -> Iterator[Table]:
    versus, baseline = run.versus_baseline, comparison.baseline
    if versus is None:
        return
    title = "Only {} correct" if comparison.task.class_names else "{} closer"
    columns = ("text", "true", baseline, run.name)
    for name, count, rows in (
        (run.name, versus.better, versus.better_rows),
        (baseline, versus.worse, versus.worse_rows),
    ):
        cells = [(row.text, *map(format_value, (row.label, row.baseline, row.run))) for row in rows]
        note = f"{len(rows):,} of {count:,} rows." if len(rows) < count else ""
        if rows:
            yield Table(title.format(name), columns, cells, text_columns=4, note=note)
