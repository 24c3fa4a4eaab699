"""The runs that a ``finetune.run`` call starts or resumes, with their folder and options.

This module doesn't import PyTorch, so that invalid options are reported at once.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from finetune.config.schema import OPTIONS, Config, change_options
from finetune.data import is_waiting
from finetune.errors import ConfigurationError, NotARunError, UsageError
from finetune.events import Info, emit
from finetune.ownership import CONTENTS, LOCK, check_writable
from finetune.runs.folder import (
    RUNS_FOLDER,
    RunFolder,
    SeveralFolder,
    find_latest,
    find_several,
    list_runs,
    next_free_folder,
    open_run_folder,
)

if TYPE_CHECKING:
    from finetune.data.dataset import LoadedData

AUTO = "auto"


@dataclass(frozen=True)
class RunRequest:
    """A run, or several runs that differ in seed, fold or some options.

    ``sources`` contains the file, variable or flag that set each option, ``trials`` the options of
    each trial of a sweep. ``resumed`` is the folder to resume. ``read`` is the data if it was read
    to guess options.
    """

    config: Config
    sources: Mapping[str, str] = field(default_factory=dict)
    seeds: int | None = None
    folds: int | None = None
    trials: Sequence[Mapping[str, Any]] = ()
    keeps_models: bool = True
    resumed: RunFolder | None = None
    read: "LoadedData | None" = None

    @property
    def variants(self) -> Mapping[int, Mapping[str, Any]]:
        """The differing options by run number. Empty for a single run and for folds."""
        if self.trials:
            return dict(enumerate(self.trials, start=1))
        first = self.config.training.seed
        seeds = {seed: {"seed": seed} for seed in range(first, first + (self.seeds or 0))}
        return seeds or {fold: {} for fold in range(1, 1 + (self.folds or 0))}

    @property
    def is_over(self) -> bool:
        """Whether this resumes a single run that has finished."""
        return bool(self.resumed and self.resumed.has_finished and not self.variants)

    def folder(self, path: Path) -> RunFolder:
        """Return a path as the folder of one or several runs."""
        if not (count := len(self.variants)):
            return RunFolder(path)
        kind = "sweep" if self.trials else "seeds" if self.seeds else "folds"
        return SeveralFolder(path, kind, count)

    @property
    def output_folder(self) -> RunFolder | None:
        """The folder in ``--output-dir``."""
        name = self.config.output.output_dir
        return None if name is None else self.folder(Path(name).expanduser())

    @property
    def default_name(self) -> str:
        """The folder name without ``--output-dir``, such as ``trec-minilm-full``."""
        from finetune.data.load import source_name

        data, model = self.config.data.data, self.config.model
        parts = [source_name(data), Path(model.model).name, model.mode]
        kind = self.folder(Path()).kind
        return "-".join([*parts, kind] if kind != RunFolder.kind else parts)

    @contextmanager
    def lock(self) -> Iterator[RunFolder]:
        """Lock the folder. Create it for a new run, and delete it again if it remains empty."""
        with ExitStack() as stack:
            if self.resumed:
                folder = stack.enter_context(self.resumed.lock())
            elif output := self.output_folder:
                self.check_folder()
                overwrite = self.config.output.overwrite
                folder = stack.enter_context(output.make(overwrite=overwrite))
            else:
                check_writable(RUNS_FOLDER)
                while True:
                    folder = self.folder(next_free_folder(RUNS_FOLDER, self.default_name))
                    # Another process may have created it first.
                    with suppress(FileExistsError):
                        stack.enter_context(folder.make(exist_ok=False))
                        break
            yield folder

    def check_folder(self) -> Path:
        """Return the folder for a new run. Raise ``UsageError`` if it can't be used."""
        if (folder := self.output_folder) is None:
            return next_free_folder(RUNS_FOLDER, self.default_name)
        folder.check(overwrite=self.config.output.overwrite)
        if not folder.is_ours:
            return folder.path
        inputs = [
            str(option.value_in(self.config))
            for option in OPTIONS.values()
            if option.path and option.section in ("data", "model")
        ]
        # The source of an option can be a configuration file.
        for name in [*inputs, *self.sources.values()]:
            path = Path(name).expanduser().resolve()
            if os.path.exists(path) and any(map(folder.path.samefile, [path, *path.parents])):
                raise UsageError(
                    f"{name} is inside {folder.path}, which --overwrite would delete",
                    remedy="choose another folder with --output-dir",
                )
        return folder.path


def resume(request: RunRequest, resume_from: str | Path) -> RunRequest:
    """Return a request that resumes ``auto`` or the run in a folder.

    If ``auto`` finds no run, return the request unchanged.
    """
    is_auto = resume_from == AUTO
    folder = find_started(request) if is_auto else _open(request, Path(resume_from))
    if folder is None:
        emit(Info("no run to resume; starting a new one"))
        output = request.output_folder
        # Runs killed before their first checkpoint start again.
        is_lost = output is not None and output.is_ours
        config = change_options(request.config, {"overwrite": True} if is_lost else {})
        return replace(request, config=config)
    saved = folder.read_config()
    runs = folder.runs if isinstance(folder, SeveralFolder) else [folder]
    for run in runs:
        _check_unedited(run)
    if request.folds and len(runs) != request.folds:
        raise ConfigurationError(
            f"{folder.path} has {len(runs)} folds, which can't become {request.folds}",
            remedy=f"use --folds {len(runs)}, or choose another folder with --output-dir",
        )
    sources = {**dict.fromkeys(OPTIONS, str(folder.config_file)), **request.sources}
    config = _change_saved(folder, saved, request)
    request = replace(request, config=config, sources=sources, resumed=folder)
    if request.is_over:
        # A process may have been killed, or a disk have failed, at the very end.
        if (folder.path / LOCK).exists() or folder.checkpoints_folder.exists():
            with folder.lock():
                folder.delete_checkpoints()
        emit(Info(f"the run in {folder.path} has finished: nothing is left to do"))
    return request


def find_started(request: RunRequest) -> RunFolder | None:
    """Return the run in ``--output-dir``, or the newest unfinished run of this configuration.

    Without data, it is the newest unfinished run.
    """
    if folder := request.output_folder:
        return folder if folder.has_started else None
    kind, name = request.folder(Path()).kind, request.default_name
    for run in list_runs(RUNS_FOLDER):
        stem, _, number = run.path.name.rpartition("-")
        is_named = run.path.name == name or (stem == name and number.isdecimal())
        if run.kind == kind and (is_named or "data" not in request.sources):
            folder = request.folder(run.path)
            if folder.has_started and not folder.has_finished:
                return folder
    return None


def _open(request: RunRequest, path: Path) -> RunFolder:
    """Open the folder of one or several runs that the user passed."""
    folder = request.folder(find_latest(path).expanduser())
    if isinstance(folder, SeveralFolder):
        if not folder.has_started:
            raise NotARunError(
                f"{path} has no {CONTENTS[folder.kind]} to resume",
                remedy=f"drop --{folder.kind} to resume a single run, or start a new run",
            )
        return folder
    if several := find_several(folder.path):
        raise UsageError(
            f"{path} contains {CONTENTS[several.kind]}",
            remedy=f"resume them with {several.resume_command}",
        )
    return open_run_folder(folder.path, needs_model=False)


def _check_unedited(folder: RunFolder) -> None:
    """Raise ``ConfigurationError`` if ``config.yaml`` was edited after the run started."""
    from finetune.runs.manifest import Manifest

    options = Manifest.read(folder).options
    if options is None or not folder.config_file.is_file():
        return
    if changes := find_changes(options, folder.read_config(), OPTIONS):
        raise ConfigurationError(
            f"{folder.config_file} was edited after the run started: {changes}",
            remedy="undo the changes, or start a new run",
        )


def _change_saved(folder: RunFolder, saved: Config, request: RunRequest) -> Config:
    """Return the saved configuration with the options that can change when a run resumes.

    Raise ``ConfigurationError`` for other differing options.
    """
    now = {name: OPTIONS[name].value_in(request.config) for name in request.sources}
    saved = change_options(saved, {"output_dir": str(folder.path.resolve())})
    names = [name for name in now if now[name] not in (None, AUTO)]
    if changes := find_changes(saved, request.config, names):
        remedy = "drop them, or start a new run"
        if folder.has_finished and not request.variants:
            run, model = quote(str(folder.path)), quote(str(folder.model_folder))
            remedy = f"drop them, or train its model further: finetune run {run} --model {model}"
        raise ConfigurationError(
            f"these options can't change when a run resumes: {changes}", remedy=remedy
        )
    values = {name: now[name] for name in now if OPTIONS[name].resumable}
    if "save_steps" in values:
        values.setdefault("save_strategy", None)  # selects steps instead of the saved strategy
    return change_options(saved, values)


def find_changes(saved: Config, now: Config, names: Collection[str]) -> str:
    """Describe differing options that can't change when a run resumes."""
    values = {name: (OPTIONS[name].value_in(now), OPTIONS[name].value_in(saved)) for name in names}
    return "; ".join(
        f"{name} is {value}, but was {'not set' if before is None else before}"
        for name, (value, before) in values.items()
        if not OPTIONS[name].resumable and not _is_same(value, before)
    )


def _is_same(now: Any, before: Any) -> bool:
    """Return whether a value equals the saved value, which contains absolute paths and commits."""
    if not (isinstance(now, str) and isinstance(before, str)):
        return bool(now == before)
    if is_waiting(now):
        return Path(now).name == Path(before).name
    return before in (now, str(Path(now).expanduser().resolve())) or before.startswith(f"{now}@")
