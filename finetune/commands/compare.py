"""``finetune compare``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.commands.console import shorten, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing
from finetune.errors import NotWritten
from finetune.events import Emit, ignore
from finetune.files import write_text_atomically

if TYPE_CHECKING:
    from finetune.runs.compare import Baseline, Comparison
    from finetune.tasks.figures import Table


MAX_ROWS = 10


def compare(
    *runs: str | Path,
    baseline: "Baseline" = "first",
    rows: int = MAX_ROWS,
    output: str | Path | None = None,
    emit: Emit = ignore,
) -> "Comparison":
    """Compare finished runs on their test rows, as ``finetune compare`` does.

    Args:
        runs: Run folders, or folders that contain some.
        baseline: The run that the others are compared with: the ``first``, or the ``best`` by its
            validation metric.
        rows: At most so many of those that one run has right and the other wrong, each way.
        output: A page to write; an earlier one is replaced.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        NotARun: If a folder is no finished run and contains none.
        UsageError: If there are fewer than two runs.
        DataDiffers: If they were tested on different rows.
        NotWritten: If the page can't be written.
    """
    from finetune.runs.compare import compare_runs
    from finetune.runs.finished import FinishedRun, find_finished_runs

    folders = find_finished_runs([Path(one).expanduser() for one in runs], emit=emit)
    found = [FinishedRun.read(folder) for folder in folders]
    comparison = compare_runs(found, baseline=baseline, most_rows=rows)
    if output is not None:
        _write_page(comparison, Path(output))
    return comparison


def _write_page(comparison: "Comparison", path: Path) -> None:
    from finetune.report.compare import render_comparison

    page = render_comparison(comparison)
    try:
        write_text_atomically(path, page)
    except OSError as error:
        raise NotWritten(
            f"{path} can't be written: {error.strerror}",
            remedy="name a file in a folder that exists, such as compare.html",
        ) from error


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
