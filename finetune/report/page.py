"""The report: a run's results as one page, ``report.html``, that needs no other file."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import OPTIONS, Config
from finetune.evaluation.statistics import (
    Calibration,
    Reliability,
    coverage_curve,
    measure_reliability,
)
from finetune.events import WarningMessage
from finetune.files import write_text_atomically
from finetune.report.chart import Axis, Chart, Points, Series, chart_of, in_percent
from finetune.report.names import name_of_data, name_of_model, remove_folders, without_folders
from finetune.report.templates import TEMPLATES, format_value
from finetune.runs.folder import RunFolder
from finetune.runs.journal import read_warnings
from finetune.runs.results import ParameterCount, RunDetails, RunResults
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import Scores
from finetune.tasks.tables import MAX_MISTAKES, Table, format_interval, format_number, percent

Rows = Sequence[Mapping[str, Any]]
SHOWN_PROBABILITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
# The style sheet has colours for three.
MAX_CURVES = 3
# The accuracy of fewer rows is mostly chance.
MIN_ROWS_OF_ACCURACY = 10


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; its tables are only shown when asked for by a summary."""

    key: str
    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    matrix: Scores | None = None
    command: str = ""
    summary: str = ""


def write_report(folder: RunFolder, results: RunResults) -> Path:
    """Write or replace the report of a finished run, and return its path.

    The report may be published: of a path on this machine it names at most the last part.
    """
    config, facts, test = folder.read_config(), results.facts, results.test
    predictions = folder.read(folder.predictions_file, list)
    mistakes = folder.read(folder.predictions_file, results.task.mistakes)
    journal = folder.read(folder.metrics_file, list)
    environment = folder.read(folder.environment_file, dict)
    name = folder.path.resolve().name
    warnings = [
        WarningMessage(
            remove_folders(warning.message, config), remedy=remove_folders(warning.remedy, config)
        )
        for warning in read_warnings(folder)
        # It is shown below the metrics.
        if warning.message != test.warning
    ]
    curves = draw_curves(journal, test.metrics)
    shown = chain(
        [Section("curves", "Curves", charts=curves)] if curves else [],
        _describe_results(results, predictions, mistakes),
        _describe_probabilities(results.calibration, predictions),
        [_describe_speed(results, journal)],
        _describe_details(results.details),
        _describe_configuration(without_folders(config), environment, name=name),
    )
    page = TEMPLATES.get_template("report.html.j2").render(
        name=name,
        facts=replace(facts, data=name_of_data(facts.data), model=name_of_model(facts.model)),
        training=results.training,
        validation=results.validation,
        test=test,
        warnings=warnings,
        sections=list(shown),
        groups={group: title for titles in mistakes.groups for group, title in titles.items()},
        first_mistakes=MAX_MISTAKES,
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file


def draw_curves(journal: Rows, metrics: Iterable[str]) -> list[Chart]:
    """Return the loss over the steps and the metrics of validations, as far as there are any."""
    names = {"training": "loss", "validation": "eval_loss"}
    losses = [Series(name, _points(journal, key)) for name, key in names.items()]
    drawn = [METRICS[name] for name in metrics if METRICS[name].greater_is_better][:MAX_CURVES]
    curves = [Series(metric.title, _points(journal, f"eval_{metric.name}")) for metric in drawn]
    is_percent = any(metric.is_fraction for metric in drawn)
    values = Axis("metric", show=in_percent) if is_percent else Axis("metric")
    return [
        *chart_of("Loss", losses, _steps(journal), Axis("loss")),
        *chart_of("Validation metrics", curves, _steps(journal), values),
    ]


def _steps(journal: Rows) -> Axis:
    return Axis("step", low=0.0, high=float(max((row["step"] for row in journal), default=1)))


def _points(journal: Rows, key: str, *, unit: float = 1) -> Points:
    return [(row["step"], row[key] / unit) for row in journal if row.get(key) is not None]


def _describe_results(results: RunResults, predictions: Rows, mistakes: Table) -> Iterator[Section]:
    test = results.test
    if test.table:
        note = "The interval, Wilson's, is that of the recall."
        yield Section("classes", test.table.title, note, tables=[test.table])
    else:
        points = [(row["label"], row["predicted"]) for row in predictions]
        yield Section("numbers", "True and predicted numbers", charts=draw_scatter(points))
    if test.confusion_matrix:
        note = (
            "A row is a true class, a column a predicted one; the stronger the shade, the larger "
            "the fraction of the row. Click a count to see its texts."
        )
        yield Section("confusion", "Confusion matrix", note, matrix=test)
    yield Section("mistakes", mistakes.title, mistakes.note, tables=[mistakes])


def draw_scatter(points: Points) -> list[Chart]:
    """Return predicted over true numbers, and the line on which they are equal."""
    numbers = [number for point in points for number in point]
    ends = min(numbers, default=0.0), max(numbers, default=0.0)
    series = [
        Series("test rows", sorted(points), "dots"),
        Series("equal", [(end, end) for end in ends], "guide"),
    ]
    return chart_of("Predicted by true numbers", series, Axis("true"), Axis("predicted"))


def _describe_probabilities(
    calibration: Calibration | None, predictions: Rows
) -> Iterator[Section]:
    rows = [row for row in predictions if "probability" in row]
    probabilities = np.array([row["probability"] for row in rows])
    is_right = np.array([row["predicted"] == row["label"] for row in rows])
    note = (
        "Of the rows that are predicted with a probability, this fraction should be right; points "
        "of few rows may be anywhere. The expected calibration error (ECE) is the mean distance"
    )
    if calibration:
        test = calibration.test.items()
        reliability = {f"{when} scaling": scores.reliability for when, scores in test}
        note += f"; the logits are divided by the temperature, {calibration.temperature:.3g}."
        splits = {"validation": calibration.validation, "test": calibration.test}
        cells = [
            (f"{split}, {when} scaling", percent(scores.reliability.ece, digits=2),
             f"{scores.loss:.4f}")
            for split, both in splits.items()
            for when, scores in both.items()
        ]  # fmt: skip
        table = Table("Calibration", ("rows", "ECE", "loss"), cells)
        charts = _draw_reliability(reliability)
        yield Section("probabilities", "Calibration", note, charts, [table])
    elif rows:
        reliability = {"test rows": measure_reliability(probabilities, is_right)}
        ece = 100 * reliability["test rows"].ece
        note += f", here {ece:.1f} percentage points. No temperature was fitted."
        yield Section("probabilities", "Calibration", note, _draw_reliability(reliability))
    if rows:
        yield _describe_coverage(probabilities, is_right)


def _draw_reliability(splits: Mapping[str, Reliability]) -> list[Chart]:
    series = [
        Series(name, [(group.confidence, group.accuracy) for group in reliability.bins])
        for name, reliability in splits.items()
    ]
    perfect = Series("perfect", [(0.0, 0.0), (1.0, 1.0)], "guide")
    axes = (Axis(name, 0.0, 1.0, in_percent) for name in ("probability", "accuracy"))
    return chart_of("Accuracy by probability", [*series, perfect], *axes)


def _describe_coverage(probabilities: NDArray[Any], is_right: NDArray[np.bool_]) -> Section:
    _, accepted, right = coverage_curve(probabilities, is_right)
    points = zip(accepted / len(is_right), right / accepted, strict=True)
    first = int(np.searchsorted(accepted, MIN_ROWS_OF_ACCURACY))
    series = Series("accuracy", [*points][first:])
    coverage = Axis("coverage, most probable first", low=0.0, high=1.0, show=in_percent)
    charts = chart_of(
        "Accuracy by coverage", [series], coverage, Axis("accuracy", high=1.0, show=in_percent)
    )
    cells = []
    for lowest in SHOWN_PROBABILITIES:
        covered = is_right[probabilities >= lowest]
        if rows := len(covered):
            accuracy = float(covered.mean())
            cells.append(
                (percent(lowest), percent(rows / len(is_right)), str(rows), percent(accuracy),
                 format_interval(accuracy, rows))
            )  # fmt: skip
    columns = ("lowest probability", "coverage", "rows", "accuracy", "95% interval")
    table = Table("Accuracy from a probability on", columns, cells, text_columns=0)
    note = "Where the prediction has a low probability, it may be better to abstain."
    return Section("coverage", "Accuracy vs. coverage", note, charts, [table])


def _describe_speed(results: RunResults, journal: Rows) -> Section:
    training, peak = results.training, results.training.train_peak_bytes
    rows = [
        ("Examples a second, on average", f"{training.train_samples_per_second:,.1f}"),
        ("Batch size on the device", f"{training.train_batch_size:,}"),
        ("Tokens that are not padding", percent(results.facts.real_token_share)),
        *([("Peak memory", f"{peak / 2**30:.2f} GiB")] if peak else []),
    ]
    speed = [Series("examples/s", _points(journal, "examples_per_second"))]
    memory = [
        Series("allocated by the process", _points(journal, "held_bytes", unit=2**30)),
        Series("in use", _points(journal, "memory_bytes", unit=2**30)),
    ]
    steps = _steps(journal)
    charts = [
        *chart_of("Examples a second", speed, steps, Axis("examples/s", low=0.0)),
        *chart_of("Memory of the device, GiB", memory, steps, Axis("GiB", low=0.0)),
    ]
    table = Table("Speed and memory", ("measure", "value"), rows)
    return Section("speed", table.title, charts=charts, tables=[table])


def _describe_details(details: RunDetails) -> Iterator[Section]:
    rows = [
        (split, f"{length.texts:,}", f"{length.windows:,}" if length.windows else "–",
         format_number(length.median), format_number(length.p95), f"{length.longest:,}",
         f"{length.cut:,} ({percent(length.cut / length.texts)})")
        for split, length in details.lengths.items()
    ]  # fmt: skip
    columns = ("split", "texts", "windows", "median", "95%", "longest", "truncated")
    note = (
        "Lengths are in tokens, as the model reads them, after truncation. 95% of the texts are at "
        "most as long as the column says."
    )
    table = Table("Lengths of the texts", columns, rows)
    training = details.lengths["train"]
    starts = (1.0 + number * training.bin_tokens for number in range(len(training.bins)))
    bars = [*zip(starts, map(float, training.bins), strict=True)]
    series = Series("training texts", bars, "bars", bar_width=training.bin_tokens)
    noun = "windows" if training.windows else "texts"
    title, axes = f"Training {noun} by length", (Axis("tokens", low=1.0), Axis(noun, low=0.0))
    yield Section("texts", "Texts", note, chart_of(title, [series], *axes), [table])
    table = _tabulate_parts(details.parameters)
    yield Section("parameters", table.title, tables=[table])
    if details.choices:
        titles = ("what", "value", "measured", "note")
        measured = []
        for choice in details.choices:
            for value, number in choice.measured.items():
                cells = (choice.subject, value, f"{format_number(number)} {choice.quantity}", "")
                if value == choice.value:
                    cells = (choice.subject, f"{value} (chosen)", cells[2], choice.note)
                measured.append(cells)
        table = Table("Chosen by measurement", titles, measured, text_columns=4)
        yield Section("choices", table.title, tables=[table])


def _tabulate_parts(parts: Mapping[str, ParameterCount]) -> Table:
    """Return parameters by part; consecutive layers that are alike are one row."""
    rows = []
    for (is_layer, count), same in groupby(
        parts.items(), key=lambda part: (part[0].startswith("layer "), part[1])
    ):
        names = [name for name, _ in same]
        name = ", ".join(names)
        if is_layer and len(names) > 1:
            name = f"layers {names[0].split()[1]}–{names[-1].split()[1]}, each"
        fraction = percent(count.trained / count.total) if count.total else "–"
        rows.append((name, f"{count.trained:,}", f"{count.total:,}", fraction))
    return Table("Trained parameters", ("part", "trained", "of", "percent"), rows)


def _describe_configuration(
    config: Config, environment: Mapping[str, Any], *, name: str
) -> Iterator[Section]:
    command = f"finetune run --config {shlex.quote(f'{name}/config.yaml')}"
    note = "In the folder that contains the run's folder, this repeats the run:"
    yield Section("repeat", "Repeat the run", note, command=command)
    sources, rows = environment.get("origins", {}), []
    for option in OPTIONS.values():
        value = option.value_in(config)
        source = "default" if value == option.default else "chosen automatically"
        if option.name in sources:
            source = Path(sources[option.name]).name
        rows.append((f"{option.section}.{option.name}", format_value(value), source))
    table = Table("Configuration", ("option", "value", "source"), rows, text_columns=3)
    yield Section("configuration", table.title, tables=[table], summary="All options")
    shown = {name: environment[name] for name in environment if name not in ("origins", "choices")}
    facts = [(name, format_value(value)) for name, value in shown.items()]
    table = Table("Environment", ("name", "value"), facts, text_columns=2)
    yield Section("environment", table.title, tables=[table], summary="Versions and machine")
