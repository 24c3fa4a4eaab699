"""``finetune init``: a first configuration, from a look at what a table holds."""

import math
import shlex
from collections.abc import Mapping, Sequence
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
    from finetune.data.columns import Columns
    from finetune.runs.expectation import BaselineEstimate

MAX_CLASSES_SHOWN = 20
EXAMPLES = """\b
Examples:
  finetune init reviews.csv                     writes reviews.yaml
  finetune run reviews.yaml                     trains on it as it is
  finetune init reviews.csv --label-column stars --model minilm
"""


@dataclass(frozen=True)
class TableFacts:
    """What a table holds: ``rows`` with a text and a label, ``examples`` of each class.

    ``chosen`` are columns by option. ``longer_fraction`` of the texts do not fit the model.
    """

    options: DataConfig
    columns: Sequence[str]
    chosen: "Columns"
    rows_of_a_run: Mapping[str, int]
    task: str
    rows: int
    class_rows: Mapping[str, int]
    label_figures: Mapping[str, float]
    examples: Mapping[str, str]
    mean_characters: float
    longest_characters: int
    guesses: Mapping[str, Any]
    suggested_max_length: int
    longer_fraction: float
    expectation: "BaselineEstimate | None"


def look_at_table(options: DataConfig, *, model: str | None) -> TableFacts:
    """Return what a table holds, and what to expect of a run on it."""
    import pyarrow.compute as pc

    from finetune.data.dataset import column_of, texts_of
    from finetune.data.split import split_table

    guesses = guess(options, model=model)
    table = guesses.table
    rows, task = table.splits["train"], table.task
    texts, labels = texts_of(rows), task.labels(column_of(rows, "label"))
    characters = pc.utf8_length(texts.joined)
    splits = split_table(table.splits, options, task=task)
    expectation = None
    if len(splits["train"]) <= MAX_ESTIMATED_ROWS:
        from finetune.runs.expectation import expect  # takes 3 s, and a third of the memory

        config = Config(data=options, model=ModelConfig(model=guesses.values["model"]))
        expectation = expect(config, splits["train"], task)
    return TableFacts(
        options=options,
        columns=table.column_names,
        chosen=table.chosen,
        rows_of_a_run={split: len(rows) for split, rows in splits.items()},
        task=task.name,
        rows=len(rows),
        class_rows=task.count_classes(labels),
        label_figures=task.describe(labels),
        examples={name: texts.joined[row].as_py() for name, row in task.first_rows(labels).items()},
        mean_characters=pc.mean(characters).as_py(),
        longest_characters=pc.max(characters).as_py(),
        guesses=guesses.values,
        suggested_max_length=guesses.suggested_max_length,
        longer_fraction=guesses.longer_fraction,
        expectation=expectation,
    )


def make_config(facts: TableFacts) -> str:
    """Return a YAML configuration for a table, with comments, that runs as it is."""
    defaults, options = Config(), facts.options
    reading = (*("table", "encoding", "header", "split_column", "label_names", "empty_labels"),)
    values = {
        **flags.given({name: getattr(options, name) for name in reading}),
        **facts.guesses,
        "data": options.data,
        "freeze_core": defaults.model.freeze_core,
        "num_train_epochs": defaults.training.num_train_epochs,
        "batch_size": defaults.training.batch_size,
    }
    if facts.longer_fraction and "text_pair_column" not in facts.chosen:
        values["long_texts"] = defaults.model.long_texts
    if facts.class_rows:
        values["class_weights"] = defaults.training.class_weights
    rows = [count for count in facts.class_rows.values() if count] or [facts.rows]
    steps_per_epoch = math.ceil(facts.rows_of_a_run["train"] / DEFAULT_BATCH_SIZE)
    full, head = (
        mode_defaults(Mode(name), steps_per_epoch=steps_per_epoch) for name in ("full", "head")
    )
    notes = {
        "data": "A path that is not absolute counts from the folder in which finetune runs.",
        "max_length": f"Here a text has {facts.mean_characters:,.0f} characters on average and "
        f"{facts.longest_characters:,} at most; a token is about 4 of English, 1 of Chinese.",
        "long_texts": f"Here about {facts.longer_fraction:.1%} of the texts are longer than "
        "the model reads at once.",
        "num_train_epochs": f"Here it is {full.num_train_epochs:g}, or at most "
        f"{head.num_train_epochs:g} if only the head trains.",
        "class_weights": f"Here the smallest class has {min(rows):,} rows and the largest "
        f"{max(rows):,}: balanced finds more of the small classes and may cost accuracy.",
    }
    heading = (
        f"Written by `finetune init` for a table of {facts.rows:,} rows. An "
        "option behind a # has its default; `finetune run --help` explains all of them."
    )
    return make_starter(values, notes=notes, heading=heading)


@click.command(epilog=EXAMPLES)
@click.argument("file", metavar="FILE", type=flags.PATH)
@flags.output_file_option("Configuration to write.  [default: FILE's name with .yaml]")
@flags.chosen_options(
    *("text_column", "text_pair_column", "label_column", "task", "encoding", "header"),
    *("split_column", "label_names", "empty_labels", "model", "table"),
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

    FILE is a table, as finetune run takes it, or a folder of texts in folders of classes. The
    columns are guessed. The configuration explains the most important options and can be run
    without changes.
    """
    output = output or Path(f"{file.stem}.yaml")
    check_output_file(output, overwrite=overwrite)
    with display.progress():
        data = DataConfig(str(file), **flags.given(options))
        facts = look_at_table(data, model=model)
    write_text_atomically(output, make_config(facts))
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
        **{option: f"{one.name} ({one.reason})" for option, one in facts.chosen.items()},
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
