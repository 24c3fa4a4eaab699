"""The page of a cross-validation, and the table of its folds."""

from dataclasses import replace

from finetune.files import write_text_atomically
from finetune.report.templates import TEMPLATES, without_folder
from finetune.runs.folder import SeveralFolder
from finetune.runs.folds import FoldResults, Rows
from finetune.tasks.metrics import MetricValue
from finetune.tasks.tables import MAX_MISTAKES, Table


def write_folds_report(folder: SeveralFolder, results: FoldResults, rows: Rows) -> None:
    """Write the page of a finished cross-validation, which needs no other file."""
    scores, first = results.scores, next(iter(results.runs.values()))
    assert scores
    mistakes = first.task.mistakes(rows)
    tables = [tabulate_folds(results)]
    if scores.table:
        tables.append(replace(scores.table, title="Classes"))
    worst, note = mistakes.rows[:MAX_MISTAKES], mistakes.note.replace("test rows", "rows")
    tables.append(replace(mistakes, rows=worst, note=note, groups=()))
    names = (without_folder(one, getattr(first.facts, one)) for one in ("model", "data"))
    subtitle = " · ".join([*names, first.facts.mode, f"{scores.samples:,} rows out of fold"])
    page = TEMPLATES.get_template("tables.html.j2").render(
        title=folder.path.resolve().name, subtitle=subtitle, tables=tables
    )
    folder.claim(folder.report_file)
    write_text_atomically(folder.report_file, page)


def tabulate_folds(results: FoldResults) -> Table:
    """Return the metrics of each fold and of all rows, with interval and spread."""
    runs, scores, spread = results.runs, results.scores, results.spread
    rows = [
        [str(fold), *map(str, run.test.values), f"{run.test.samples:,}"]
        for fold, run in runs.items()
    ]
    values = next(iter(runs.values())).test.values
    if scores:
        over_rows = [f"95% over {scores.samples:,} rows"]
        for value in scores.values:
            ends = results.intervals.get(value.metric.name)
            limits = (
                [MetricValue(value.metric, one) for one in (ends.low, ends.high)] if ends else []
            )
            over_rows.append(" to ".join(map(str, limits)) or "–")
        rows.append(["all rows", *map(str, scores.values), f"{scores.samples:,}"])
        rows.append([*over_rows, ""])
    if spread:
        deviations = (MetricValue(one.metric, spread[one.metric.name]) for one in values)
        rows.append(["spread over folds (SD)", *map(str, deviations), ""])
    columns = ("fold", *(value.metric.title for value in values), "rows")
    return Table("Folds", columns, rows)
