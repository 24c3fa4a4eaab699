"""``finetune run``."""

from typing import Any

import click

from finetune.cli.console import show_facts, show_json, show_lines, show_scores, showing
from finetune.cli.help import GroupedCommand
from finetune.cli.options import (
    assignments_option,
    config_option,
    config_options,
    given,
    output_options,
)
from finetune.devices.launch import read_launch

EXAMPLES = """\b
Examples:
  finetune run                                BERT-base on TREC, from the Hub
  finetune run --freeze-core --device mps     only its head, on a Mac's GPU
  finetune run --config offline               without a network
"""


@click.command(cls=GroupedCommand, epilog=EXAMPLES)
@config_option
@click.option(
    "--resume-from-checkpoint",
    metavar="RUN",
    help="Resume the run in this folder; auto resumes the one in --output-dir, or the newest of "
    "its default name, and starts a new run if there is none.",
)
@assignments_option
@click.option("--dry-run", is_flag=True, help="Print what the run would do, and stop.")
@config_options
@output_options
def command(*, dry_run: bool, as_json: bool, quiet: bool, no_progress: bool, **flags: Any) -> None:
    """Fine-tune a classifier and write a run folder."""
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        from finetune.api import run as api

        if dry_run:
            plan = api.dry_run(emit=emit, **given(flags)).to_json()
        else:
            results = api.run(emit=emit, **given(flags))
    if not read_launch().is_main:
        return
    if dry_run and as_json:
        show_json(plan)
    elif dry_run:
        show_facts({name: fact for name, fact in plan.items() if name != "schema_version"})
    elif as_json:
        show_json({**results.to_json(), "output_dir": results.output_dir})
    else:
        facts, training = results.facts, results.training
        show_scores(f"test split of {facts.data}, {results.test.samples:,} rows", results.test)
        show_lines(
            f"trained in {training.train_runtime:.1f} s on {facts.device}, "
            f"{training.train_samples_per_second:.0f} examples/s",
            f"run folder: {results.output_dir}",
        )
