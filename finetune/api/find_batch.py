"""``finetune find-batch`` as a function."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from finetune.batch_finder.child import Child, starting
from finetune.batch_finder.worker import MODULE
from finetune.config.load import check_option, load_config
from finetune.config.options import Options
from finetune.distributed.launch import read_launch
from finetune.errors import UsageError
from finetune.events import Emit, ignore

if TYPE_CHECKING:
    from finetune.batch_finder.results import FoundBatches


def find_batch(
    config: str | Path | None = None,
    *,
    machine: str | None = None,
    memory: str | None = None,
    limit: int | None = None,
    fresh: bool = False,
    emit: Emit = ignore,
    **options: Unpack[Options],
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
        ProbeFailed: If a probe failed for another reason than memory.
        ProcessLost: If another process, of several that torchrun has started, has ended.
    """
    for option in options:
        check_option(option, origin="finetune.find_batch()")
    if machine is not None and memory is not None:
        raise UsageError("--for and --memory both name a machine", remedy="give one of them")
    if limit is not None and limit < 1:
        raise UsageError(f"--limit is {limit}", remedy="give at least 1")
    output_dir = options.pop("output_dir", None)
    file = None if config is None else str(config)
    loaded = load_config(file=file, environment=os.environ, flags=options, assignments=())
    given = loaded.config, "max_length" in loaded.origins, limit, emit
    if machine is not None or memory is not None:
        from finetune.api.batch_search import Request, estimate_batches

        return estimate_batches(Request(*given), machine=machine, memory=memory)
    # Of several processes each joins the others first, and takes its share of the cores' threads.
    is_alone = read_launch().world_size == 1
    with starting(MODULE) if is_alone else nullcontext(list[Child]()) as spares:
        # Each takes seconds to import PyTorch: the first child and this process at the same time.
        from finetune.api.batch_search import Request, search_batches

        folder = None if output_dir is None else Path(output_dir).expanduser()
        return search_batches(Request(*given), spares, is_fresh=fresh, output_dir=folder)
