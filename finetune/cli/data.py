"""``finetune data``: looks at data before a run."""

import os
from dataclasses import fields
from typing import Any

import click

from finetune.cli.options import chosen_options, config_option, given, output_options
from finetune.config.schema import DataConfig

EXAMPLES = """\b
Examples:
  finetune data check                               TREC
  finetune data check --data reviews.csv            a file of yours
  finetune data check --data hub:owner/name --json
"""


@click.group()
def command() -> None:
    """Look at data before a run."""


@command.command(epilog=EXAMPLES)
@config_option
@chosen_options(*(option.name for option in fields(DataConfig)), "model", "revision", "max_length")
@output_options
def check(
    *, config: str | None, as_json: bool, quiet: bool, no_progress: bool, **flags: Any
) -> None:
    """Show what the data holds and what is odd about it.

    Rows, classes, repeated and contradictory texts, test rows that stand in the training split,
    and how long the texts are for the model. No model is loaded but its tokenizer.
    """
    from finetune.cli.console import show_json, showing
    from finetune.cli.findings import show_findings
    from finetune.config.load import load_config

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.pipeline.check import check_data

        loaded = load_config(
            file=config, environment=os.environ, flags=given(flags), assignments=()
        )
        findings = check_data(loaded.config, emit=emit)
    if as_json:
        show_json(findings)
    else:
        show_findings(findings)
