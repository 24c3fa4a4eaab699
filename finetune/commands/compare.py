"""``finetune compare``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.api.compare import MAX_ROWS
from finetune.commands.console import shorten, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing

if TYPE_CHECKING:
    from finetune.runs.compare import Baseline, Comparison
    from finetune.tasks.figures import Table

EXAMPLES = """\b
Examples:
  finetune compare runs/trec-minilm-head runs/trec-minilm-full
  finetune compare runs --baseline best --output compare.html
"""


@click.command(epilog=EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--baseline",
    type=click.Choice(["first", "best"]),
    default="first",
    help="Run that the others are compared with: the first, or the best on its validation split.  "
    "[default: first]",
)
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=MAX_ROWS,
    help="Show at most N rows that one has right and the other wrong, each way.  "
    f"[default: {MAX_ROWS}]",
)
@click.option("--output", type=click.Path(path_type=Path), help="Also write this page, as HTML.")
@output_options
def command(
    runs: tuple[Path, ...],
    *,
    baseline: "Baseline",
    rows: int,
    output: Path | None,
    as_json: bool,
    **shown: bool,
) -> None:
    """Compare finished runs on the same test rows: metrics, options, rows that differ.

    RUN is a run folder, or a folder that contains several.
    """
    with showing(**shown) as emit:
        from finetune.api.compare import compare

        found = compare(*runs, baseline=baseline, rows=rows, output=output, emit=emit)
    if as_json:
        show_json(found.to_json())
    else:
        _show(found, page=output)


def _show(found: "Comparison", *, page: Path | None) -> None:
    from finetune.report.compare import tabulate

    for table in tabulate(found):
        _show_table(table)
    if page is not None:
        show_lines(f"page: {page}")


def _show_table(table: "Table") -> None:
    show_lines(table.title, "")
    rows = [[*map(shorten, row)] for row in table.rows]
    show_table(table.columns, rows, numbers=table.columns[table.text_columns :])
    if table.note:
        show_lines(*click.wrap_text(table.note).splitlines())
