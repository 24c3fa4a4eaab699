"""Which run a call of ``finetune.run`` begins or goes on with, and with which options."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.commands.folders import default_name, find_named, named_folder
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.events import Emit, Info
from finetune.runs.folder import (
    RunFolder,
    next_free_folder,
    open_run_folder,
    read_seeds,
    seeds_file,
)

if TYPE_CHECKING:
    from finetune.config.load import LoadedConfig
    from finetune.runs.results import RunResults

AUTO = "auto"


@dataclass(frozen=True)
class Work:
    """What a call of ``finetune.run`` does.

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


def choose_work(
    given: "LoadedConfig", resume_from_checkpoint: str | Path | None, *, emit: Emit
) -> Work:
    """Return what to do with the options that are given: begin a run, or go on with one.

    Raises:
        UsageError: If the folder that is named holds runs of several seeds.
        NotARun: If it holds no run.
        ConfigurationInvalid: If an option would make another run of the one that goes on.
    """
    if resume_from_checkpoint is None:
        return Work(given.config, origins=given.sources)
    if resume_from_checkpoint == AUTO:
        return _resume_or_begin(given, emit=emit)
    path = Path(resume_from_checkpoint).expanduser()
    _refuse_seeds(path)
    folder = open_run_folder(_run_of(path), needs_model=False)
    if folder.has_finished and _wants_more_epochs(folder, given):
        origins = dict.fromkeys(OPTIONS, str(folder.config_file)) | given.sources
        return Work(_continued(folder, given, emit=emit), origins=origins, continued=folder)
    return _resume(folder, given, emit=emit)


def _resume_or_begin(given: "LoadedConfig", *, emit: Emit) -> Work:
    if (found := _find_run(given.config)) is not None:
        return _resume(found, given, emit=emit)
    emit(Info("there is no run to resume: a new one begins"))
    return Work(_over_a_killed_start(given.config), origins=given.sources)


def _find_run(config: Config) -> RunFolder | None:
    """Return the run that this configuration has begun, in its folder or under its default name."""
    if path := named_folder(config):
        folder = RunFolder(path)
        return folder if folder.can_resume or folder.has_finished else None
    begun = map(RunFolder, find_named(default_name(config)))
    unfinished = [folder for folder in begun if folder.can_resume and not folder.has_finished]
    return max(unfinished, key=lambda one: one.config_file.stat().st_mtime, default=None)


def _over_a_killed_start(config: Config) -> Config:
    """Let a run take the folder of one that was killed before it had anything to keep."""
    path = named_folder(config)
    if path is None or RunFolder(path).model_folder.exists():
        return config
    return replace(config, output=replace(config.output, overwrite=True))


def _refuse_seeds(path: Path) -> None:
    if seeds_file(path).is_file():
        raise UsageError(
            f"{path} holds runs of several seeds",
            remedy=f"go on with them: --seeds {len(read_seeds(path))} "
            f"--resume-from-checkpoint {path}",
        )


def _run_of(path: Path) -> Path:
    """Return the run folder of a path that may be, as the Trainer takes it, a checkpoint's."""
    run = RunFolder(path)
    # A run may itself lie in a folder that is called so.
    is_checkpoint = path.absolute().parent.name == run.checkpoints_folder.name
    return path.absolute().parents[1] if is_checkpoint and not run.config_file.exists() else path


def _resume(folder: RunFolder, given: "LoadedConfig", *, emit: Emit) -> Work:
    saved = folder.read_config()
    check_changes(given, saved, folder)
    if folder.has_finished:
        from finetune.runs.results import read_results

        # A kill at the very end leaves checkpoints that nobody needs.
        folder.delete_checkpoints()
        emit(Info(f"the run in {folder.path} has finished: nothing is left to do"))
        return Work(saved, results=read_results(folder))
    return Work(with_changes(saved, given), resumed=folder)


def _wants_more_epochs(folder: RunFolder, given: "LoadedConfig") -> bool:
    epochs = given.config.training.num_train_epochs
    return epochs not in (None, folder.read_config().training.num_train_epochs)


def _continued(folder: RunFolder, given: "LoadedConfig", *, emit: Emit) -> Config:
    """Return the configuration of a new run that trains the model of a finished one further."""
    from finetune.runs.results import read_results

    saved, done_epochs = folder.read_config(), read_results(folder).training.epoch
    own = {"num_train_epochs", "output_dir", "overwrite"}
    sources = {option: one for option, one in given.sources.items() if option not in own}
    check_changes(replace(given, sources=sources), saved, folder)
    more_epochs = (given.config.training.num_train_epochs or 0) - done_epochs
    if more_epochs <= 0:
        raise UsageError(
            f"the run in {folder.path} has trained for {done_epochs:g} epochs",
            remedy="give more with --num-train-epochs",
        )
    config, path = with_changes(saved, given), folder.path.resolve()
    place = given.config.output.output_dir or next_free_folder(path.parent, path.name)
    emit(
        Info(
            f"the model of {folder.path} is trained for {more_epochs:g} more epochs on the same "
            f"data, in {place}, with a new optimizer, a new learning rate schedule"
            + "".join(f", {change}" for change in _spell_changes(saved, config))
        )
    )
    return replace(
        config,
        model=replace(config.model, model=str(path / folder.model_folder.name), revision=None),
        training=replace(config.training, num_train_epochs=more_epochs, max_steps=None),
        output=replace(
            config.output, output_dir=str(place), overwrite=given.config.output.overwrite
        ),
    )


def _spell_changes(saved: Config, config: Config) -> list[str]:
    """Return in words which options of a run that goes on differ from its own."""
    values = [(one, one.value_in(saved), one.value_in(config)) for one in OPTIONS.values()]
    return [
        f"{option.name} {now} in place of {before}"
        for option, before, now in values
        if now != before
    ]


def check_changes(given: "LoadedConfig", saved: Config, folder: RunFolder) -> None:
    """Refuse options that would make the rest of a run another run than its beginning."""
    begun = change_options(saved, {"output_dir": str(folder.path.resolve())})
    for name, source in given.sources.items():
        option = OPTIONS[name]
        now, before = option.value_in(given.config), option.value_in(begun)
        may_change = option.resumable or now in (None, AUTO)
        if not (may_change or _is_same(now, before)):
            raise ConfigurationInvalid(
                f"{source} changes a run that has begun",
                remedy="leave it out, or start a new run with it",
            )


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value is the saved one, which has absolute paths and commits of the Hub."""
    if not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    return before in (now, str(Path(now).expanduser().resolve())) or before.startswith(f"{now}@")


def with_changes(saved: Config, given: "LoadedConfig") -> Config:
    """Return a run's configuration with those of the given options that may change."""
    changes = [OPTIONS[name] for name in given.sources if OPTIONS[name].resumable]
    return change_options(saved, {one.name: one.value_in(given.config) for one in changes})
