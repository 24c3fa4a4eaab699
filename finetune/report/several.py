"""The tables and pages of a cross-validation and of a sweep."""

from collections.abc import Sequence
from dataclasses import replace

from finetune.files import write_text_atomically
from finetune.report.compare import show_difference
from finetune.report.templates import TEMPLATES, without_folder
from finetune.runs.folder import SeveralFolder
from finetune.runs.folds import FoldResults, Rows
from finetune.runs.sweep import SweepResults
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import MetricValue
from finetune.tasks.tables import MAX_MISTAKES, Table, format_value


def _write(folder: SeveralFolder, subtitle: str, tables: Sequence[Table]) -> None:
    page = TEMPLATES.get_template("tables.html.j2").render(
        title=folder.path.resolve().name, subtitle=subtitle, tables=tables
    )
    write_text_atomically(folder.report_file, page)


def write_folds_report(folder: SeveralFolder, results: FoldResults, rows: Rows) -> None:
    """Write the page of a finished cross-validation, which needs no other file."""
    scores, first = results.scores, next(iter(results.runs.values()))
    assert scores
    mistakes = first.task.mistakes(rows)
    worst, note = mistakes.rows[:MAX_MISTAKES], mistakes.note.replace("test rows", "rows")
    tables = [
        tabulate_folds(results),
        *([replace(scores.table, title="Classes")] if scores.table else []),
        replace(mistakes, rows=worst, note=note, groups=()),
    ]
    names = (without_folder(one, getattr(first.facts, one)) for one in ("model", "data"))
    subtitle = [*names, first.facts.mode, f"{scores.samples:,} rows out of fold"]
    _write(folder, " · ".join(subtitle), tables)


def tabulate_folds(results: FoldResults) -> Table:
    """Return the metrics of each fold and of all rows, with interval and spread."""
    runs, scores, spread = results.runs, results.scores, results.spread
    rows = [
        [str(fold), *map(str, run.test.values), f"{run.test.samples:,}"]
        for fold, run in runs.items()
    ]
    values = next(iter(runs.values())).test.values
    if scores:
        found = [(one.metric, results.intervals.get(one.metric.name)) for one in scores.values]
        intervals = [
            f"{MetricValue(metric, one.low)} to {MetricValue(metric, one.high)}" if one else "–"
            for metric, one in found
        ]
        rows.append(["all rows", *map(str, scores.values), f"{scores.samples:,}"])
        rows.append([f"95% over {scores.samples:,} rows", *intervals, ""])
    if spread:
        deviations = (MetricValue(one.metric, spread[one.metric.name]) for one in values)
        rows.append(["spread over folds (SD)", *map(str, deviations), ""])
    columns = ("fold", *(value.metric.title for value in values), "rows")
    return Table("Folds", columns, rows)


def write_sweep_report(folder: SeveralFolder, results: SweepResults) -> None:
    """Write the page of a sweep, which needs no other file."""
    trials, rows = len(results.trials), results.samples
    subtitle = f"finetune sweep · {trials} trials · {rows:,} validation rows"
    _write(folder, subtitle, [tabulate_sweep(results)])


def tabulate_sweep(results: SweepResults) -> Table:
    """Return the trials, the best first, with their differences to it."""
    metric, names = METRICS[results.metric], [*next(iter(results.trials.values())).options]
    rows = [
        (f"trial-{number}", *(format_value(one.options[name]) for name in names),
         "–" if one.value is None else str(MetricValue(metric, one.value)),
         show_difference(one.difference, metric) if one.difference else "",
         one.verdict or "the best")
        for number, one in results.ranked
    ]  # fmt: skip
    note = (
        f"Differences are paired: both trials on the same resamples of {results.samples:,} "
        "validation rows. In brackets is the 95% interval; where it contains 0, the difference may "
        "be noise. The best of many looks better here than it is: test it on other rows."
    )
    options = (name.replace("_", " ") for name in names)
    columns = ("trial", *options, metric.title, "difference to the best", "verdict")
    return Table("Trials", columns, rows, text_columns=len(columns), note=note)
