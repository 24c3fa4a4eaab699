"""The tables and the page of ``finetune compare``."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from finetune.evaluation.statistics import Interval
from finetune.report.templates import TEMPLATES, capitalize
from finetune.runs.compare import ComparedRun, Comparison, DifferingRow
from finetune.tasks.metrics import METRICS, Metric
from finetune.tasks.scores import MetricValue
from finetune.tasks.tables import Table, format_number


def render_comparison(comparison: Comparison) -> str:
    """Return ``compare.html``, which needs no other file and names no folders of this machine."""
    # It loads the Hub's client, which the tables do without.
    from finetune.report.names import without_folder

    options = {
        option: [without_folder(option, value) for value in values]
        for option, values in comparison.options.items()
    }
    comparison = replace(comparison, options=options)
    names = {run.name for run in comparison.runs}
    tables = [
        replace(one, columns=[name if name in names else capitalize(name) for name in one.columns])
        for one in tabulate(comparison)
    ]
    return TEMPLATES.get_template("compare.html.j2").render(comparison=comparison, tables=tables)


def tabulate(comparison: Comparison) -> list[Table]:
    """Return metrics, rows that differ and options that differ, as tables."""
    tables = [_tabulate_metrics(comparison), _tabulate_counts(comparison)]
    if comparison.options:
        tables.append(_tabulate_options(comparison))
    for run in comparison.runs:
        tables += _tabulate_rows(comparison, run)
    return tables


def _tabulate_metrics(comparison: Comparison) -> Table:
    rows = [
        (capitalize(METRICS[name].title) if run is comparison.runs[0] else "", run.name,
         str(MetricValue(METRICS[name], run.test.metrics[name])),
         _format_difference(run, METRICS[name]))
        for name in comparison.runs[0].test.metrics
        for run in comparison.runs
    ]  # fmt: skip
    note = (
        "Differences are paired: both models on the same resamples of the test rows. In brackets "
        "is the 95% interval of the bootstrap; where it contains 0, the difference may be chance."
    )
    if len(comparison.runs) > 2:
        note += " Of many comparisons some look sure by chance."
    columns = ("metric", "run", "value", f"difference to {comparison.baseline}")
    return Table(_title(comparison), columns, rows, text_columns=2, note=note)


def _title(comparison: Comparison) -> str:
    return f"Metrics on {comparison.samples:,} test rows"


def _format_difference(run: ComparedRun, metric: Metric) -> str:
    if run.versus is None:
        return ""
    difference = run.versus.differences.get(metric.name)
    return _format_interval(difference, metric) if difference else "–"


def _format_interval(one: Interval, metric: Metric) -> str:
    """Return a difference such as ``+1.2 [−0.4, +2.9]``, of shares in percentage points."""
    low, value, high = (_format_signed(each, metric) for each in (one.low, one.value, one.high))
    return f"{value} [{low}, {high}]"


def _format_signed(value: float, metric: Metric) -> str:
    text = f"{100 * value:+.1f}" if metric.is_fraction else format_number(value, sign="+", digits=3)
    return text.replace("-", "−")


def _tabulate_counts(comparison: Comparison) -> Table:
    name = comparison.baseline
    rows = [
        (run.name, f"{versus.worse:,}", f"{versus.better:,}", f"{versus.p_value or 0:.3g}")
        for run in comparison.runs
        if (versus := run.versus)
    ]
    if not comparison.task.is_right_or_wrong:
        titles = ("run", f"nearer in {name}", "nearer in it")
        return Table("Rows where one is nearer", titles, [row[: len(titles)] for row in rows])
    columns = ("run", f"right only in {name}", "right only in it", "McNemar's p")
    note = "The p-value is that of McNemar's exact test, two-sided."
    return Table("Rows that one has right and the other wrong", columns, rows, note=note)


def _tabulate_options(comparison: Comparison) -> Table:
    columns = ("option", *(run.name for run in comparison.runs))
    rows = [
        (option.replace("_", " "), *map(_format_label, values))
        for option, values in comparison.options.items()
    ]
    return Table("Options that differ", columns, rows, text_columns=len(columns))


def _tabulate_rows(comparison: Comparison, run: ComparedRun) -> Iterator[Table]:
    versus, baseline = run.versus, comparison.baseline
    if versus is None:
        return
    word, other = ("right", "wrong") if comparison.task.is_right_or_wrong else ("nearer", "farther")
    columns = ("text", "true", baseline, run.name)
    for title, count, rows in (
        (f"{word} in {run.name}, {other} in {baseline}", versus.better, versus.better_rows),
        (f"{word} in {baseline}, {other} in {run.name}", versus.worse, versus.worse_rows),
    ):
        if rows:
            note = f"{len(rows):,} of {count:,} rows." if len(rows) < count else ""
            cells = [*map(_cells, rows)]
            yield Table(capitalize(title), columns, cells, text_columns=4, note=note)


def _cells(row: DifferingRow) -> Sequence[str]:
    return row.text, *map(_format_label, (row.label, row.baseline, row.run))


def _format_label(value: Any) -> str:
    """Return a class, classes, a number or the value of an option as people write it."""
    if isinstance(value, list):
        return ", ".join(map(_format_label, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return format_number(value)
    return "–" if value is None else str(value)
