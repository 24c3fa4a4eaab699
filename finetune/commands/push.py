"""``finetune push``."""

from pathlib import Path
from typing import Any

import click

from finetune.commands.console import format_size, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing

EXAMPLES = """\b
Examples:
  finetune push runs/demo ada/demo --dry-run     list what would be uploaded
  finetune push runs/demo ada/demo --public
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Let everybody see it.  [default: private]")
@click.option("--revision", metavar="BRANCH", help="Branch to upload to.  [default: main]")
@click.option(
    "--without-report",
    "report",
    flag_value=False,
    default=True,
    help="Leave out report.html, which shows texts that the model gets wrong.",
)
@click.option(
    "--allow-private-data",
    is_flag=True,
    help="Upload the report of a run whose data are marked with --private-data, too.",
)
@click.option("--dry-run", is_flag=True, help="List the files and their sizes, and stop.")
@output_options
def command(
    run: Path,
    repository: str,
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **options: Any,
) -> None:
    """Upload the model of the run folder RUN to the Hugging Face Hub, as OWNER/NAME.

    With it go its tokenizer, its card and its report. A token is needed: run `hf auth login`, or
    set HF_TOKEN.
    """
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.api import push as api

        upload = api.Upload(run=run, repository=repository, **options)
        found = api.dry_run(upload) if dry_run else api.push(upload, emit=emit)
    if as_json:
        show_json(found.to_json())
        return
    rows = [(file.name, format_size(file.size_bytes)) for file in found.files]
    show_table(("file", "size"), rows, numbers=("size",))
    done = "would be uploaded to" if dry_run else "uploaded to"
    show_lines(f"{done} {found.url}, {'public' if found.public else 'private'}")
