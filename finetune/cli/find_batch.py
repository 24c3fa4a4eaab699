"""``finetune find-batch``."""

from dataclasses import fields
from typing import Any

import click

from finetune.cli.options import chosen_options, config_option, given, output_options
from finetune.config.schema import CacheConfig, DataConfig, ModelConfig, SearchConfig

EXAMPLES = """\b
Examples:
  finetune find-batch                                  every device, all of BERT-base and its head
  finetune find-batch --model minilm --memory-limit 2GiB --device cpu
  finetune find-batch --data reviews.csv --train-layers 2
  finetune find-batch --for m1-8gb                     a Mac that is not here
"""
OPTIONS = [
    option.name
    for section in (DataConfig, ModelConfig, SearchConfig, CacheConfig)
    for option in fields(section)
]


@click.command(epilog=EXAMPLES)
@config_option
@chosen_options(*OPTIONS, "device", "precision")
@click.option("--limit", type=int, help="Largest size tried. Default: the rows of the data.")
@click.option("--fresh", is_flag=True, help="Search again, even if an earlier search found sizes.")
@click.option("--for", "machine", metavar="MACHINE", help="Estimate for a Mac, such as m1-8gb.")
@click.option("--memory", metavar="SIZE", help="Estimate for a Mac with this much memory.")
@click.option("--output-dir", default="runs/find-batch", help="Folder of the JSON and the picture.")
@output_options
def command(*, as_json: bool, quiet: bool, no_progress: bool, **flags: Any) -> None:
    """Find the largest batch size that fits, and the fastest.

    Tries sizes by really training, each device in a process of its own that may use no more memory
    than is free. Without the name of a mode: all of the model, and its head alone.
    """
    from finetune.cli.console import show_json, showing

    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.api.find_batch import find_batch

        found = find_batch(emit=emit, **given(flags))
    if as_json:
        show_json(found.to_json())
    else:
        from finetune.cli.batches import show_batches

        show_batches(found, folder=flags["output_dir"])
