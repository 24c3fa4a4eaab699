"""``finetune evaluate``."""

from pathlib import Path

import click

from finetune.commands.console import show_json, show_scores
from finetune.commands.options import (
    completes,
    device_option,
    given,
    output_options,
    text_column_option,
    text_pair_column_option,
)
from finetune.commands.progress import showing
from finetune.devices.names import DeviceName

EXAMPLES = """\b
Examples:
  finetune evaluate runs/demo                    its test split
  finetune evaluate runs/demo --data later.csv   other rows and their labels
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--split",
    type=click.Choice(["test", "validation", "train"]),
    help="Split to evaluate on.  [default: test]",
)
@click.option(
    "--data",
    metavar="SOURCE",
    shell_complete=completes("file"),
    help="Other data to score, all rows of it, such as a table.",
)
@text_column_option
@text_pair_column_option
@click.option("--label-column", help="Column of the labels.  [default: the run's]")
@device_option
@output_options
def command(
    run: Path,
    *,
    split: str | None,
    data: str | None,
    device: DeviceName,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **columns: str | None,
) -> None:
    """Evaluate the model in the run folder RUN on a split of its data, or on other data."""
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.api.evaluate import evaluate

        found = evaluate(run, split=split, data=data, device=device, emit=emit, **given(columns))
    if as_json:
        show_json(found.to_json())
    else:
        where = found.split if data else f"{found.split} split"
        show_scores(f"{where}, {found.scores.samples:,} rows", found.scores)
