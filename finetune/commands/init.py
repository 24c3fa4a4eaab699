"""``finetune init``: writes a first configuration for a table."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import shorten, show_facts, show_json, show_lines, show_table
from finetune.config.mode import Mode
from finetune.config.schema import (
    DEFAULT_BATCH_SIZE,
    MAX_ESTIMATED_ROWS,
    OPTIONS,
    Config,
    DataConfig,
    ModelConfig,
    mode_defaults,
)
from finetune.config.yaml_files import make_starter
from finetune.files import write_text_atomically
from finetune.ownership import check_output_file
from finetune.runs.guess import guess

if TYPE_CHECKING:
    from finetune.runs.expectation import BaselineEstimate

MAX_CLASSES_SHOWN = 20
READING = ("table", "encoding", "header", "split_column", "label_names", "empty_labels")
# Options that the configuration explains; those with their default are commented out.
EXPLAINED = ("freeze_core", "num_train_epochs", "batch_size", "long_texts", "class_weights")
EXAMPLES = """\b
Examples:
  finetune init reviews.csv                     writes reviews.yaml
  finetune run reviews.yaml                     trains on it as it is
  finetune init reviews.csv --label-column stars --model minilm
"""


@dataclass(frozen=True)
class TableFacts:
    """Facts about a table: ``rows`` with a text and a label, and an example of each class.

    ``longer_fraction`` is the fraction of texts that are longer than the input of the model.
    """

    columns: list[str]
    chosen: dict[str, str]
    rows: int
    rows_of_a_run: dict[str, int]
    task: str
    class_rows: Mapping[str, int]
    label_figures: Mapping[str, float]
    examples: dict[str, str]
    guesses: Mapping[str, Any]
    longer_fraction: float
    expectation: "BaselineEstimate | None"


def look_at_table(options: DataConfig, *, model: str | None) -> TableFacts:
    """Return what a table holds, and what to expect of a run on it."""
    from finetune.data.dataset import column_of, texts_of
    from finetune.data.split import split_table

    guesses = guess(options, model=model)
    table = guesses.table
    rows, task = table.splits["train"], table.task
    texts, labels = texts_of(rows).joined, task.labels(column_of(rows, "label"))
    splits = split_table(table.splits, options, task=task)
    expectation = None
    if len(splits["train"]) <= MAX_ESTIMATED_ROWS:
        from finetune.runs.expectation import expect  # takes 3 s, and a third of the memory

        config = Config(data=options, model=ModelConfig(model=guesses.values["model"]))
        expectation = expect(config, splits["train"], task)
    return TableFacts(
        columns=[*table.column_names],
        chosen={
            option: f"{column.name} ({column.reason})" for option, column in table.chosen.items()
        },
        rows=len(rows),
        rows_of_a_run={split: len(rows) for split, rows in splits.items()},
        task=task.name,
        class_rows=task.count_classes(labels),
        label_figures=task.describe(labels),
        examples={name: texts[row].as_py() for name, row in task.first_rows(labels).items()},
        guesses=guesses.values,
        longer_fraction=guesses.longer_fraction,
        expectation=expectation,
    )


def make_config(options: DataConfig, facts: TableFacts) -> str:
    """Return a YAML configuration for a table, with comments, that runs as it is."""
    defaults = Config()
    values = {
        **flags.given({name: getattr(options, name) for name in READING}),
        **facts.guesses,
        "data": options.data,
        **{name: OPTIONS[name].value_in(defaults) for name in EXPLAINED},
    }
    steps_per_epoch = math.ceil(facts.rows_of_a_run["train"] / DEFAULT_BATCH_SIZE)
    epochs = mode_defaults(Mode("full"), steps_per_epoch=steps_per_epoch).num_train_epochs
    counts = [count for count in facts.class_rows.values() if count] or [facts.rows]
    notes = {
        "data": "A relative path starts in the folder in which finetune runs.",
        "long_texts": f"Here, {facts.longer_fraction:.1%} of the texts are longer than the model "
        "reads at once.",
        "num_train_epochs": f"Here, the default is {epochs:g}.",
        "class_weights": f"Here, the smallest class has {min(counts):,} rows, the largest "
        f"{max(counts):,}.",
    }
    heading = (
        f"Written by `finetune init` for a table of {facts.rows:,} rows. An option after a # has "
        "its default. `finetune run --help-all` explains all options."
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

    FILE is a table or a folder, as for finetune run. The columns are guessed. The configuration
    explains the most important options, and runs without changes.
    """
    output = output or Path(f"{file.stem}.yaml")
    check_output_file(output, overwrite=overwrite)
    with display.progress():
        data = DataConfig(str(file), **flags.given(options))
        facts = look_at_table(data, model=model)
    write_text_atomically(output, make_config(data, facts))
    if display.as_json:
        show_json({"config": str(output), **asdict(facts)})
    else:
        _show(facts)
        name = shlex.quote(str(output))
        show_lines(
            f"written: {output}; check the data with: finetune data check {name}",
            f"train with: finetune run {name}",
        )


def _show(facts: TableFacts) -> None:
    described = {
        "rows": facts.rows,
        "columns": ", ".join(facts.columns),
        **facts.chosen,
        "task": facts.task,
        **facts.label_figures,
        "rows of a run": facts.rows_of_a_run,
        "model": f"{facts.guesses['model']} (others: finetune models)",
        "classes": len(facts.class_rows) or None,
    }
    show_facts(flags.given(described))
    if facts.expectation:
        show_lines(*facts.expectation.lines)
    if not facts.class_rows:
        return
    show_lines()
    rows = [
        (shorten(name), f"{rows:,}", shorten(facts.examples.get(name, "")))
        for name, rows in list(facts.class_rows.items())[:MAX_CLASSES_SHOWN]
    ]
    if len(facts.class_rows) > MAX_CLASSES_SHOWN:
        rows.append(("...", "", ""))
    show_table(("class", "rows", "example"), rows, numbers=("rows",))
