"""The tables and the page of ``finetune compare``."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.evaluation.statistics import Interval
from finetune.report.templates import TEMPLATES, without_folder
from finetune.runs.compare import ComparedGroup, ComparedRun, Comparison
from finetune.tasks.metrics import METRICS, Metric
from finetune.tasks.scores import MetricValue
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
    rows = []
    for name in group.runs[0].metrics:
        for run in (one for one in group.runs if name in one.metrics):
            metric, versus = METRICS[name], run.versus_baseline
            difference = versus and versus.differences.get(name)
            rows.append((
                capitalize(metric.title) if run is group.runs[0] else "", run.name,
                str(MetricValue(metric, run.metrics[name])),
                show_difference(difference, metric) if difference else "",
            ))  # fmt: skip
    note = (
        "Differences are paired: both models on the same resamples of the test rows. In brackets "
        "is the 95% interval of the bootstrap; where it contains 0, the difference may be chance. "
        "Among many comparisons some look significant by chance."
    )
    columns = ("metric", "run", "value", f"difference to {group.baseline}")
    return Table("All metrics", columns, rows, text_columns=2, note=note)


def show_difference(difference: Interval, metric: Metric) -> str:
    """Return a difference such as ``+1.2 [−0.4, +2.9]``, of fractions in percentage points."""
    low, value, high = (
        f"{100 * end:+.1f}" if metric.is_fraction else format_number(end, sign="+", digits=3)
        for end in (difference.low, difference.value, difference.high)
    )
    return f"{value} [{low}, {high}]".replace("-", "−")


def _tabulate_counts(group: ComparedGroup) -> Table:
    rows = [
        (run.name, *map(format_value, (versus.worse, versus.better, versus.p_value)))
        for run in group.runs
        if (versus := run.versus_baseline)
    ]
    how = "correct" if group.task.class_names else "closer"
    columns = ("run", f"only {group.baseline} {how}", f"only run {how}", "McNemar's p")
    note = (
        "The p-value is that of McNemar's exact test, two-sided. Of several seeds the rows are "
        "those of the first."
    )
    return Table(f"Rows of which only one is {how}", columns, rows, note=note)


def _tabulate_rows(group: ComparedGroup, run: ComparedRun) -> Iterator[Table]:
    versus, baseline = run.versus_baseline, group.baseline
    if versus is None:
        return
    how = "correct" if group.task.class_names else "closer"
    columns = ("text", "true", baseline, run.name)
    for name, count, rows in (
        (run.name, versus.better, versus.better_rows),
        (baseline, versus.worse, versus.worse_rows),
    ):
        cells = [(row.text, *map(format_value, (row.label, row.baseline, row.run))) for row in rows]
        note = f"{len(rows):,} of {count:,} rows." if len(rows) < count else ""
        if rows:
            yield Table(f"Only {name} {how}", columns, cells, text_columns=4, note=note)
