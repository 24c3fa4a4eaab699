"""``finetune evaluate``."""

from pathlib import Path

import click

from finetune.cli.options import device_option, output_options
from finetune.devices.names import DeviceName


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--split",
    type=click.Choice(["test", "validation", "train"]),
    default="test",
    help="Split to evaluate on.  [default: test]",
)
@device_option
@output_options
def command(
    run: Path, *, split: str, device: DeviceName, as_json: bool, quiet: bool, no_progress: bool
) -> None:
    """Evaluate the model in the run folder RUN on a split of its data."""
    from finetune.cli.console import show_json, show_metrics, showing
    from finetune.report.baseline import warn_unless_better

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.pipeline.api import evaluate

        metrics = evaluate(run, split=split, device=device, emit=emit)
        warn_unless_better(metrics["accuracy"], metrics["confusion_matrix"], emit=emit)
    if as_json:
        show_json(metrics)
        return
    show_metrics(f"{split} split, {metrics['samples']:,} rows", metrics)
