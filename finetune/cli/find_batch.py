"""``finetune find-batch``."""

import os
from dataclasses import fields
from pathlib import Path
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
@click.option("--limit", type=click.IntRange(min=1), help="Largest size tried. Default: the rows.")
@click.option("--fresh", is_flag=True, help="Search again, whatever an earlier search has found.")
@click.option("--for", "machine", metavar="MACHINE", help="Foretell a Mac's, such as m1-8gb.")
@click.option("--memory", metavar="SIZE", help="Foretell those of a Mac with so much memory.")
@click.option("--output-dir", default="runs/find-batch", help="Folder of the JSON and the picture.")
@output_options
def command(
    *,
    config: str | None,
    limit: int | None,
    fresh: bool,
    machine: str | None,
    memory: str | None,
    output_dir: str,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **flags: Any,
) -> None:
    """Find the largest batch size that fits, and the fastest.

    Tries sizes by really training, each device in a process of its own that may use no more memory
    than is free. Without the name of a mode: all of the model, and its head alone.
    """
    from finetune.cli.batches import show_estimates, show_results
    from finetune.cli.console import show_json, showing

    is_estimated = machine is not None or memory is not None
    if machine is not None and memory is not None:
        raise click.UsageError("--for and --memory both name a machine: give one of them")
    with showing(is_quiet=quiet, has_progress=not no_progress) as emit:
        from finetune.config.load import load_config
        from finetune.pipeline.find import (
            Task,
            estimate_batches,
            find_batches,
            keep_results,
        )
        from finetune.runs.folder import check_writable

        loaded = load_config(
            file=config, environment=os.environ, flags=given(flags), assignments=()
        )
        task = Task(
            loaded.config,
            has_max_length="max_length" in loaded.origins,
            limit=limit,
            is_fresh=fresh,
        )
        if is_estimated:
            found = estimate_batches(task, machine=machine, memory=memory, emit=emit)
        else:
            folder = Path(output_dir).expanduser()
            check_writable(folder)
            found = find_batches(task, emit=emit)
            keep_results(found, folder)
    if as_json:
        show_json(found)
    elif is_estimated:
        show_estimates(found["estimates"])
    else:
        show_results(found["results"], folder=output_dir)
