"""Which run a call of ``finetune.run`` begins or resumes: in which folder, with which options."""

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.schema import OPTIONS, Config, change_options, mode_of
from finetune.errors import ConfigurationInvalid, NotARun, RunFolderNotEmpty, UsageError
from finetune.events import Emit, Info
from finetune.runs.folder import (
    RUNS_FOLDER,
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
        sources: The file, variable or flag of each option that is given.
        resumed: The folder of the run, or of the seeds, that is resumed; None for a new one.
        continued: The finished run whose model a new run trains further.
        results: Of a run that has finished already.
    """

    config: Config
    sources: Mapping[str, str] = field(default_factory=dict)
    resumed: RunFolder | None = None
    continued: RunFolder | None = None
    results: "RunResults | None" = None


def choose_work(given: "LoadedConfig", resume_from: str | Path | None, *, emit: Emit) -> Work:
    """Return what to do with the given options: begin a run, or resume one.

    Args:
        given: All options.
        resume_from: ``auto``, a run folder or a checkpoint in it; None for a new run.
        emit: Receives what was decided.

    Raises:
        UsageError: If the folder that is named holds runs of several seeds.
        NotARun: If it holds no run.
        ConfigurationInvalid: If an option would make another run of the one that is resumed.
    """
    if resume_from is None:
        return Work(given.config, given.sources)
    if resume_from != AUTO:
        folder = _open(Path(resume_from).expanduser())
    elif (found := _find_begun(given.config)) is not None:
        folder = found
    else:
        emit(Info("there is no run to resume: a new one begins"))
        return Work(_with_folder_of_killed_start(given.config), given.sources)
    saved, epochs = folder.read_config(), given.config.training.num_train_epochs
    wants_more_epochs = epochs not in (None, saved.training.num_train_epochs)
    if folder.has_finished and wants_more_epochs and resume_from != AUTO:
        return _continue(folder, saved, given, emit=emit)
    _check_changes(given, saved, folder)
    if not folder.has_finished:
        return Work(_with_changes(saved, given), resumed=folder)
    from finetune.runs.results import read_results

    # A kill at the very end leaves checkpoints that nobody needs.
    folder.delete_checkpoints()
    emit(Info(f"the run in {folder.path} has finished: nothing is left to do"))
    return Work(saved, results=read_results(folder))


def choose_seeds(
    given: "LoadedConfig", count: int, resume_from: str | Path | None, *, emit: Emit
) -> Work:
    """Return what to do for several seeds; the arguments are those of ``choose_work``.

    By its default name, ``auto`` finds the newest folder that has not finished or has fewer seeds.

    Raises:
        NotARun: If the folder that is named has no runs of several seeds.
    """
    from finetune.runs.seeds import SeedsFolder

    if resume_from is None:
        return Work(given.config, given.sources)
    folder: SeedsFolder | None
    if resume_from != AUTO:
        folder = named = SeedsFolder(Path(resume_from).expanduser())
        if not seeds_file(named.path).is_file() or named.first_begun() is None:
            raise NotARun(
                f"{named.path} has no runs of several seeds to go on with",
                remedy="leave out --seeds to resume a single run, or start with --seeds alone",
            )
    elif path := _named_folder(given.config):
        folder = SeedsFolder(path) if seeds_file(path).is_file() else None
    else:
        paths = _find_named(default_name(given.config, seeds=True))
        begun = [SeedsFolder(path) for path in paths if seeds_file(path).is_file()]
        unfinished = [one for one in begun if not one.has_finished(count)]
        folder = max(unfinished, key=lambda one: seeds_file(one.path).stat().st_mtime, default=None)
    if folder is None:
        emit(Info("there are no seeds to go on with: new runs begin"))
        return Work(given.config, given.sources)
    config, run_folder = given.config, RunFolder(folder.path)
    if saved := folder.load_config():
        _check_changes(given, saved, run_folder)
        config = _with_changes(saved, given)
    return Work(config, given.sources, resumed=run_folder)


# Folders.


def default_name(config: Config, *, seeds: bool = False) -> str:
    """Return the name of a run folder, such as ``trec-minilm-full``."""
    from finetune.data.load import source_name

    parts = [source_name(config.data.data), Path(config.model.model).name, mode_of(config.model)]
    return "-".join([*parts, "seeds"] if seeds else parts)


def find_free_folder(config: Config) -> Path:
    """Return the folder that a new run would get; raise if it may not be written."""
    path = _named_folder(config)
    if path is None:
        return next_free_folder(RUNS_FOLDER, default_name(config))
    RunFolder(path).check_can_create(overwrite=config.output.overwrite)
    return path


def lock_folder(work: Work) -> AbstractContextManager[RunFolder]:
    """Lock the folder of a run, which is created for a new one."""
    if work.resumed:
        return work.resumed.lock()
    path = _named_folder(work.config)
    if path is None:
        return RunFolder.create_next(RUNS_FOLDER, default_name(work.config))
    return RunFolder(path).create(overwrite=work.config.output.overwrite)


def lock_seeds_folder(work: Work) -> AbstractContextManager[RunFolder]:
    """Lock the folder of several seeds, which is created for new ones."""
    if work.resumed:
        return work.resumed.lock()
    path = _named_folder(work.config)
    if path is None:
        return RunFolder.create_next(RUNS_FOLDER, default_name(work.config, seeds=True))
    folder, has_seeds = RunFolder(path), seeds_file(path).is_file()
    if work.config.output.overwrite and (has_seeds or folder.previous_run.is_dir()):
        return folder.lock()
    if has_seeds:
        raise RunFolderNotEmpty(
            f"{path} already holds runs of several seeds",
            remedy="go on with them by --resume-from-checkpoint auto, delete them with "
            "--overwrite, or choose another folder with --output-dir",
        )
    if folder.config_file.is_file():
        raise RunFolderNotEmpty(
            f"{path} holds a single run", remedy="choose another folder with --output-dir"
        )
    return folder.create(overwrite=False)


def _named_folder(config: Config) -> Path | None:
    name = config.output.output_dir
    return None if name is None else Path(name).expanduser()


def _find_named(name: str) -> Iterator[Path]:
    """Yield the folders that have a default name, with or without a number."""
    numbered = re.compile(rf"{re.escape(name)}(-\d+)?")
    return (path for path in RUNS_FOLDER.glob("*") if numbered.fullmatch(path.name))


def _find_begun(config: Config) -> RunFolder | None:
    """Return the run that this configuration has begun, in its folder or under its default name."""
    if path := _named_folder(config):
        folder = RunFolder(path)
        return folder if folder.can_resume or folder.has_finished else None
    begun = map(RunFolder, _find_named(default_name(config)))
    unfinished = [folder for folder in begun if folder.can_resume and not folder.has_finished]
    return max(unfinished, key=lambda one: one.config_file.stat().st_mtime, default=None)


def _with_folder_of_killed_start(config: Config) -> Config:
    """Let a run take its named folder if it holds a run that was killed before it saved a model."""
    path = _named_folder(config)
    if path is None or RunFolder(path).model_folder.exists():
        return config
    return change_options(config, {"overwrite": True})


def _open(path: Path) -> RunFolder:
    """Return the run in a folder; the folder may be, as transformers takes it, a checkpoint's."""
    if seeds_file(path).is_file():
        raise UsageError(
            f"{path} holds runs of several seeds",
            remedy=f"go on with them: --seeds {len(read_seeds(path))} "
            f"--resume-from-checkpoint {path}",
        )
    run = RunFolder(path)
    # A run may itself lie in a folder that is called so.
    is_checkpoint = path.absolute().parent.name == run.checkpoints_folder.name
    if is_checkpoint and not run.config_file.exists():
        path = path.absolute().parents[1]
    return open_run_folder(path, needs_model=False)


# Options.


def _continue(folder: RunFolder, saved: Config, given: "LoadedConfig", *, emit: Emit) -> Work:
    """Return the new run that trains the model of a finished one further."""
    from finetune.runs.results import read_results

    done_epochs = read_results(folder).training.epoch
    own = {"num_train_epochs", "output_dir", "overwrite"}
    sources = {option: source for option, source in given.sources.items() if option not in own}
    _check_changes(replace(given, sources=sources), saved, folder)
    more_epochs = (given.config.training.num_train_epochs or 0) - done_epochs
    if more_epochs <= 0:
        raise UsageError(
            f"the run in {folder.path} has trained for {done_epochs:g} epochs",
            remedy="give more with --num-train-epochs",
        )
    config, path = _with_changes(saved, given), folder.path.resolve()
    output = given.config.output
    place = output.output_dir or str(next_free_folder(path.parent, path.name))
    values = [(one.name, one.value_in(saved), one.value_in(config)) for one in OPTIONS.values()]
    changes = [f", {name} {now} in place of {old}" for name, old, now in values if now != old]
    emit(
        Info(
            f"the model of {folder.path} is trained for {more_epochs:g} more epochs on the same "
            f"data, in {place}, with a new optimizer, a new learning rate schedule"
            + "".join(changes)
        )
    )
    own_values: dict[str, Any] = {
        "model": str(path / folder.model_folder.name),
        "revision": None,
        "num_train_epochs": more_epochs,
        "max_steps": None,
        "output_dir": place,
        "overwrite": output.overwrite,
    }
    all_sources = dict.fromkeys(OPTIONS, str(folder.config_file)) | given.sources
    return Work(change_options(config, own_values), all_sources, continued=folder)


def _check_changes(given: "LoadedConfig", saved: Config, folder: RunFolder) -> None:
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


def _with_changes(saved: Config, given: "LoadedConfig") -> Config:
    """Return a run's configuration with those of the given options that may change."""
    changes = [OPTIONS[name] for name in given.sources if OPTIONS[name].resumable]
    return change_options(saved, {one.name: one.value_in(given.config) for one in changes})
