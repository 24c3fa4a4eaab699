"""Which run a call of ``finetune.run`` starts or resumes: in which folder, with which options."""

import os
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.schema import OPTIONS, Config, change_options
from finetune.data import is_waiting
from finetune.errors import ConfigurationError, NotARunError, UsageError
from finetune.events import Info, emit
from finetune.ownership import CONTENTS
from finetune.runs.folder import (
    RUNS_FOLDER,
    FoldsFolder,
    RunFolder,
    SeedsFolder,
    SeveralFolder,
    SweepFolder,
    find_latest,
    find_several,
    list_runs,
    next_free_folder,
    open_run_folder,
)

if TYPE_CHECKING:
    from finetune.runs.results import RunResults

AUTO = "auto"


@dataclass(frozen=True)
class Work:
    """The resolved request of a ``finetune.run`` call."""

    config: Config
    # The file, variable or flag that set each option.
    sources: Mapping[str, str] = field(default_factory=dict)
    # The number of seeds or folds, if there are several runs.
    seeds: int | None = None
    folds: int | None = None
    keeps_models: bool = True
    # The options of each trial of a sweep.
    trials: Sequence[Mapping[str, Any]] = ()
    # The folder of the run, or of several runs, to resume.
    resumed: RunFolder | None = None
    # The finished run whose model a new run continues to train.
    continued: RunFolder | None = None
    # The results of a run that has already finished.
    results: "RunResults | None" = None

    @property
    def named_folder(self) -> RunFolder | None:
        """The folder in ``--output-dir``."""
        name = self.config.output.output_dir
        return None if name is None else self.folder(Path(name).expanduser())

    def folder(self, path: Path) -> RunFolder:
        """Return a path as the folder of a run, or of several."""
        if self.folds:
            return FoldsFolder(path, self.folds)
        if self.trials:
            return SweepFolder(path, len(self.trials))
        return SeedsFolder(path, self.seeds) if self.seeds else RunFolder(path)

    @property
    def default_name(self) -> str:
        """The name of a folder without ``--output-dir``, such as ``trec-minilm-full``."""
        from finetune.data.load import source_name

        data, model = self.config.data.data, self.config.model
        parts = [source_name(data), Path(model.model).name, model.mode]
        kind = self.folder(Path()).kind
        return "-".join([*parts, kind] if kind != RunFolder.kind else parts)

    def lock(self) -> AbstractContextManager[RunFolder]:
        """Lock the folder; create it for a new run."""
        if self.resumed:
            return self.resumed.lock()
        if folder := self.named_folder:
            self._check_inputs(folder)
            return folder.create(overwrite=self.config.output.overwrite)
        return type(self.folder(RUNS_FOLDER)).create_next(RUNS_FOLDER, self.default_name)

    def find_free_folder(self) -> Path:
        """Return the folder that a new run would get; raise if it can't be written to."""
        if (folder := self.named_folder) is None:
            return next_free_folder(RUNS_FOLDER, self.default_name)
        self._check_inputs(folder)
        folder.check_can_create(overwrite=self.config.output.overwrite)
        return folder.path

    def _check_inputs(self, folder: RunFolder) -> None:
        """Raise ``UsageError`` if the run reads a file in the folder that it replaces."""
        if not folder.is_ours:
            return
        inputs = [
            str(option.value_in(self.config))
            for option in OPTIONS.values()
            if option.path and option.section in ("data", "model")
        ]
        # The source of an option may be a configuration file.
        for name in [*inputs, *self.sources.values()]:
            path = Path(name).expanduser().resolve()
            if os.path.exists(path) and any(map(folder.path.samefile, [path, *path.parents])):
                raise UsageError(
                    f"the run reads {name}, which is in the folder to replace, {folder.path}",
                    remedy="choose another folder with --output-dir",
                )


def choose_work(work: Work, resume_from: str | Path | None) -> Work:
    """Return what to do: start a run, or resume one.

    ``resume_from`` is ``auto`` or a run folder; None for a new run.
    """
    if resume_from is None:
        return work
    folder = find_begun(work) if resume_from == AUTO else _open(work, Path(resume_from))
    if folder is None:
        emit(Info("there is no run to resume; a new one starts"))
        if (named := work.named_folder) and named.is_ours and _has_lost_all(named):
            return replace(work, config=change_options(work.config, {"overwrite": True}))
        return work
    saved, epochs = folder.read_config(), work.config.training.num_train_epochs
    runs = folder.runs if isinstance(folder, SeveralFolder) else [folder]
    for run in runs:
        _check_unedited(run)
    if work.folds and len(runs) != work.folds:
        raise ConfigurationError(
            f"{folder.path} has {len(runs)} folds, which can't become {work.folds}",
            remedy=f"use --folds {len(runs)}, or choose another folder with --output-dir",
        )
    is_finished_run = not (work.seeds or work.folds) and folder.has_finished
    has_more_epochs = epochs not in (None, saved.training.num_train_epochs)
    if is_finished_run and has_more_epochs and resume_from != AUTO:
        return _continue(folder, saved, work)
    work = replace(work, config=_with_changes(folder, saved, work), resumed=folder)
    if not is_finished_run:
        return work
    from finetune.runs.results import read_results

    folder.clean_up()
    emit(Info(f"the run in {folder.path} has finished: nothing is left to do"))
    return replace(work, results=read_results(folder))


def _has_lost_all(folder: RunFolder) -> bool:
    """Whether a run was killed before it wrote a checkpoint, maybe just after its model."""
    is_single = not isinstance(folder, SeveralFolder)
    return not folder.has_progress or (is_single and not folder.has_begun)


def find_begun(work: Work) -> RunFolder | None:
    """Return the unfinished run of this configuration, in its folder or with its default name.

    If several have the default name, it is the newest. Without data, it is the only unfinished run.
    """
    if folder := work.named_folder:
        return folder if folder.has_begun else None
    if "data" not in work.sources:
        return _find_only(work)
    numbered = re.compile(rf"{re.escape(work.default_name)}(-\d+)?")
    paths = (path for path in RUNS_FOLDER.glob("*") if numbered.fullmatch(path.name))
    begun = (folder for folder in map(work.folder, paths) if folder.has_begun)
    unfinished = (folder for folder in begun if not folder.has_finished)
    return max(unfinished, key=lambda folder: folder.first_file.stat().st_mtime, default=None)


def _find_only(work: Work) -> RunFolder | None:
    """Return the only unfinished run; raise ``UsageError`` if there are several."""
    runs = [run for run in list_runs(RUNS_FOLDER) if run.has_begun and not run.has_finished]
    if runs and (len(runs) > 1 or type(runs[0]) is not type(work.folder(Path()))):
        names = ", ".join(str(run.path) for run in runs)
        raise UsageError(
            f"several runs have not finished: {names}",
            remedy=f"choose one: {runs[0].resume_command}",
        )
    return runs[0] if runs else None


def _open(work: Work, path: Path) -> RunFolder:
    """Return the run, or the folder of several, that is named."""
    folder = work.folder(find_latest(path).expanduser())
    if isinstance(folder, SeveralFolder):
        if not folder.has_begun:
            flag = f"--{folder.kind}"
            raise NotARunError(
                f"{path} has no {CONTENTS[folder.kind]} to resume",
                remedy=f"drop {flag} to resume a single run, or start new ones with only {flag}",
            )
        return folder
    if several := find_several(folder.path):
        raise UsageError(
            f"{path} holds {CONTENTS[several.kind]}",
            remedy=f"resume them with {several.resume_command}",
        )
    return open_run_folder(folder.path, needs_model=False)


def _check_unedited(folder: RunFolder) -> None:
    """Raise ``ConfigurationError`` if ``config.yaml`` was edited after the run started."""
    from finetune.runs.manifest import Manifest

    options = Manifest.read(folder).options
    if options is None or not folder.config_file.is_file():
        return
    edited = folder.read_config()
    now, before = ({n: one.value_in(c) for n, one in OPTIONS.items()} for c in (edited, options))
    changes = [
        f"{name} is now {now[name]}, but was {before[name]}"
        for name, option in OPTIONS.items()
        if now[name] != before[name] and not option.resumable
    ]
    if changes:
        raise ConfigurationError(
            f"{folder.config_file} was edited after the run started: {'; '.join(changes)}",
            remedy="undo the changes, or start a new run",
        )


def _continue(folder: RunFolder, saved: Config, given: Work) -> Work:
    """Return the new run that continues to train the model of a finished one."""
    from finetune.runs.results import read_results

    done_epochs = read_results(folder).training.epoch
    own = ("num_train_epochs", "output_dir", "overwrite")
    config = _with_changes(folder, saved, given, ignored=own)
    more_epochs = (given.config.training.num_train_epochs or 0) - done_epochs
    if more_epochs <= 0:
        raise UsageError(
            f"the run in {folder.path} has already trained for {done_epochs:g} epochs",
            remedy="set --num-train-epochs to more",
        )
    path, output = folder.path.resolve(), given.config.output
    place = output.output_dir or str(next_free_folder(path.parent, path.name))
    emit(
        Info(
            f"training the model of {folder.path} for {more_epochs:g} more epochs in {place}, "
            "on the same data, with a new optimizer and learning rate schedule"
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
    all_sources = {**dict.fromkeys(OPTIONS, str(folder.config_file)), **given.sources}
    return Work(change_options(config, own_values), all_sources, continued=folder)


def _with_changes(
    folder: RunFolder, saved: Config, given: Work, *, ignored: Container[str] = ()
) -> Config:
    """Return the configuration of a run with the options that can change when it resumes.

    It raises ``ConfigurationError`` for options that differ but can't change.
    """
    changes, rejected = dict[str, Any](), list[str]()
    for name, source in given.sources.items():
        option = OPTIONS[name]
        now, before = option.value_in(given.config), option.value_in(saved)
        if name == "output_dir":
            before = str(folder.path.resolve())
        if option.resumable:
            changes[name] = now
        elif name not in ignored and not (now in (None, AUTO) or _is_same(now, before)):
            rejected.append(f"{name} is {now}, but was {before} ({source})")
    if rejected:
        raise ConfigurationError(
            f"these options can't change when a run resumes: {'; '.join(rejected)}",
            remedy="drop them, or start a new run",
        )
    return change_options(saved, changes)


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value equals the saved one, which has absolute paths and Hub commits."""
    if not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    if is_waiting(now):
        return Path(now).name == Path(before).name
    return before in (now, str(Path(now).expanduser().resolve())) or before.startswith(f"{now}@")
