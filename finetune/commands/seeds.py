"""``finetune run --seeds``: several trainings that differ in their seed, in one preparation."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from finetune.commands.folders import default_name, find_named, named_folder
from finetune.commands.training import train_seed
from finetune.config.schema import Config
from finetune.devices.mps.awake import kept_awake
from finetune.errors import Interrupted, NotARun, RunFolderNotEmpty
from finetune.events import Emit, Info
from finetune.runs.folder import RUNS_FOLDER, RunFolder, seeds_file
from finetune.runs.journal import WarningLog
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import prepare
from finetune.runs.seeds import SeedResults, SeedsFolder
from finetune.training.interruption import signal_of


def find_seeds(config: Config, count: int, *, resume_from: str | Path) -> SeedsFolder | None:
    """Return the folder of several seeds that has begun; None for ``auto`` where there is none.

    By its default name, ``auto`` finds the newest that has not finished or has fewer seeds.

    Args:
        config: What names or makes the name of the folder, for ``auto``.
        count: How many seeds it is to have.
        resume_from: The folder, or ``auto``.

    Raises:
        NotARun: If the folder that is named has no run to go on with.
    """
    if resume_from != "auto":
        found = SeedsFolder(Path(resume_from).expanduser())
        if not seeds_file(found.path).is_file() or found.first_begun() is None:
            raise NotARun(
                f"{found.path} has no runs of several seeds to go on with",
                remedy="leave out --seeds to resume a single run, or start with --seeds alone",
            )
        return found
    if path := named_folder(config):
        return SeedsFolder(path) if seeds_file(path).is_file() else None
    named = find_named(_default_name(config))
    begun = [SeedsFolder(path) for path in named if seeds_file(path).is_file()]
    unfinished = [one for one in begun if not one.has_finished(count)]
    return max(unfinished, key=lambda one: seeds_file(one.path).stat().st_mtime, default=None)


def train_seeds(
    config: Config,
    count: int,
    *,
    begun: SeedsFolder | None,
    origins: Mapping[str, str],
    emit: Emit,
) -> SeedResults:
    """Train several seeds, from that of the configuration on; those that have finished stay.

    Args:
        config: All options.
        count: How many seeds.
        begun: The folder of those that have begun.
        origins: The file, variable or flag of each option that one of them gives.
        emit: Receives progress events.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    first = config.training.seed
    seeds = range(first, first + count)
    with kept_awake(), _hold(config, begun) as held:
        parent = SeedsFolder(held.path)
        runs = [parent.run(seed) for seed in seeds]
        with _interruption_explained(parent, runs):
            _train_missing(config, seeds, held, origins=origins, is_new=begun is None, emit=emit)
        return parent.read(seeds, metric=config.training.metric_for_best_model)


def _train_missing(
    config: Config,
    seeds: Sequence[int],
    held: RunFolder,
    *,
    origins: Mapping[str, str],
    is_new: bool,
    emit: Emit,
) -> None:
    parent, shared = SeedsFolder(held.path), WarningLog(emit)
    metric = config.training.metric_for_best_model
    missing = [seed for seed in seeds if is_new or not parent.run(seed).has_finished]
    if not missing:
        emit(Info(f"the runs in {parent.path} have finished: nothing is left to do"))
        return
    preparation = prepare(_with_seed(config, missing[0]), option_sources=origins, emit=shared)
    if is_new:
        held.set_aside_previous()
    elif before := parent.first_begun():
        saved = Manifest.read(before)
        saved.check(Manifest.of(preparation), remedy="restore it, or train in another folder")
    parent.write(parent.read(seeds, metric=metric))
    for seed in missing:
        emit(Info(f"seed {seed}, {seeds.index(seed) + 1} of {len(seeds)}"))
        log = shared.copy()
        if seed != missing[0]:
            preparation = preparation.with_seed(seed, emit=log)
        preparation = train_seed(preparation, parent.run(seed), log=log)
        held.delete_previous()
        parent.write(parent.read(seeds, metric=metric))


def _with_seed(config: Config, seed: int) -> Config:
    return replace(config, training=replace(config.training, seed=seed))


def _default_name(config: Config) -> str:
    return f"{default_name(config)}-seeds"


def _hold(config: Config, begun: SeedsFolder | None) -> AbstractContextManager[RunFolder]:
    if begun is not None:
        return RunFolder(begun.path).lock()
    path = named_folder(config)
    if path is None:
        return RunFolder.create_next(RUNS_FOLDER, _default_name(config))
    folder = RunFolder(path)
    if config.output.overwrite and (seeds_file(path).is_file() or folder.previous_run.is_dir()):
        return folder.lock()
    if seeds_file(path).is_file():
        raise RunFolderNotEmpty(
            f"{path} already holds runs of several seeds",
            remedy="go on with them by --resume-from-checkpoint auto, delete them with "
            "--overwrite, or choose another folder with --output-dir",
        )
    if folder.config_file.is_file():
        raise RunFolderNotEmpty(
            f"{path} holds a single run", remedy="choose another folder with --output-dir"
        )
    return RunFolder(path).create(overwrite=False)


@contextmanager
def _interruption_explained(parent: SeedsFolder, runs: Sequence[RunFolder]) -> Iterator[None]:
    """Say how many seeds have finished, and how the others go on.

    Raises:
        Interrupted: In place of KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        finished = sum(one.has_finished for one in runs)
        command = f"finetune run --seeds {len(runs)} --resume-from-checkpoint"
        raise Interrupted(
            f"{str(stop) or 'stopped'}; {finished} of {len(runs)} seeds have finished",
            remedy=f"resume with: {command} {shlex.quote(str(parent.path))}"
            if any(one.has_progress for one in runs)
            else "start again with --overwrite: nothing was saved yet",
            signal_number=signal_of(stop),
        ) from None
