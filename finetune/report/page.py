"""The reports of runs, folds, benchmarks and audits, each as one page.

The text is in templates, the charts and tables are here. A section with one table is an entry in
``tables``.
"""

import csv
import io
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.bench.results import BenchResults, tabulate
from finetune.config.schema import OPTIONS, Config
from finetune.evaluation.statistics import Calibration, Interval, measure_reliability
from finetune.files import write_text_atomically
from finetune.report.chart import Axis, Chart, Series, chart_of, in_percent
from finetune.report.templates import TEMPLATES, remove_folders, without_folder
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.journal import read_warnings
from finetune.runs.results import ClassWords, RunResults, confused_with, summarize
from finetune.runs.several import Rows as FoldRows
from finetune.runs.several import SeveralResults
from finetune.tasks.explanation import MarkedText
from finetune.tasks.metrics import METRICS, Metric
from finetune.tasks.scores import MetricValue
from finetune.tasks.tables import (
    MAX_MISTAKES,
    Table,
    format_cell,
    format_interval,
    format_number,
    format_value,
    percent,
    shorten_text,
)

if TYPE_CHECKING:
    from finetune.audit.audit import Audit, Record


Rows = Sequence[Mapping[str, Any]]
SHOWN_PROBABILITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
# The style sheet has colors for three.
MAX_CURVES = 3
# The folds page lists all mistakes up to this number.
MAX_FOLD_MISTAKES = 200
# Rows on an audit page. suspects.csv and the JSON contain all of them.
MAX_AUDIT_ROWS = 500
GOOD, ODD, BAD = "✔", "⚠", "✘"
SUSPECTS = "suspects.csv"


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path.

    Reports can be published, so they contain only the last part of local paths.
    """
    config, facts, task = folder.read_config(), results.facts, results.task
    rows, mistakes = folder.read(folder.predictions_file, lambda rows: (rows, task.mistakes(rows)))
    environment = folder.read(folder.environment_file, dict)
    warnings = [
        [remove_folders(text, config) for text in (warning.message, warning.remedy)]
        for warning in read_warnings(folder)
    ]
    rows_of_one_class = [row for row in rows if "probability" in row]
    probabilities = np.array([row["probability"] for row in rows_of_one_class])
    is_right = np.array([row["predicted"] == row["label"] for row in rows_of_one_class])
    data, model = without_folder("data", facts.data), without_folder("model", facts.model)
    unlabeled = results.details.no_labels
    name = folder.path.resolve().name
    page = TEMPLATES.get_template("report.html.j2").render(
        name=name,
        facts=replace(facts, data=data, model=model),
        rank=config.model.lora_rank,
        results=results,
        warnings=warnings,
        groups={group: title for titles in mistakes.groups for group, title in titles.items()},
        first_mistakes=MAX_MISTAKES,
        date=f"{datetime.fromtimestamp(folder.config_file.stat().st_mtime):%-d %B %Y}",
        summary=summarize(results),
        run=shlex.quote(name),
        curves=folder.read(folder.metrics_file, lambda journal: draw_curves(journal, results)),
        numbers=draw_scatter(rows) if rows and not results.test.table else [],
        classes=tabulate_classes(results),
        mistakes=mistakes,
        probabilities=show_probabilities(results.calibration, probabilities, is_right),
        tables={
            **({"texts": unlabeled.table} if unlabeled else {}),
            "words": tabulate_words(results.details.class_words),
            "coverage": tabulate_coverage(probabilities, is_right),
            "costs": tabulate_costs(results),
        },
        options=tabulate_options(config, environment.get("origins", {})),
        environment=tabulate_environment(environment),
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file


def draw_curves(journal: Rows, results: RunResults) -> list[Chart]:
    """Draw loss and validation metrics by epoch, if any.

    Guides mark the kept epoch and the epoch of an early stop.
    """
    training, metrics = results.training, [METRICS[name] for name in results.test.metrics]
    steps, best, last = training.global_step, training.best_global_step, training.epoch
    guides = []
    if best and results.validation_kind == "held out":
        kept = last * best / steps
        guides.append(Series(f"kept (epoch {kept:.3g})", [(kept, math.nan)], "guide"))
    if steps < training.max_steps:
        guides.append(Series(f"early stop (epoch {last:.3g})", [(last, math.nan)], "guide"))

    def curve(name: str, key: str) -> Series:
        return Series(
            name, [(row["epoch"], row[key]) for row in journal if row.get(key) is not None]
        )

    drawn = [metric for metric in metrics if metric.sign > 0][:MAX_CURVES]
    losses = [curve("training", "loss"), curve("validation", "eval_loss")]
    curves = [curve(metric.title, f"eval_{metric.name}") for metric in drawn]
    is_percent = any(metric.is_fraction for metric in drawn)
    values = Axis("metric", show=in_percent if is_percent else format_number)
    epochs = Axis("epoch", low=0.0, high=float(max((row["epoch"] for row in journal), default=1)))
    return [
        *chart_of("Loss", [*losses, *guides], epochs, Axis("loss")),
        *chart_of("Validation metrics", [*curves, *guides], epochs, values),
    ]


def tabulate_classes(results: RunResults) -> Table | None:
    """Return the metrics, training rows and most frequent confusion of each class."""
    table = results.test.table
    if table is None:
        return None
    rows = []
    for row in table.rows:
        others = [f"{other} ({count})" for other, count in confused_with(results.test, row[0])[:1]]
        trained = format_value(results.details.class_rows.get(row[0]))
        rows.append([*row, trained, *(others or ["–"])])
    return replace(table, columns=[*table.columns, "training rows", "misclassified as"], rows=rows)


def tabulate_words(words: Mapping[str, ClassWords]) -> Table:
    """Return the decisive words of each class, one row per class."""
    rows = [
        (
            name,
            str(of_class.rows),
            ", ".join(f"{word.word} {word.change:+.2f} ({word.rows})" for word in of_class.words),
        )
        for name, of_class in words.items()
    ]
    note = (
        "The words whose absence lowers the probability of the predicted class most, with the mean"
        " change over the explained test rows in the class, and how many of these contain the word."
    )
    return Table("Decisive words by class", ("class", "rows", "words"), rows, 3, note)


def draw_scatter(rows: Rows) -> list[Chart]:
    """Draw predicted over true values, and the line of equality."""
    points = sorted((row["label"], row["predicted"]) for row in rows)
    numbers = [number for point in points for number in point] or [0.0]
    equal = [(end, end) for end in (min(numbers), max(numbers))]
    series = [Series("test rows", points, "dots"), Series("equal", equal, "guide")]
    return chart_of("Predicted over true values", series, Axis("true"), Axis("predicted"))


def show_probabilities(
    calibration: Calibration | None, probabilities: NDArray[Any], is_right: NDArray[np.bool_]
) -> tuple[list[Chart], Table]:
    """Draw the reliability diagram. Also return its errors, after and before calibration."""
    measured = {}
    if calibration:
        measured = {"before scaling": calibration.before, "after scaling": calibration.after}
    elif len(is_right):
        measured = {"test rows": measure_reliability(probabilities, is_right)}
    series = [
        Series(name, [*zip(reliability.confidence, reliability.accuracy, strict=True)])
        for name, reliability in measured.items()
    ]
    series.append(Series("perfect", [(0.0, 0.0), (1.0, 1.0)], "guide"))
    axes = (Axis(name, 0.0, 1.0, in_percent) for name in ("probability", "accuracy"))
    cells = [(name, percent(each.ece, digits=2)) for name, each in measured.items()]
    table = Table("Calibration", ("test split", "ECE"), cells)
    return chart_of("Accuracy by probability", series, *axes), table


def tabulate_coverage(probabilities: NDArray[Any], is_right: NDArray[np.bool_]) -> Table:
    """Return the accuracy on rows by minimum probability."""
    cells = []
    for lowest in SHOWN_PROBABILITIES:
        covered = is_right[probabilities >= lowest]
        if rows := len(covered):
            mean, fraction = float(covered.mean()), percent(rows / len(is_right))
            interval = format_interval(mean, rows)
            cells.append((percent(lowest), fraction, str(rows), percent(mean), interval))
    columns = ("minimum probability", "coverage", "rows", "accuracy", "95% CI")
    note = "Abstaining on texts with a low probability usually raises the accuracy on the rest."
    return Table("Accuracy vs. coverage", columns, cells, text_columns=0, note=note)


def tabulate_costs(results: RunResults) -> Table:
    """Return the seconds of each stage up to the report, with speed and memory."""
    peak = results.training.train_peak_bytes
    rows = [(name, f"{seconds:,.1f} s") for name, seconds in results.stage_seconds.items()]
    rows += [
        ("examples per second (mean)", f"{results.training.train_samples_per_second:,.1f}"),
        ("batch size per device", f"{results.training.train_batch_size:,}"),
        ("non-padding tokens", percent(results.facts.real_token_share)),
        *([("peak memory", f"{peak / 2**30:.2f} GiB")] if peak else []),
    ]
    return Table("Time and memory", ("stage or measure", "value"), rows)


def tabulate_options(config: Config, sources: Mapping[str, str]) -> Table:
    """Return all options and the sources of their values, without folders."""
    rows = []
    for option in OPTIONS.values():
        value = without_folder(option.name, option.value_in(config))
        source = "default" if value == option.default else "chosen automatically"
        if option.name in sources:
            source = Path(sources[option.name]).name
        rows.append((f"{option.section}.{option.name}", format_value(value), source))
    return Table("Configuration", ("option", "value", "source"), rows, text_columns=3)


def render_bench(results: BenchResults) -> str:
    """Render the self-contained page of a benchmark."""
    machine = results.machine
    facts = [("CPU", machine["cpu"]), ("System", machine["platform"]), *machine["devices"].items()]
    return TEMPLATES.get_template("bench.html.j2").render(
        results=results,
        tables=tabulate(results),
        machine=Table("Machine", ("name", "value"), [*facts, *machine["versions"].items()], 2),
    )


def tabulate_environment(environment: Mapping[str, Any]) -> Table:
    """Return the versions and the machine."""
    others = ("origins", "choices")
    facts = [(name, format_value(environment[name])) for name in environment if name not in others]
    return Table("Environment", ("name", "value"), facts, text_columns=2)


def write_folds_report(folder: SeveralFolder, results: SeveralResults, rows: FoldRows) -> None:
    """Write the self-contained page of a finished cross-validation."""
    scores, first = results.scores, next(iter(results.runs.values()))
    assert scores
    mistakes = first.task.mistakes(rows)
    worst, note = mistakes.rows, mistakes.note.replace("test rows", "rows")
    if len(worst) > MAX_FOLD_MISTAKES:
        worst = worst[:MAX_MISTAKES]
    else:
        note = note.replace(f"; these are the {MAX_MISTAKES} worst", "")
    tables = [
        tabulate_runs(results),
        *([replace(scores.table, title="Classes")] if scores.table else []),
        replace(mistakes, rows=worst, note=note, groups=()),
    ]
    names = (without_folder(name, getattr(first.facts, name)) for name in ("model", "data"))
    subtitle = [*names, first.facts.mode, f"{scores.samples:,} rows predicted out of fold"]
    page = TEMPLATES.get_template("folds.html.j2").render(
        title=folder.path.resolve().name,
        subtitle=" · ".join(subtitle),
        summary=results.summary,
        scores=scores,
        tables=tables,
    )
    write_text_atomically(folder.report_file, page)


def tabulate_runs(results: SeveralResults) -> Table:
    """Return the metrics of each seed or fold, and the mean or the metrics over all rows."""
    first, kind = next(iter(results.runs.values())), results.kind
    metrics, samples = [value.metric for value in first.test.values], first.test.samples

    def span(metric: Metric, intervals: Mapping[str, Interval]) -> str:
        if (interval := intervals.get(metric.name)) is None:
            return "–"
        low, high = interval.low, interval.high
        if metric.is_fraction:  # an interval over few seeds can exceed 0% or 100%
            low, high = max(low, 0.0), min(high, 1.0)
        return f"{MetricValue(metric, low)} to {MetricValue(metric, high)}"

    rows: list[list[object]] = [
        [f"{kind[:-1]}-{number}", *run.test.values, f"{run.test.samples:,}"]
        for number, run in results.runs.items()
    ]
    if scores := results.scores:
        count, spread = f"{scores.samples:,}", results.spread
        rows += [
            ["all rows", *scores.values, count],
            [f"95% over {count} rows", *(span(each, results.intervals) for each in metrics), ""],
            [
                "spread over folds (SD)",
                *(MetricValue(each, spread[each.name]) for each in metrics),
                "",
            ],
        ]
    elif means := results.test:
        over_rows = [
            format_interval(means[each.name].value, samples) if each.is_proportion else "–"
            for each in metrics
        ]
        rows += [
            ["mean", *(MetricValue(each, means[each.name].value) for each in metrics), ""],
            [f"95% over {samples:,} rows", *over_rows, ""],
            [f"95% over {len(results.runs)} seeds", *(span(each, means) for each in metrics), ""],
        ]
    columns = (kind[:-1], *(metric.title for metric in metrics), "rows")
    return Table(kind.capitalize(), columns, [[*map(str, row)] for row in rows])


def audit_files(audit: "Audit") -> Mapping[str, str]:
    """Return the files of an audit by name. The page is self-contained."""
    page = TEMPLATES.get_template("audit.html.j2").render(
        audit=audit,
        name=without_folder("data", audit.data),
        model=without_folder("model", audit.model),
        summary=summarize_audit(audit),
        tables=tabulate_audit(audit),
    )
    files = {"audit.html": page}
    if records := [*audit.suspects, *audit.decided]:
        names = [*dict.fromkeys(["decision", *records[0]])]
        rows = ([format_cell(record.get(name, "")) for name in names] for record in records)
        files[SUSPECTS] = to_csv(names, rows)
    return files


def to_csv(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([titles, *rows])
    return text.getvalue()


def summarize_audit(audit: "Audit") -> Table:
    """Return a table with one row per finding."""
    rows = []
    for what, records, mark in (
        ("near duplicates", audit.near_duplicates, ODD),
        *[("leaks between splits", audit.leaks, BAD)] * (len(audit.splits) > 1),
    ):
        count = sum(bool(record.get("labels")) for record in records)
        note = f"{count:,} with contradictory labels" if count else ""
        rows.append((mark if records else GOOD, what, f"{len(records):,}", note))
    return Table("", ("", "check", "rows", "details"), rows, text_columns=4)


def tabulate_audit(audit: "Audit") -> list[Table]:
    """Return tables of the records, worst first."""
    records = {
        "Labels that may be wrong": audit.suspects,
        "Leaks between splits": audit.leaks,
        "Near duplicates": audit.near_duplicates,
    }
    tables = []
    for title, rows in records.items():
        if rows:
            # The text comes after the row number.
            columns = sorted(rows[0], key=lambda name: {"row": 0, "text": 1}.get(name, 2))
            shown = rows[:MAX_AUDIT_ROWS]
            cells = [[_audit_cell(row, name) for name in columns] for row in shown]
            notes = [f"The first {MAX_AUDIT_ROWS} of {len(rows):,}."] * (len(rows) > len(shown))
            if any(row.get("words") for row in shown):
                notes.append(
                    "The marked words support the suggestion. The words column shows how the "
                    "probability changes without each of them."
                )
            titles = [name.replace("_", " ") for name in columns]
            tables.append(Table(title, titles, cells, len(columns), " ".join(notes)))
    return tables


def _audit_cell(row: "Record", name: str) -> str:
    """Format a value as text, or highlight the words in the text of a suspect."""
    text = shorten_text(format_cell(row[name]))
    if name != "text":
        return text
    return MarkedText.of(text, [word.to_json() for word in row.get("words", ())])
