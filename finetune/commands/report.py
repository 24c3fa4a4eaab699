"""``finetune report``."""

import webbrowser
from pathlib import Path

import click

from finetune.commands.console import show_json, show_lines
from finetune.commands.options import output_options
from finetune.commands.progress import showing
from finetune.events import WarningMessage

SCHEMA_VERSION = 1
EXAMPLES = """\b
Examples:
  finetune report runs/demo --open
  finetune report runs/demo --json
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--open", "opens", is_flag=True, help="Show the page in the browser.")
@output_options
def command(run: Path, *, opens: bool, as_json: bool, **output: bool) -> None:
    """Write report.html and the model card of the run folder RUN anew, from its other files."""
    with showing(**output) as emit:
        from finetune.api.report import report

        page = report(run)
        if opens and not webbrowser.open(page.resolve().as_uri()):
            emit(WarningMessage("no browser was found", remedy=f"open {page} yourself"))
    if as_json:
        show_json({"schema_version": SCHEMA_VERSION, "report": str(page)})
    else:
        show_lines(f"report: {page}")
