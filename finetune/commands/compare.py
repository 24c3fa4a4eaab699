"""``finetune compare``: finished runs on the same test rows."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_result_table
from finetune.config.schema import NonNegativeInt

if TYPE_CHECKING:
    from finetune.runs.compare import Comparison

MAX_ROWS = 10
EXAMPLES = """\b
Examples:
  finetune compare runs/trec-minilm-head runs/trec-minilm-full
  finetune compare runs --baseline best
"""


def compare(
    *runs: str | Path | list[Any],
    baseline: Literal["first", "best"] = "first",
    limit: NonNegativeInt = MAX_ROWS,
) -> "Comparison":
    """Compare finished runs on their test rows, as ``finetune compare`` does.

    Args:
        runs: Run folders, folders that contain some, results of runs, or a list of these.
        baseline: The ``first`` run, or the ``best`` by its validation metric.
        limit: Maximum number of rows listed that one run predicts right and the other wrong, each
            way.
        emit: Receives the events of ``finetune.events``.
    """
    from finetune.runs.compare import compare_runs

    named = [one for run in runs for one in (run if isinstance(run, list) else [run])]
    paths = [Path(run).expanduser() for run in named]
    return compare_runs(paths, baseline=baseline, max_rows=limit)


@click.command(epilog=EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=flags.PATH)
@click.option(
    "--baseline",
    type=click.Choice(["first", "best"]),
    default="first",
    help="Run that the others are compared with: the first, or the best on its validation split.  "
    "[default: first]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=MAX_ROWS,
    help="Show at most N rows that one run predicts right and the other wrong, each way.  "
    f"[default: {MAX_ROWS}]",
)
@flags.with_display
def command(*, runs: tuple[Path, ...], display: flags.Display, **options: Any) -> None:
    """Compare finished runs on the same test rows: metrics, options, rows that differ.

    RUN is a run folder, or a folder that contains several.
    """
    display.run(partial(compare, *runs), _show, **options)


def _show(comparison: "Comparison") -> None:
    from finetune.runs.compare import tabulate

    for group in comparison.groups:
        for table in tabulate(group):
            show_lines(table.title, "")
            show_result_table(table)
            if table.note:
                show_lines(*click.wrap_text(table.note).splitlines())
        if group.verdict:
            show_lines(*click.wrap_text(group.verdict).splitlines())
