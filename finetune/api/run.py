"""``finetune run`` as a function.

The libraries that training needs take seconds to import, so they are imported once the call is
known to be right.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, overload

from finetune.api.resuming import AUTO, check_changes, choose_work, with_changes
from finetune.config.load import LoadedConfig, check_option, load_config
from finetune.config.options import Options
from finetune.distributed.launch import read_launch
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import RunFolder

if TYPE_CHECKING:
    from finetune.api.dry_run import DryRun
    from finetune.runs.results import RunResults
    from finetune.runs.seeds import SeedResults


@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: None = None,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "RunResults": ...


@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: int,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "SeedResults": ...


def run(
    config: str | Path | None = None,
    *,
    seeds: int | None = None,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "RunResults | SeedResults":
    """Fine-tune a classifier and write its run folder, as ``finetune run`` does.

    Args:
        config: A YAML file or the name of a recipe.
        seeds: How many seeds to train, from ``seed`` on, with the same splits; each in a folder of
            its own. A folder of them is resumed as that of a run.
        resume_from_checkpoint: The folder of an interrupted run, or a checkpoint in it; of a
            finished run, whose model a new run trains to more ``num_train_epochs``; ``auto``
            for the run in ``output_dir``, or for the newest of its default name that has not
            finished, and a new run where there is none.
        assignments: More options, as ``section.option=value``.
        emit: Is called with the events of ``finetune.events``.
        options: The command's flags, with underscores: ``freeze_core=True``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    given = read_options(
        config,
        resume_from_checkpoint=resume_from_checkpoint,
        assignments=assignments,
        **options,
    )
    if seeds is not None:
        return _run_seeds(given, seeds, resume_from=resume_from_checkpoint, emit=emit)
    if read_launch().world_size > 1:
        return _run_together(given, resume_from_checkpoint, emit=emit)
    work = choose_work(given, resume_from_checkpoint, emit=emit)
    if work.results:
        return work.results
    from finetune.api.training import train

    return train(work, emit=emit)


def _run_together(
    given: LoadedConfig, resume_from: str | Path | None, *, emit: Emit
) -> "RunResults":
    from finetune.distributed.joining import join_processes

    processes = join_processes()
    # It depends on folders, which the main process is about to change.
    work = processes.broadcast(lambda: choose_work(given, resume_from, emit=emit))
    if work.results:
        return work.results
    from finetune.api.training import train

    return train(work, emit=emit if processes.is_main else ignore, processes=processes)


def _run_seeds(
    given: LoadedConfig, count: int, *, resume_from: str | Path | None, emit: Emit
) -> "SeedResults":
    if count < 2:
        raise UsageError(f"{count} seeds are not several", remedy="give --seeds 2 or more")
    if (processes := read_launch().world_size) > 1:
        raise UsageError(
            f"several seeds are trained by one process, and there are {processes}",
            remedy="leave out --seeds, or start without torchrun or accelerate launch",
        )
    from finetune.api.seeds import find_seeds, train_seeds

    config, begun = given.config, None
    if resume_from is not None:
        begun = find_seeds(config, count, resume_from=resume_from)
        if begun is None:
            emit(Info("there are no seeds to go on with: new runs begin"))
        elif saved := begun.load_config():
            check_changes(given, saved, RunFolder(begun.path))
            config = with_changes(saved, given)
    return train_seeds(config, count, begun=begun, origins=given.origins, emit=emit)


def dry_run(
    config: str | Path | None = None,
    *,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "DryRun":
    """Prepare a run up to its first step, write nothing, and return what it would do.

    Whatever would keep the run from starting is raised here too. The arguments are those of
    :func:`run`.
    """
    loaded = read_options(config, assignments=assignments, **options)
    from finetune.api.dry_run import describe

    return describe(loaded.config, emit=emit)


def read_options(
    config: str | Path | None = None,
    *,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    **options: Unpack[Options],
) -> LoadedConfig:
    """Return all options of a run, of which nothing is wrong without looking at data and model.

    The arguments are those of :func:`run`.
    """
    if config is not None and resume_from_checkpoint not in (None, AUTO):
        raise ConfigurationInvalid(
            "a run is resumed with its own configuration", remedy="leave out --config"
        )
    for option in options:
        check_option(option, origin="finetune.run()")
    return load_config(
        file=None if config is None else str(config),
        environment=os.environ,
        flags=dict(options),
        assignments=assignments,
    )
