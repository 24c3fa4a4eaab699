"""``finetune report``: regenerates the report and the model card of a run."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.commands import flags
from finetune.commands.console import show_lines
from finetune.events import WarningMessage, emit
from finetune.runs.folder import RunFolder, SeveralFolder, open_run_folder

if TYPE_CHECKING:
    from finetune.runs.results import RunResults
    from finetune.runs.several import Rows, SeveralResults

EXAMPLES = """\b
Examples:
  finetune report runs/demo --open
  finetune report runs/demo --json
"""


def report(run: str | Path) -> Path:
    """Regenerate the report and the model card of a run from the files in its folder."""
    folder = open_run_folder(Path(run))
    from finetune.runs.results import read_results

    results = read_results(folder)
    with folder.lock():
        folder.check()
        return write_pages(folder, results)


def write_pages(folder: RunFolder, results: "RunResults") -> Path:
    """Write the report and the model card of a run, and return the report path."""
    from finetune.report.card import write_cards
    from finetune.report.page import write_report

    path = write_report(folder, results)
    write_cards(folder, results)
    return path


def write_folds_page(folder: SeveralFolder, results: "SeveralResults", rows: "Rows") -> None:
    """Write the page of a finished cross-validation."""
    from finetune.report.page import write_folds_report

    write_folds_report(folder, results, rows)


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.option("--open", "opens", is_flag=True, help="Open the report in the browser.")
@flags.with_display
def command(*, run: Path, opens: bool, display: flags.Display) -> None:
    """Regenerate report.html and the model card from the other files in the run folder RUN."""
    with display.progress():
        page = report(run)
        if opens and not webbrowser.open(page.resolve().as_uri()):
            emit(WarningMessage("can't open a browser", remedy=f"open {page} yourself"))
    display.show({"report": str(page)}, lambda facts: show_lines(f"report: {facts['report']}"))
