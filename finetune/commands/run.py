"""``finetune run``: the command, and ``finetune.run``, which it calls.

The libraries that training needs take seconds to import, so they are imported once the call is
known to be right.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, overload

import click

from finetune.commands.console import (
    show_facts,
    show_json,
    show_lines,
    show_scores,
    show_table,
)
from finetune.commands.options import (
    GroupedCommand,
    assignments_option,
    completes,
    config_option,
    config_options,
    given,
    output_options,
)
from finetune.commands.progress import showing
from finetune.distributed.launch import read_launch
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import RunFolder
from finetune.tasks.labels import listed_counts

if TYPE_CHECKING:
    from finetune.commands.dry_run import DryRun
    from finetune.config.load import LoadedConfig
    from finetune.runs.results import RunResults
    from finetune.runs.seeds import SeedResults
    from finetune.tasks.scores import MetricValue

EXAMPLES = """\b
Examples:
  finetune run                                BERT-base on TREC, from the Hub
  finetune run --freeze-core --device mps     only its head, on a Mac's GPU
  finetune run --config offline               without a network
  finetune run --freeze-core --seeds 5        mean and interval of five seeds
"""

# Of a dry run's JSON, the names that do not say what they are.
IN_WORDS = {
    "real_token_share": "share of tokens that are not padding",
    "rows_by_class": "training rows by class",
    "tokens": "tokens of a training text",
    "batches_by_width": "batches of an epoch by padded length",
}


@click.command(cls=GroupedCommand, epilog=EXAMPLES)
@config_option
@click.option(
    "--resume-from-checkpoint",
    metavar="RUN",
    shell_complete=completes("dir", ["auto"]),
    help="Resume the run in this folder; auto resumes the one in --output-dir, or the newest "
    "of its default name that has not finished, and starts a new run if there is none.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=2),
    metavar="N",
    help="Train N seeds, from --seed on, with the same splits; print mean and 95% interval.",
)
@assignments_option
@click.option(
    "--dry-run", "is_dry_run", is_flag=True, help="Print what the run would do, and stop."
)
@click.option(
    "--num-processes",
    type=click.IntRange(min=1),
    default=1,
    help="Train in so many processes of this host, such as one for each GPU.  [default: 1]",
)
@config_options
@output_options
def command(
    *,
    is_dry_run: bool,
    seeds: int | None,
    num_processes: int,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **flags: Any,
) -> None:
    """Fine-tune a classifier and write a run folder."""
    for option in ("seeds", "resume_from_checkpoint") if is_dry_run else ():
        if click.get_current_context().params[option] is not None:
            raise UsageError(
                "--dry-run is for a new run of one seed",
                remedy=f"leave out --dry-run or --{option.replace('_', '-')}",
            )
    if num_processes > 1 and not is_dry_run and read_launch().world_size == 1:
        sys.exit(_run_in_processes(num_processes, seeds, flags))
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        if seeds is not None:
            found = run(seeds=seeds, emit=emit, **given(flags))
        elif is_dry_run:
            plan = dry_run(emit=emit, **given(flags)).to_json()
        else:
            results = run(emit=emit, **given(flags))
    if seeds is not None:
        _show_seeds(found, as_json=as_json)
    elif is_dry_run and as_json:
        show_json(plan)
    elif is_dry_run:
        _show_plan(plan)
    elif as_json:
        show_json({**results.to_json(), "output_dir": results.output_dir})
    else:
        from finetune.runs.manifest import Manifest

        facts, training = results.facts, results.training
        folder = RunFolder(Path(results.output_dir))
        pair = " --text-pair TEXT" * Manifest.read(folder).reads_pairs
        show_scores(f"test split of {facts.data}, {results.test.samples:,} rows", results.test)
        show_lines(
            f"trained in {training.train_runtime:.1f} s, validation aside, on {facts.device}, "
            f"{training.train_samples_per_second:.0f} examples/s",
            f"run folder: {results.output_dir}",
            f"report: {folder.report_file}",
            f"classify with it: finetune predict {quote(results.output_dir)} TEXT{pair}",
        )


def _show_plan(plan: dict[str, Any]) -> None:
    del plan["schema_version"]
    # Hundreds of classes fit no line, and a number has none.
    plan["rows_by_class"] = listed_counts(plan["rows_by_class"]) or "no classes"
    show_facts({IN_WORDS.get(name, name): fact for name, fact in plan.items()})


def _run_in_processes(count: int, seeds: int | None, flags: dict[str, Any]) -> int:
    if seeds is not None:
        raise UsageError(
            "several seeds are trained by one process",
            remedy="leave out --seeds or --num-processes",
        )
    # What is wrong with the options is said once, and at once.
    read_options(**given(flags))
    from finetune.commands.launch import run_in_processes

    return run_in_processes(count, click.get_current_context().obj)


def _show_seeds(found: "SeedResults", *, as_json: bool) -> None:
    if as_json:
        show_json({**found.to_json(), "output_dir": found.output_dir})
        return
    from finetune.runs.folder import seed_name

    runs = list(found.runs.values())
    values, means = runs[0].test.values, found.test
    rows = [[seed_name(seed), *map(str, run.test.values)] for seed, run in found.runs.items()]
    rows.append(["mean", *(_format_mean(one, means[one.metric.name].value) for one in values)])
    limits = [(one, means[one.metric.name]) for one in values]
    rows.append(
        [
            "95% interval",
            *(f"{_format_mean(one, it.low)} to {_format_mean(one, it.high)}" for one, it in limits),
        ]
    )
    columns = ("run", *(one.metric.title for one in values))
    show_lines(f"test split of {runs[0].facts.data}, {runs[0].test.samples:,} rows", "")
    show_table(columns, rows, numbers=columns[1:])
    best = "not known, there is no validation split"
    if found.best_seed is not None:
        best = str(Path(found.output_dir) / seed_name(found.best_seed))
    show_lines(f"best on validation: {best}", f"run folders: {found.output_dir}")


def _format_mean(metric_value: "MetricValue", mean: float) -> str:
    # The interval of a few seeds may go beyond 0% or 100%.
    shown = min(max(mean, 0.0), 1.0) if metric_value.metric.is_fraction else mean
    return str(replace(metric_value, value=shown))


@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: None = None,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Any,
) -> "RunResults": ...


@overload
def run(
    config: str | Path | None = None,
    *,
    seeds: int,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Any,
) -> "SeedResults": ...


def run(
    config: str | Path | None = None,
    *,
    seeds: int | None = None,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Any,
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
    loaded = read_options(
        config,
        resume_from_checkpoint=resume_from_checkpoint,
        assignments=assignments,
        **options,
    )
    if seeds is not None:
        return _run_seeds(loaded, seeds, resume_from=resume_from_checkpoint, emit=emit)
    if read_launch().world_size > 1:
        return _run_together(loaded, resume_from_checkpoint, emit=emit)
    from finetune.commands.resuming import choose_work

    work = choose_work(loaded, resume_from_checkpoint, emit=emit)
    if work.results:
        return work.results
    from finetune.commands.training import train

    return train(work, emit=emit)


def _run_together(
    given: "LoadedConfig", resume_from: str | Path | None, *, emit: Emit
) -> "RunResults":
    from finetune.commands.resuming import choose_work
    from finetune.commands.training import train
    from finetune.distributed.processes import join_processes

    processes = join_processes()
    # It depends on folders, which the main process is about to change.
    work = processes.broadcast(lambda: choose_work(given, resume_from, emit=emit))
    if work.results:
        return work.results
    return train(work, emit=emit if processes.is_main else ignore, processes=processes)


def _run_seeds(
    given: "LoadedConfig", count: int, *, resume_from: str | Path | None, emit: Emit
) -> "SeedResults":
    if count < 2:
        raise UsageError(f"{count} seeds are not several", remedy="give --seeds 2 or more")
    if (processes := read_launch().world_size) > 1:
        raise UsageError(
            f"several seeds are trained by one process, and there are {processes}",
            remedy="leave out --seeds, or start without torchrun or accelerate launch",
        )
    from finetune.commands.resuming import check_changes, with_changes
    from finetune.commands.seeds import find_seeds, train_seeds

    config, begun = given.config, None
    if resume_from is not None:
        begun = find_seeds(config, count, resume_from=resume_from)
        if begun is None:
            emit(Info("there are no seeds to go on with: new runs begin"))
        elif saved := begun.load_config():
            check_changes(given, saved, RunFolder(begun.path))
            config = with_changes(saved, given)
    return train_seeds(config, count, begun=begun, origins=given.sources, emit=emit)


def dry_run(
    config: str | Path | None = None,
    *,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Any,
) -> "DryRun":
    """Prepare a run up to its first step, write nothing, and return what it would do.

    Whatever would keep the run from starting is raised here too. The arguments are those of
    :func:`run`.
    """
    loaded = read_options(config, assignments=assignments, **options)
    from finetune.commands.dry_run import describe

    return describe(loaded.config, emit=emit)


def read_options(
    config: str | Path | None = None,
    *,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    **options: Any,
) -> "LoadedConfig":
    """Return all options of a run, of which nothing is wrong without looking at data and model.

    The arguments are those of :func:`run`.
    """
    from finetune.config.load import load_config

    if config is not None and resume_from_checkpoint not in (None, "auto"):
        raise ConfigurationInvalid(
            "a run is resumed with its own configuration", remedy="leave out --config"
        )
    return load_config(
        file=None if config is None else str(config),
        environment=os.environ,
        flags=dict(options),
        assignments=assignments,
    )
