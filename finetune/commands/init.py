"""``finetune init``."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import shorten, show_facts, show_json, show_lines, show_table
from finetune.commands.options import GroupedCommand, chosen_options, given, output_options
from finetune.commands.progress import showing
from finetune.config.yaml_files import check_is_new, write_new_file

if TYPE_CHECKING:
    from finetune.commands.look_at_table import TableFacts

EXAMPLES = """\b
Examples:
  finetune init reviews.csv                     writes reviews.yaml
  finetune run --config reviews.yaml            trains on it as it is
  finetune init reviews.csv --label-column stars --model minilm
"""
MAX_CLASSES_SHOWN = 20


@click.command(cls=GroupedCommand, epilog=EXAMPLES)
@click.argument("table", metavar="DATA", type=click.Path(path_type=Path))
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="New file.  [default: DATA's name with .yaml, in the current folder]",
)
@chosen_options(
    *("text_column", "text_pair_column", "label_column", "task", "encoding", "header"),
    *("split_column", "label_names", "model"),
)
@output_options
def command(
    table: Path, *, output: Path | None, as_json: bool, quiet: bool, no_progress: bool, **flags: Any
) -> None:
    """Write a configuration for a table of texts.

    DATA is a table, as finetune run takes it, or a folder of texts in folders of classes. The
    columns are guessed. The configuration explains the most important options and can be run
    without changes.
    """
    model = flags.pop("model")
    file = output or Path(f"{table.stem}.yaml")
    check_is_new(file)
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.commands.look_at_table import look_at_table, make_config
        from finetune.data.source import DataOptions

        options = DataOptions(str(table), label="", **given(flags))
        facts = look_at_table(options, model=model, emit=emit)
    write_new_file(file, make_config(facts))
    if as_json:
        show_json({"schema_version": 1, "config": str(file), **asdict(facts)})
        return
    _show_facts(facts)
    name = shlex.quote(str(file))
    show_lines(
        f"written: {file}; check the data with: finetune data check --config {name}",
        f"train with: finetune run --config {name}",
    )


def _show_facts(facts: "TableFacts") -> None:
    show_facts(
        {
            "rows": facts.rows,
            "columns": ", ".join(facts.columns),
            "text column": f"{facts.text_column} ({facts.text_reason})",
            **({"second text": second} if (second := facts.text_pair_column) else {}),
            "label column": f"{facts.label_column} ({facts.label_reason})",
            "task": facts.task,
            **facts.label_figures,
            "rows of a run": facts.rows_of_a_run,
            "model": facts.model,
            **({"classes": len(facts.class_rows)} if facts.class_rows else {}),
        }
    )
    if not facts.class_rows:
        return
    show_lines()
    shown = list(facts.class_rows.items())[:MAX_CLASSES_SHOWN]
    rows = [
        (shorten(name), f"{rows:,}", shorten(facts.examples.get(name, ""))) for name, rows in shown
    ]
    rows += [("...", "", "")] * (len(facts.class_rows) > MAX_CLASSES_SHOWN)
    show_table(("class", "rows", "example"), rows, numbers=("rows",))
