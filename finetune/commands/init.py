"""``finetune init``: writes a starter configuration for a table."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import shorten, show_facts, show_lines, show_table
from finetune.config.load import make_starter
from finetune.config.modes import Mode
from finetune.config.schema import (
    DEFAULT_BATCH_SIZE,
    MAX_ESTIMATED_ROWS,
    OPTIONS,
    Config,
    DataConfig,
    ModelConfig,
)
from finetune.files import write_text_atomically
from finetune.ownership import check_output_file
from finetune.runs.guess import guess

MAX_CLASSES_SHOWN = 20
READING = ("table", "encoding", "header", "split_column", "label_names", "empty_labels")
# Options that the configuration explains, commented out because they have their default value.
EXPLAINED = ("freeze_core", "num_train_epochs", "batch_size", "long_texts", "class_weights")
EXAMPLES = """\b
Examples:
  finetune init reviews.csv                     write reviews.yaml
  finetune run reviews.yaml                     train with it
  finetune init reviews.csv --label-column stars --model minilm
"""


def describe_table(options: DataConfig, *, model: str | None) -> dict[str, Any]:
    """Return facts about a table, the guessed options, and the linear-head estimate."""
    from finetune.data.dataset import split_table, texts_of
    from finetune.data.load import warn_of_odd_names
    from finetune.data.tables import read_tables

    table = read_tables({"train": [Path(options.data).expanduser()]}, options)
    warn_of_odd_names(table.task)
    guesses = guess(table, options, model=model)
    rows, task = table.splits["train"], table.task
    texts, labels = texts_of(rows).joined, task.labels(rows["label"])
    splits = split_table(table.splits, options, task=task)
    estimate = None
    if len(splits["train"]) <= MAX_ESTIMATED_ROWS:
        # This import takes 3 s and a third of the memory.
        from finetune.runs.linear_head import estimate_linear_head

        read = {name: guesses.values[name] for name in ("model", "max_length")}
        config = Config(data=options, model=ModelConfig(**read))
        estimate = estimate_linear_head(
            config, splits["train"], replace(table, tokens=guesses.tokens)
        )
    return {
        "columns": [*table.column_names],
        "chosen": {
            option: f"{column.name} ({column.reason})" for option, column in table.chosen.items()
        },
        "rows": len(rows),
        "rows_of_a_run": {split: len(rows) for split, rows in splits.items()},
        "task": task.name,
        "class_rows": task.count_classes(labels),
        "label_figures": task.describe(labels),
        "examples": {name: texts[row].as_py() for name, row in task.first_rows(labels).items()},
        "guesses": guesses.values,
        "model_reason": guesses.model_reason,
        "longer_fraction": guesses.longer_fraction,
        "linear_head_estimate": estimate,
    }


def make_config(options: DataConfig, facts: Mapping[str, Any]) -> str:
    """Return a commented YAML configuration for a table, which runs without changes."""
    values = {
        **flags.without_none({name: getattr(options, name) for name in READING}),
        **facts["guesses"],
        "data": options.data,
        **{name: OPTIONS[name].default for name in EXPLAINED},
    }
    steps_per_epoch = math.ceil(facts["rows_of_a_run"]["train"] / DEFAULT_BATCH_SIZE)
    defaults = Mode("full").defaults(steps_per_epoch=steps_per_epoch)
    counts = [count for count in facts["class_rows"].values() if count] or [facts["rows"]]
    longer = f"{facts['longer_fraction']:.1%} of the texts"
    notes = {
        "data": "Relative paths start in the folder in which finetune runs.",
        "model": facts["model_reason"] and f"Guessed: {facts['model_reason']}.",
        "long_texts": f"In this table, {longer} are longer than the model can read at once.",
        "num_train_epochs": f"For this table, the default is {defaults['num_train_epochs']:g}.",
        "class_weights": f"In this table, the smallest class has {min(counts):,} rows, the largest "
        f"{max(counts):,}.",
    }
    heading = (
        f"Written by `finetune init` for a table with {facts['rows']:,} rows. Commented-out "
        "options show their default value. `finetune run --help-all` explains all options."
    )
    return make_starter(values, notes=notes, heading=heading)


@click.command(epilog=EXAMPLES)
@click.argument("file", metavar="FILE", type=flags.PATH)
@flags.output_file_option("Configuration to write. Default: the name of FILE with .yaml.")
@flags.chosen_options(
    *("text_column", "text_pair_column", "label_column", "task", "model"), *READING
)
@flags.with_display
def command(
    *,
    file: Path,
    output: Path | None,
    overwrite: bool,
    model: str | None,
    display: flags.Display,
    **options: Any,
) -> None:
    """Write a configuration for a table of texts.

    FILE is a table or a folder of texts, whose columns are guessed. The configuration explains the
    most important options and runs without changes.
    """
    output = output or Path(f"{file.stem}.yaml")
    check_output_file(output, overwrite=overwrite)
    with display.progress():
        data = DataConfig(str(file), **flags.without_none(options))
        facts = describe_table(data, model=model)
    write_text_atomically(output, make_config(data, facts))
    display.show({"config": str(output), **facts}, _show)


def _show(facts: Mapping[str, Any]) -> None:
    about_model = filter(None, (facts["model_reason"], "others: finetune models"))
    described = {
        "rows": facts["rows"],
        "columns": ", ".join(facts["columns"]),
        **facts["chosen"],
        "task": facts["task"],
        **facts["label_figures"],
        "split sizes in a run": facts["rows_of_a_run"],
        "model": f"{facts['guesses']['model']} ({'; '.join(about_model)})",
        "classes": len(facts["class_rows"]) or None,
    }
    show_facts(flags.without_none(described))
    if facts["linear_head_estimate"]:
        show_lines(*facts["linear_head_estimate"].lines)
    _show_classes(facts["class_rows"], facts["examples"])
    name = shlex.quote(facts["config"])
    show_lines(
        f"written: {facts['config']}; check the data with: finetune data check {name}",
        f"train with: finetune run {name}",
    )


def _show_classes(class_rows: Mapping[str, int], examples: Mapping[str, str]) -> None:
    if not class_rows:
        return
    show_lines()
    rows = [
        (shorten(name), f"{rows:,}", shorten(examples.get(name, "")))
        for name, rows in list(class_rows.items())[:MAX_CLASSES_SHOWN]
    ]
    if len(class_rows) > MAX_CLASSES_SHOWN:
        rows.append(("...", "", ""))
    show_table(("class", "rows", "example"), rows, numbers=("rows",))
