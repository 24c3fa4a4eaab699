"""The sections of a report: what a run has found, as charts and tables."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from finetune.config.schema import Config
from finetune.evaluation.calibration import Calibration, measure_reliability
from finetune.report.chart import Chart
from finetune.report.charts import (
    Rows,
    draw_coverage,
    draw_lengths,
    draw_reliability,
    draw_scatter,
    draw_speed_and_memory,
)
from finetune.runs.results import AutoTunedOption, ParameterCount, RunDetails, RunResults
from finetune.tasks.scores import Scores
from finetune.tasks.tables import Table, format_interval, format_number, percent

SHOWN_PROBABILITIES = (0.5, 0.8, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; one without content is left out.

    Args:
        key: Its id on the page.
        command: A command line.
        summary: What its tables are, if they are shown only when asked for.
    """

    key: str
    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    matrix: Scores | None = None
    command: str = ""
    summary: str = ""

    @property
    def has_content(self) -> bool:
        """Whether there is something to show."""
        return bool(self.charts or self.tables or self.matrix or self.command)


def describe_results(results: RunResults, predictions: Rows, mistakes: Table) -> Iterator[Section]:
    """Yield what the model does right and wrong on the test split."""
    test = results.test
    if test.table:
        note = "The interval, Wilson's, is that of the recall." if test.confusion_matrix else ""
        yield Section("classes", test.table.title, note, tables=[test.table])
    note = (
        "A row is a true class, a column a predicted one; the stronger the shade, the larger the "
        "share of the row. A number leads to its rows."
    )
    yield Section(
        "confusion", "Confusion matrix", note, matrix=test if test.confusion_matrix else None
    )
    points = [(row["label"], row["predicted"]) for row in predictions if not test.per_class]
    yield Section("numbers", "True and predicted numbers", charts=draw_scatter(points))
    yield Section("mistakes", mistakes.title, mistakes.note, tables=[mistakes])


def describe_speed(results: RunResults, journal: Rows) -> Section:
    """Return speed, memory and padding."""
    facts, training = results.facts, results.training
    peak = training.train_peak_bytes
    rows = [
        ("Examples a second, on average", f"{training.train_samples_per_second:,.1f}"),
        ("Batch size on the device", f"{training.train_batch_size:,}"),
        ("Tokens that are not padding", percent(facts.real_token_share)),
        *([("Peak memory", f"{peak / 2**30:.2f} GiB")] if peak else []),
    ]
    return Section(
        "speed", "Speed and memory", charts=draw_speed_and_memory(journal),
        tables=[Table("Speed and memory", ("measure", "value"), rows)],
    )  # fmt: skip


def describe_probabilities(calibration: Calibration | None, predictions: Rows) -> Iterator[Section]:
    """Yield whether probabilities can be believed, and what abstaining on unsure rows gives.

    Args:
        calibration: What temperature scaling has done, if it was done.
        predictions: Of ``predictions.jsonl``: of the saved model.
    """
    rows = [row for row in predictions if "probability" in row]
    probabilities = np.array([row["probability"] for row in rows])
    is_right = np.array([row["predicted"] == row["label"] for row in rows])
    tables = []
    note = (
        "Of the rows that are answered with a probability, that share should be right; points of "
        "few rows may lie anywhere. The "
        "expected calibration error (ECE) is the mean distance from it"
    )
    if calibration:
        before, after = calibration.test.before.reliability, calibration.test.after.reliability
        charts = draw_reliability({"before scaling": before, "after scaling": after})
        tables.append(_tabulate_calibration(calibration))
        note += f"; the logits are divided by {calibration.temperature:.3g}, the temperature."
    elif rows:
        reliability = measure_reliability(probabilities, is_right)
        charts = draw_reliability({"test rows": reliability})
        note += f", here {100 * reliability.ece:.1f} percentage points. No temperature was fitted."
    else:
        return
    yield Section("probabilities", "Can the probabilities be believed?", note, charts, tables)
    if rows:
        note = "Of texts whose answer has a low probability a model may better say nothing."
        yield Section(
            "coverage", "Answering only what is sure", note,
            draw_coverage(probabilities, is_right), [_tabulate_coverage(probabilities, is_right)],
        )  # fmt: skip


def _tabulate_calibration(calibration: Calibration) -> Table:
    splits = {"validation": calibration.validation, "test": calibration.test}
    rows = [
        (f"{split}, {when} scaling", f"{100 * one.reliability.ece:.2f}%", f"{one.loss:.4f}")
        for split, both in splits.items()
        for when, one in (("before", both.before), ("after", both.after))
    ]
    return Table("Calibration", ("rows", "ECE", "loss"), rows)


def _tabulate_coverage(probabilities: Any, is_right: Any) -> Table:
    rows = []
    for least in (0.0, *SHOWN_PROBABILITIES):
        answered = is_right[probabilities >= least]
        if len(answered):
            share = float(answered.mean())
            rows.append(
                (percent(least), percent(len(answered) / len(is_right)), str(len(answered)),
                 percent(share), format_interval(share, len(answered)))
            )  # fmt: skip
    columns = ("least probability", "answered", "rows", "accuracy", "95% interval")
    return Table("Accuracy of the answers from a probability on", columns, rows, text_columns=0)


def describe_details(details: RunDetails) -> Iterator[Section]:
    """Yield texts, parameters and choices."""
    rows = [
        (split, f"{one.texts:,}", f"{one.windows:,}" if one.windows else "–",
         format_number(one.median), format_number(one.p95), f"{one.longest:,}",
         f"{one.cut:,} ({percent(one.cut / one.texts)})")
        for split, one in details.lengths.items()
    ]  # fmt: skip
    columns = ("split", "texts", "windows", "median", "95%", "longest", "cut")
    note = (
        "Lengths are in tokens, as the model reads them, after texts were cut. 95% of the texts "
        "are at most as long as the column says."
    )
    table = Table("Lengths of the texts", columns, rows)
    yield Section("texts", "Texts", note, draw_lengths(details.lengths), [table])
    yield Section("parameters", "Trained parameters", tables=[_tabulate_parts(details.parameters)])
    choices = [row for one in details.choices for row in _rows_of(one)]
    table = Table(
        "Chosen by measurement", ("what", "value", "measured", "note"), choices, text_columns=4
    )
    if choices:
        yield Section("choices", table.title, tables=[table])


def _tabulate_parts(parts: Mapping[str, ParameterCount]) -> Table:
    """Return parameters by part; layers in a row that are alike are one row."""
    rows = []
    for (is_layer, count), same in groupby(
        parts.items(), key=lambda one: (one[0].startswith("layer "), one[1])
    ):
        names = [name for name, _ in same]
        numbers = [name.removeprefix("layer ") for name in names]
        is_range = is_layer and len(names) > 1
        name = f"layers {numbers[0]}–{numbers[-1]}, each" if is_range else ", ".join(names)
        share = percent(count.trained / count.total) if count.total else "–"
        rows.append((name, f"{count.trained:,}", f"{count.total:,}", share))
    return Table("Trained parameters", ("part", "trained", "of", "share"), rows)


def _rows_of(choice: AutoTunedOption) -> Iterator[tuple[str, str, str, str]]:
    for value, measured in choice.measured.items():
        is_chosen = value == choice.value
        yield (
            choice.subject, f"{value} (chosen)" if is_chosen else value,
            f"{format_number(measured)} {choice.quantity}", choice.note if is_chosen else "",
        )  # fmt: skip


def describe_configuration(
    config: Config, environment: Mapping[str, Any], *, name: str
) -> Iterator[Section]:
    """Yield how the run is repeated, all options with their origins, and the versions."""
    command = f"finetune run --config {shlex.quote(f'{name}/config.yaml')}"
    note = "Typed in the folder that holds the run's folder, this repeats the run:"
    yield Section("repeat", "Repeat the run", note, command=command)
    origins, defaults = environment.get("origins", {}), asdict(Config())
    rows = [
        (f"{section}.{option}", _format_label(value),
         _origin_of(value, default=defaults[section][option], given_by=origins.get(option)))
        for section, options in asdict(config).items()
        for option, value in options.items()
    ]  # fmt: skip
    table = Table("Configuration", ("option", "value", "origin"), rows, text_columns=3)
    yield Section("configuration", table.title, tables=[table], summary="All options")
    facts = [
        (key, _format_label(value))
        for key, value in environment.items()
        if key not in ("origins", "choices")
    ]
    table = Table("Environment", ("what", "value"), facts, text_columns=2)
    yield Section("environment", table.title, tables=[table], summary="Versions and machine")


def _origin_of(value: Any, *, default: Any, given_by: str | None) -> str:
    """Return the file, by its name, the variable or the flag that has given a value."""
    if given_by is not None:
        return Path(given_by).name
    return "default" if value == default else "chosen for model and data"


def _format_label(value: Any) -> str:
    """Return the value of an option or a fact as people read it."""
    match value:
        case None:
            return "–"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case dict():
            return ", ".join(f"{key} {one}" for key, one in value.items())
    return str(value)
