"""``finetune compare``: compares finished runs on the same test rows."""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from finetune.commands import flags
from finetune.commands.console import show_paragraph, show_result_table
from finetune.config.schema import NonNegativeInt

if TYPE_CHECKING:
    from finetune.runs.compare import Comparison

EXAMPLES = """\b
Examples:
  finetune compare runs/trec-minilm-head runs/trec-minilm-full
  finetune compare runs --reference best
"""


def compare(
    *runs: str | Path | list[Any],
    reference: Literal["first", "best"] = "first",
    limit: NonNegativeInt = 10,
) -> "Comparison":
    """Compare finished runs on their test rows, like ``finetune compare``.

    Args:
        runs: Run folders, folders that contain runs, run results, or a list of these.
        reference: Run to compare the others with: the first, or the best on validation rows.
        limit: Maximum number of rows to show that only one of two runs predicts correctly.
        emit: Receives the events of ``finetune.events``.
    """
    from finetune.runs.compare import compare_runs
    from finetune.runs.folder import find_latest

    lists = (run if isinstance(run, list) else [run] for run in runs)
    paths = [find_latest(Path(run)).expanduser() for run in chain.from_iterable(lists)]
    return compare_runs(paths, reference=reference, max_rows=limit)


@click.command(epilog=EXAMPLES)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=flags.PATH)
@flags.options_of(compare)
@flags.with_display
def command(*, runs: tuple[Path, ...], display: flags.Display, **options: Any) -> None:
    """Compare finished runs on the same test rows: metrics, options, disagreements.

    RUN is a run folder, a folder that contains several runs, or latest.
    """
    display.run(partial(compare, *runs), _show, **options)


def _show(comparison: "Comparison") -> None:
    from finetune.runs.compare import tabulate

    for group in comparison.groups:
        for note in group.notes:
            show_paragraph(note)
        for table in tabulate(group):
            show_result_table(table, title=table.title)
        if group.verdict:
            show_paragraph(group.verdict)
