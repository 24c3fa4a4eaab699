"""``finetune data``."""

from dataclasses import fields
from typing import Any

import click

from finetune.cli.options import chosen_options, config_option, load, output_options
from finetune.config.schema import DataConfig

EXAMPLES = """\b
Examples:
  finetune data check                               TREC
  finetune data check --data reviews.csv            your own file
  finetune data check --data hub:owner/name --json
"""


@click.group()
def command() -> None:
    """Check the data of a run."""


@command.command(epilog=EXAMPLES)
@config_option
@chosen_options(*(option.name for option in fields(DataConfig)), "model", "revision", "max_length")
@output_options
def check(
    *, config: str | None, as_json: bool, quiet: bool, no_progress: bool, **flags: Any
) -> None:
    """Print statistics of the data and suggest what to change.

    Rows and classes, duplicates, texts with several labels, test rows that are in the training
    split too, and lengths in tokens. Of the model, only the tokenizer is loaded.
    """
    from finetune.cli.console import show_json, showing
    from finetune.cli.findings import show_report

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.api.check_data import check_data

        report = check_data(load(flags, config=config).config, emit=emit)
    if as_json:
        show_json(report.to_json())
    else:
        show_report(report)
