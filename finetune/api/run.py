"""``finetune run`` as a function.

The libraries that training needs take seconds to import, so they are imported once the call is
known to be right.
"""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from finetune.config.load import LoadedConfig, check_option, load_config
from finetune.config.options import Options
from finetune.config.schema import SECTION_OF_OPTION, Config
from finetune.devices.launch import read_launch
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import (
    RunFolder,
    load_saved_config,
    next_free_folder,
    open_run_folder,
    read_seeds,
    seeds_file,
)

if TYPE_CHECKING:
    from finetune.devices.processes import Processes
    from finetune.runs.results import DryRun, RunResults
    from finetune.runs.seeds import SeedResults

AUTO = "auto"
MAY_CHANGE_ON_RESUMING = frozenset(
    {
        "device",
        "batch_size",
        "check_device",
        "gradient_checkpointing",
        "eval_batch_size",
        "logging_steps",
        "report_to",
        "save_strategy",
        "save_minutes",
        "save_steps",
        "save_total_limit",
        "feature_cache",
        "cache_dir",
        "cache_gib",
    }
)


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
            for the run in ``output_dir``, or for the newest of its default name, and a new run
            where there is none.
        assignments: More options, as ``section.option=value``.
        emit: Is called with the events of ``finetune.events``.
        options: The command's flags, with underscores: ``freeze_core=True``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    if config is not None and resume_from_checkpoint not in (None, AUTO):
        raise ConfigurationInvalid(
            "a run is resumed with its own configuration", remedy="leave out --config"
        )
    given = _load(config, assignments, options)
    if seeds is not None:
        if read_launch().world_size > 1:
            remedy = "start the seeds in one process, or each as a run of several"
            raise UsageError("--seeds trains in one process", remedy=remedy)
        return _run_seeds(given, seeds, resume_from=resume_from_checkpoint, emit=emit)
    if read_launch().world_size == 1:
        return _decide(given, resume_from_checkpoint, emit=emit).do(emit=emit)
    from finetune.training.accelerator import join_processes

    processes = join_processes()
    # It depends on folders, which the main process is about to change.
    work = processes.broadcast(lambda: _decide(given, resume_from_checkpoint, emit=emit))
    return work.do(emit=emit if processes.is_main else ignore, processes=processes)


@dataclass(frozen=True)
class _Work:
    """What a call of ``run`` does.

    Args:
        config: Of the run.
        origins: The file, variable or flag of each option that one of them gives.
        resumed: The run that goes on; None for a new one.
        continued: The run whose model a new run trains further.
        results: Of a run that has finished already.
    """

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    resumed: RunFolder | None = None
    continued: RunFolder | None = None
    results: "RunResults | None" = None

    def do(self, *, emit: Emit, **together: "Processes") -> "RunResults":
        """Do it, together with other ``processes`` if there are some."""
        if self.results is not None:
            return self.results
        from finetune.api.training import train_new, train_on

        if self.resumed is not None:
            return train_on(self.config, self.resumed, emit=emit, **together)
        return train_new(
            self.config, origins=self.origins, emit=emit, continued=self.continued, **together
        )


def _decide(given: LoadedConfig, resume_from_checkpoint: str | Path | None, *, emit: Emit) -> _Work:
    if resume_from_checkpoint is None:
        return _Work(given.config, origins=given.origins)
    if resume_from_checkpoint != AUTO:
        _refuse_seeds(Path(resume_from_checkpoint))
        folder = open_run_folder(_run_of(Path(resume_from_checkpoint)), needs_model=False)
        if folder.has_finished and _wants_more_epochs(folder, given):
            origins = dict.fromkeys(SECTION_OF_OPTION, str(folder.config_file)) | given.origins
            further = _continued(folder, given, emit=emit)
            return _Work(further, origins=origins, continued=folder)
        return _resume(folder, given, emit=emit)
    if (found := _find_run(given.config)) is not None:
        return _resume(found, given, emit=emit)
    emit(Info("there is no run to resume: a new one begins"))
    return _Work(_over_a_killed_start(given.config), origins=given.origins)


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
        elif first := begun.first_begun():
            saved = load_saved_config(first)
            check_changes(given, saved, RunFolder(begun.path))
            config = with_changes(saved, given)
    return train_seeds(config, count, begun=begun, origins=given.origins, emit=emit)


def _refuse_seeds(path: Path) -> None:
    if seeds_file(path).is_file():
        raise UsageError(
            f"{path} holds runs of several seeds",
            remedy=f"go on with them: --seeds {len(read_seeds(path))} "
            f"--resume-from-checkpoint {path}",
        )


def _over_a_killed_start(config: Config) -> Config:
    """Let a run take the folder of one that was killed before it had anything to keep."""
    output = config.output
    if output.output_dir is None or RunFolder(_path(output.output_dir)).model_folder.exists():
        return config
    return replace(config, output=replace(output, overwrite=True))


def _find_run(config: Config) -> RunFolder | None:
    """Return the run that this configuration has begun, in its folder or under its default name."""
    if config.output.output_dir is not None:
        folder = RunFolder(_path(config.output.output_dir))
        return folder if folder.can_resume or folder.has_finished else None
    from finetune.api.dry_run import RUNS_FOLDER, default_name

    name = default_name(config)
    numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
    begun = [RunFolder(one) for one in RUNS_FOLDER.glob("*") if numbered.fullmatch(one.name)]
    unfinished = [folder for folder in begun if folder.can_resume and not folder.has_finished]
    return max(unfinished, key=lambda one: one.config_file.stat().st_mtime, default=None)


def _resume(folder: RunFolder, given: LoadedConfig, *, emit: Emit) -> _Work:
    saved = load_saved_config(folder)
    check_changes(given, saved, folder)
    if folder.has_finished:
        from finetune.runs.results import read_results

        # A kill at the very end leaves checkpoints that nobody needs.
        shutil.rmtree(folder.checkpoints_folder, ignore_errors=True)
        emit(Info(f"the run in {folder.path} has finished: nothing is left to do"))
        return _Work(saved, results=read_results(folder))
    return _Work(with_changes(saved, given), resumed=folder)


def dry_run(
    config: str | Path | None = None,
    *,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "DryRun":
    """Prepare a run up to its first update, write nothing, and return what it would do.

    Whatever would keep the run from starting is raised here too. The arguments are those of
    :func:`run`.
    """
    loaded = _load(config, assignments, options)
    from finetune.api.dry_run import describe

    return describe(loaded.config, emit=emit)


def _load(config: str | Path | None, assignments: Sequence[str], options: Options) -> LoadedConfig:
    for option in options:
        check_option(option, origin="finetune.run()")
    return load_config(
        file=None if config is None else str(config),
        environment=os.environ,
        flags=dict(options),
        assignments=assignments,
    )


def _run_of(path: Path) -> Path:
    """Return the run folder of a path that may be, as the Trainer takes it, a checkpoint's."""
    is_checkpoint = path.absolute().parent.name == RunFolder(path).checkpoints_folder.name
    return path.absolute().parents[1] if is_checkpoint else path


def _wants_more_epochs(folder: RunFolder, given: LoadedConfig) -> bool:
    epochs = given.config.training.num_train_epochs
    return epochs not in (None, load_saved_config(folder).training.num_train_epochs)


def _continued(folder: RunFolder, given: LoadedConfig, *, emit: Emit) -> Config:
    """Return the configuration of a new run that trains the model of a finished one further."""
    from finetune.runs.results import read_results

    saved, done_epochs = load_saved_config(folder), read_results(folder).training.epoch
    own = {"num_train_epochs", "output_dir", "overwrite"}
    origins = {option: one for option, one in given.origins.items() if option not in own}
    check_changes(replace(given, origins=origins), saved, folder)
    more_epochs = (given.config.training.num_train_epochs or 0) - done_epochs
    if more_epochs <= 0:
        raise UsageError(
            f"the run in {folder.path} has trained for {done_epochs:g} epochs",
            remedy="give more with --num-train-epochs",
        )
    config = with_changes(saved, given)
    place = given.config.output.output_dir or next_free_folder(folder.path.parent, folder.path.name)
    emit(
        Info(
            f"the model of {folder.path} is trained for {more_epochs:g} more epochs on the same "
            f"data, in {place}, with a new optimizer, a new learning rate schedule"
            + "".join(f", {change}" for change in _changes(saved, config))
        )
    )
    return replace(
        config,
        model=replace(config.model, model=str(folder.model_folder.resolve()), revision=None),
        training=replace(config.training, num_train_epochs=more_epochs, max_steps=None),
        output=replace(
            config.output, output_dir=str(place), overwrite=given.config.output.overwrite
        ),
    )


def _changes(saved: Config, config: Config) -> list[str]:
    """Return in words which options of a run that is resumed differ from its own."""
    options = {
        option: (_value(saved, option), _value(config, option)) for option in SECTION_OF_OPTION
    }
    return [
        f"{option} {now} in place of {before}"
        for option, (before, now) in options.items()
        if now != before
    ]


def check_changes(given: LoadedConfig, saved: Config, folder: RunFolder) -> None:
    """Refuse options that would make the rest of a run another run than its beginning."""
    output = replace(saved.output, output_dir=str(folder.path.resolve()))
    begun = replace(saved, output=output)
    for option, origin in given.origins.items():
        now, before = (_value(config, option) for config in (given.config, begun))
        may_change = option in MAY_CHANGE_ON_RESUMING or now in (None, AUTO)
        if not (may_change or _is_same(now, before)):
            raise ConfigurationInvalid(
                f"{origin} changes a run that has begun",
                remedy="leave it out, or start a new run with it",
            )


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value is the saved one, which has absolute paths and commits of the Hub."""
    if not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    return before in (now, str(_path(now).resolve())) or before.startswith(f"{now}@")


def _path(name: str) -> Path:
    return Path(name).expanduser()


def with_changes(saved: Config, given: LoadedConfig) -> Config:
    """Return a run's configuration with those of the given options that may change."""
    changes: dict[str, dict[str, Any]] = {}
    for option in given.origins.keys() & MAY_CHANGE_ON_RESUMING:
        changes.setdefault(SECTION_OF_OPTION[option], {})[option] = _value(given.config, option)
    sections = {name: replace(getattr(saved, name), **new) for name, new in changes.items()}
    return replace(saved, **sections)


def _value(config: Config, option: str) -> Any:
    return getattr(getattr(config, SECTION_OF_OPTION[option]), option)
