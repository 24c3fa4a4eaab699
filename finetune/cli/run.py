"""``finetune run``."""

from typing import Any

import click

from finetune.cli.options import (
    assignments_option,
    config_option,
    config_options,
    given,
    output_options,
)

EXAMPLES = """\b
Examples:
  finetune run                                BERT-base on TREC, from the Hub
  finetune run --freeze-core --device mps     only its head, on a Mac's GPU
  finetune run --config offline               without a network
"""


@click.command(epilog=EXAMPLES)
@config_option
@click.option("--resume-from-checkpoint", metavar="RUN", help="Resume the run in this folder.")
@assignments_option
@click.option("--dry-run", is_flag=True, help="Print what the run would do, and stop.")
@config_options
@output_options
def command(*, dry_run: bool, as_json: bool, quiet: bool, no_progress: bool, **flags: Any) -> None:
    """Fine-tune a classifier and write a run folder."""
    from finetune.cli.console import show_facts, show_json, show_lines, show_metrics, showing
    from finetune.report.baseline import warn_unless_better

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.pipeline.api import run

        results = run(emit=emit, dry_run=dry_run, **given(flags))
        if not dry_run:
            warn_unless_better(
                results["test_accuracy"], results["test_confusion_matrix"], emit=emit
            )
    if as_json:
        show_json(results)
        return
    if dry_run:
        show_facts({name: fact for name, fact in results.items() if name != "schema_version"})
        return
    test = {name.removeprefix("test_"): value for name, value in results.items()}
    show_metrics(f"test split of {results['data']}, {results['test_samples']:,} rows", test)
    show_lines(
        f"trained in {results['train_runtime']:.1f} s on {results['device']}, "
        f"{results['train_samples_per_second']:.0f} examples/s",
        f"run folder: {results['output_dir']}",
    )
