"""``finetune init``."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.cli.options import chosen_options, output_options

if TYPE_CHECKING:
    from finetune.pipeline.init import TableFacts

EXAMPLES = """\b
Examples:
  finetune init reviews.csv                     writes reviews.yaml
  finetune run --config reviews.yaml            trains on it as it is
  finetune init reviews.csv --output mine.yaml --label-column stars --model minilm
"""
MOST_CLASSES_SHOWN = 20
LONGEST_EXAMPLE = 60


@click.command(epilog=EXAMPLES)
@click.argument("table", metavar="DATA", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="New file.  [default: DATA's name with .yaml, in the current folder]",
)
@chosen_options("text_column", "label_column", "model")
@output_options
def command(
    table: Path,
    *,
    output: Path | None,
    text_column: str | None,
    label_column: str | None,
    model: str | None,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
) -> None:
    """Look at a table of texts and write a configuration to start from.

    DATA is a .csv, .tsv, .jsonl or .parquet file. The configuration explains the options that one
    changes first, and runs as it is.
    """
    from finetune.cli.console import show_json, show_lines, showing
    from finetune.config.write import write_new_file

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.pipeline.init import look_at_table, make_config

        facts = look_at_table(table, text_column=text_column, label_column=label_column, emit=emit)
    file = output or Path(f"{table.stem}.yaml")
    write_new_file(file, make_config(facts, model=model))
    if as_json:
        show_json({"schema_version": 1, "config": str(file), **asdict(facts)})
        return
    _show_facts(facts)
    name = shlex.quote(str(file))
    show_lines(
        f"{file} is written; what is odd about the data: finetune data check --config {name}",
        f"train with: finetune run --config {name}",
    )


def _show_facts(facts: "TableFacts") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from finetune.cli.console import show_facts

    show_facts(
        {
            "rows": sum(facts.class_rows.values()),
            "columns": ", ".join(facts.columns),
            "text column": f"{facts.text_column} ({facts.text_reason})",
            "label column": f"{facts.label_column} ({facts.label_reason})",
            "rows of a run": facts.rows_of_a_run,
            "classes": len(facts.class_rows),
        }
    )
    classes = Table("class", box=None, pad_edge=False)
    classes.add_column("rows", justify="right")
    classes.add_column("example")
    for name, rows in list(facts.class_rows.items())[:MOST_CLASSES_SHOWN]:
        example = Text(" ".join(facts.examples.get(name, "").split()))
        example.truncate(LONGEST_EXAMPLE, overflow="ellipsis")
        classes.add_row(Text(name), f"{rows:,}", example)
    if len(facts.class_rows) > MOST_CLASSES_SHOWN:
        classes.add_row("...")
    console = Console(highlight=False)
    console.print()
    console.print(classes)
