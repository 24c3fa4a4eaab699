"""The tables and the page of ``finetune compare``."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.evaluation.statistics import Interval
from finetune.report.templates import TEMPLATES, without_folder
from finetune.runs.compare import ComparedGroup, ComparedRun, Comparison
from finetune.tasks.metrics import METRICS, Metric, MetricValue
from finetune.tasks.tables import Table, capitalize, duration, format_number, format_value


def render_comparison(comparison: Comparison) -> str:
    """Return ``compare.html``, which needs no other file and names no folders of this machine."""
    groups = []
    for group in comparison.groups:
        options = {
            option: [without_folder(option, value) for value in values]
            for option, values in group.options.items()
        }
        groups.append(replace(group, options=options))
    return TEMPLATES.get_template("compare.html.j2").render(groups=groups, tabulate=tabulate)


def tabulate(group: ComparedGroup) -> list[Table]:
    """Return a leaderboard and, of several runs, metrics, rows and options that differ."""
    columns = ("option", *(run.name for run in group.runs))
    rows = [
        (option.replace("_", " "), *map(format_value, values))
        for option, values in group.options.items()
    ]
    options = Table("Options that differ", columns, rows, text_columns=len(columns))
    return [
        _rank(group),
        *([_tabulate_metrics(group), _tabulate_counts(group)] if len(group.runs) > 1 else []),
        *([options] if rows else []),
        *(table for run in group.runs for table in _tabulate_rows(group, run)),
    ]


def _rank(group: ComparedGroup) -> Table:
    """Return the runs by their first metric, with what they cost."""
    metric, has_seeds = group.metric, any(run.spread is not None for run in group.runs)

    def show(value: float) -> str:
        return str(MetricValue(metric, value))

    rows = [
        (run.name, show(run.metrics[metric.name]),
         f"{show(run.interval.low)}–{show(run.interval.high)}",
         *(["–" if run.spread is None else f"± {show(run.spread)}"] if has_seeds else []),
         duration(run.train_seconds), f"{run.parameters / 1e6:,.1f} M",
         f"{run.ms_per_text:.2g} ms" if run.ms_per_text else "–")
        for run in sorted(group.runs, key=lambda run: -run.metrics[metric.name])
    ]  # fmt: skip
    spread = ["over seeds"] if has_seeds else []
    costs = ("training", "size", "a text")
    columns = ("run", metric.title, "95% interval", *spread, *costs)
    title = f"{group.samples:,} test rows of {without_folder('data', group.data)}"
    return Table(title, columns, rows)


def _tabulate_metrics(group: ComparedGroup) -> Table:
    runs = group.runs
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
    columns = ("metric", "run", "value", f"difference to {group.baseline}")
    return Table("All metrics", columns, rows, text_columns=2, note=note)


def _format_difference(run: ComparedRun, name: str) -> str:
    """Return the difference of a run to the baseline in a metric."""
    if run.versus_baseline is None:
        return ""
    if name not in run.versus_baseline.differences:
        return "–"
    return show_difference(run.versus_baseline.differences[name], METRICS[name])


def show_difference(difference: Interval, metric: Metric) -> str:
    """Return a difference such as ``+1.2 [−0.4, +2.9]``, of fractions in percentage points."""
    low, value, high = (
        f"{100 * end:+.1f}" if metric.is_fraction else format_number(end, sign="+", digits=3)
        for end in (difference.low, difference.value, difference.high)
    )
    return f"{value} [{low}, {high}]".replace("-", "−")


def _tabulate_counts(group: ComparedGroup) -> Table:
    name = group.baseline
    rows = [
        (
            run.name,
            f"{versus.worse:,}",
            f"{versus.better:,}",
            "–" if versus.p_value is None else f"{versus.p_value:.3g}",
        )
        for run in group.runs
        if (versus := run.versus_baseline)
    ]
    if not group.task.class_names:
        columns = ("run", f"{name} closer", "run closer")
        return Table("Rows where one is closer", columns, [row[:3] for row in rows])
    titles = ("run", f"only {name} correct", "only run correct", "McNemar's p")
    note = "The p-value is that of McNemar's exact test, two-sided."
    if any(run.seeds > 1 for run in group.runs):
        note += " Of several seeds the rows are those of the first."
    return Table("Rows that only one predicts correctly", titles, rows, note=note)


def _tabulate_rows(group: ComparedGroup, run: ComparedRun) -> Iterator[Table]:
    versus, baseline = run.versus_baseline, group.baseline
    if versus is None:
        return
    title = "Only {} correct" if group.task.class_names else "{} closer"
    columns = ("text", "true", baseline, run.name)
    for name, count, rows in (
        (run.name, versus.better, versus.better_rows),
        (baseline, versus.worse, versus.worse_rows),
    ):
        cells = [(row.text, *map(format_value, (row.label, row.baseline, row.run))) for row in rows]
        note = f"{len(rows):,} of {count:,} rows." if len(rows) < count else ""
        if rows:
            yield Table(title.format(name), columns, cells, text_columns=4, note=note)
