"""``finetune find-batch``."""

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.batch_finder.child import Child, starting
from finetune.batch_finder.worker import MODULE
from finetune.commands.console import show_json, show_lines, show_table
from finetune.commands.options import (
    GroupedCommand,
    chosen_options,
    complete_folder,
    completes,
    config_option,
    given,
    output_options,
)
from finetune.commands.progress import showing
from finetune.config.schema import OPTIONS
from finetune.devices.mps.chips import MACS
from finetune.distributed.launch import read_launch
from finetune.errors import UsageError
from finetune.events import Emit, ignore

if TYPE_CHECKING:
    from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches


def find_batch(
    config: str | Path | None = None,
    *,
    machine: str | None = None,
    memory: str | None = None,
    limit: int | None = None,
    fresh: bool = False,
    emit: Emit = ignore,
    **options: Any,
) -> "FoundBatches":
    """Find the largest batch size that fits, and the fastest, as ``finetune find-batch`` does.

    Args:
        config: A YAML file or the name of a recipe.
        machine: A Mac such as ``m1-8gb``, to estimate its batch sizes instead of searching here.
        memory: The memory of such a Mac, such as ``16GiB``, in place of its name.
        limit: Largest batch size worth trying, from 1; None for the rows of the data.
        fresh: Search even if an earlier search has found the batch sizes.
        emit: Receives progress events.
        options: Those of ``finetune run`` for data, model, device, precision, cache and search.
            Where none names a mode, ``full`` and ``head`` are looked at. ``output_dir`` is for the
            results of a search as JSON and as a picture.

    Raises:
        UsageError: If the options make no sense, or no such machine is known.
        BatchDoesNotFit: If nowhere even one example fits.
        TrialFailed: If a trial failed for another reason than memory.
        ProcessLost: If another process, of several that torchrun has started, has ended.
    """
    from finetune.config.load import load_config

    if machine is not None and memory is not None:
        raise UsageError("--for and --memory both name a machine", remedy="give one of them")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}", remedy="give at least 1")
    output_dir = options.pop("output_dir", None)
    file = None if config is None else str(config)
    loaded = load_config(file=file, environment=os.environ, flags=options, assignments=())
    given = loaded.config, "max_length" in loaded.sources, limit, emit
    if machine is not None or memory is not None:
        from finetune.commands.batch_search import Request, estimate_batches

        return estimate_batches(Request(*given), machine=machine, memory=memory)
    # Of several processes each joins the others first, and takes its share of the cores' threads.
    is_alone = read_launch().world_size == 1
    with starting(MODULE) if is_alone else nullcontext(list[Child]()) as spares:
        # Each takes seconds to import PyTorch: the first child and this process at the same time.
        from finetune.commands.batch_search import Request, search_batches

        folder = None if output_dir is None else Path(output_dir).expanduser()
        return search_batches(Request(*given), spares, is_fresh=fresh, output_dir=folder)


EXAMPLES = """\b
Examples:
  finetune find-batch                  BERT-base and its head, on every device
  finetune find-batch --model minilm --memory-limit 2GiB --device cpu
  finetune find-batch --data reviews.csv --train-layers 2
  finetune find-batch --for m1-8gb     a Mac that is not here
"""
SECTIONS = ("data", "model", "search", "cache")
SEARCH_OPTIONS = [one.name for one in OPTIONS.values() if one.section in SECTIONS]
SEARCH_COLUMNS = ("tokens", "largest", "fails", "GiB", "of", "fastest", "use", "trials", "s")
ESTIMATE_COLUMNS = ("tokens", "batch", "from", "to", "GiB", "of")


@click.command(cls=GroupedCommand, epilog=EXAMPLES)
@config_option
@chosen_options(*SEARCH_OPTIONS, "device", "precision", "gradient_checkpointing", "optimizer")
@click.option("--limit", type=int, help="Largest size tried. Default: the rows of the data.")
@click.option("--fresh", is_flag=True, help="Search again, even if an earlier search found sizes.")
@click.option(
    "--for",
    "machine",
    metavar="MACHINE",
    shell_complete=completes("plain", MACS),
    help="Estimate for a Mac, such as m1-8gb.",
)
@click.option("--memory", metavar="SIZE", help="Estimate for a Mac with this much memory.")
@click.option(
    "--output-dir",
    default="runs/find-batch",
    shell_complete=complete_folder,
    help="Folder of the JSON and the picture.",
)
@output_options
def command(*, as_json: bool, quiet: bool, no_progress: bool, **flags: Any) -> None:
    """Find the largest batch size that fits, and the fastest.

    Takes real steps, each device in a child process that may use no more memory than is free.
    Without --freeze-core, --head or --train-layers it searches for all layers, and for the head
    alone.
    """
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        found = find_batch(emit=emit, **given(flags))
    if as_json:
        show_json(found.to_json())
    else:
        show_batches(found, folder=flags["output_dir"])


def show_batches(found: "FoundBatches", *, folder: str) -> None:
    """Print a line per device or padded length and mode, and notes below."""
    results, estimates = found.results, found.estimates
    notes = [
        f"{_place(one)}: features are extracted with --eval-batch-size {one.features_batch:,}"
        for one in estimates or results
        if one.features_batch
    ]
    if estimates:
        titles = ("machine", "mode", *ESTIMATE_COLUMNS)
        show_table(titles, map(_estimate_row, estimates), numbers=ESTIMATE_COLUMNS)
        title = "These are estimates: nothing was run on such a machine. They are based on"
        show_lines(title, *_bases(estimates), *notes)
        return
    show_table(
        ("device", "mode", *SEARCH_COLUMNS), map(_search_row, results), numbers=SEARCH_COLUMNS
    )
    notes += [
        f"{_place(one)}: the time limit ended the search; memory is predicted to hold "
        f"{one.predicted_maximum:,} examples"
        for one in results
        if one.predicted_maximum
    ]
    show_lines(*notes, f"results and picture: {folder}")


def _search_row(one: "BatchResult") -> Sequence[str]:
    return (
        one.device,
        _mode(one),
        str(one.padded_length),
        f"{one.max_verified:,}",
        "-" if one.first_failed is None else f"{one.first_failed:,}",
        *_peak_and_budget(one),
        f"{one.fastest:,}",
        f"{one.recommended:,}",
        str(len(one.trials)),
        f"{one.seconds:.0f}",
    )


def _estimate_row(one: "EstimateResult") -> Sequence[str]:
    sizes = (one.batch, one.lowest_batch, one.highest_batch)
    batches = (f"{size:,}" for size in sizes)
    return (one.machine, _mode(one), str(one.padded_length), *batches, *_peak_and_budget(one))


def _peak_and_budget(one: "BatchResult | EstimateResult") -> Sequence[str]:
    """Return both in GiB."""
    sizes = (one.peak_bytes, one.budget_bytes)
    return ["-" if size is None else f"{size / 2**30:.2f}" for size in sizes]


def _mode(one: "BatchResult | EstimateResult") -> str:
    is_unsplit = one.mode != "full" and not one.stores_features
    return f"{one.mode}, no stored features" if is_unsplit else one.mode


def _bases(estimates: Sequence["EstimateResult"]) -> list[str]:
    modes_by_basis: dict[str, dict[str, None]] = {}
    for one in estimates:
        modes_by_basis.setdefault(one.basis, {})[_mode(one)] = None
    return [f"{', '.join(modes)}: {basis}" for basis, modes in modes_by_basis.items()]


def _place(one: "BatchResult | EstimateResult") -> str:
    return f"{one.mode} at {one.padded_length} tokens"
