"""The work of ``finetune run``: one training, several seeds, or a cross-validation."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from finetune.commands.report import write_pages
from finetune.commands.resuming import Work
from finetune.data.split import number_folds
from finetune.devices.mps.power import kept_awake
from finetune.distributed.processes import join_processes
from finetune.events import Emit, Info
from finetune.report.folds import write_folds_report
from finetune.runs.failures import interruption_explained
from finetune.runs.folder import RunFolder, SeveralFolder
from finetune.runs.folds import FoldResults, write_rows
from finetune.runs.journal import Journal
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import Preparation, prepare
from finetune.runs.results import RunResults, SeedResults
from finetune.runs.run import Run

R = TypeVar("R", SeedResults, FoldResults)
# What several runs share, and what one of them needs, by its number.
Vary = tuple[Preparation, Callable[[Preparation, int, Emit], Preparation]]


def train(work: Work, *, emit: Emit) -> RunResults:
    """Train a new run, or one that was interrupted, to its end.

    The folder of a new run is created first, and deleted if nothing came of it. Each of several
    processes calls this; a run may be resumed with more of them.
    """
    journal, processes = Journal(emit), join_processes()
    lock = work.lock() if processes.is_main else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked):
        # The main process tells the others which it is.
        folder = processes.broadcast(lambda: locked)
        preparation = prepare(
            work.config, option_sources=work.sources, emit=journal, processes=processes
        )
        resumes, continues = bool(work.resumed), work.continued
        with Run.begin(
            preparation, folder, resumes=resumes, continues=continues, journal=journal
        ) as run:
            run.train()
            return run.finish(write_pages=write_pages)


def train_seeds(work: Work, *, emit: Emit) -> SeedResults:
    """Train several seeds, from that of the configuration on; those that have finished stay."""
    training = work.config.training
    seeds = range(training.seed, training.seed + (work.seeds or 1))

    def read_results(folder: SeveralFolder) -> SeedResults:
        return SeedResults.read(folder, seeds, metric=training.metric_for_best_model)

    def prepare_seeds(emit: Emit) -> Vary:
        preparation = prepare(work.config, option_sources=work.sources, emit=emit)
        return preparation, lambda shared, seed, emit: shared.with_seed(seed, emit=emit)

    return _train_several(work, seeds, prepare_seeds, read_results, emit=emit)


def train_folds(work: Work, *, emit: Emit) -> FoldResults:
    """Train a model for each fold, without its rows; those that have finished stay."""
    folds = range(1, (work.folds or 1) + 1)

    def read_results(folder: SeveralFolder) -> FoldResults:
        results = FoldResults.read(folder, folds)
        if results.scores and not folder.report_file.exists():
            write_folds_report(folder, results, write_rows(folder, folds))
        return results

    def prepare_folds(emit: Emit) -> Vary:
        config = work.config
        preparation = prepare(config, option_sources=work.sources, emit=emit, holds_out=False)
        rows = preparation.data.splits["train"]
        numbers = number_folds(
            rows, folds=len(folds), task=preparation.task, seed=config.data.split_seed
        )
        return preparation, lambda shared, fold, emit: shared.with_fold(numbers == fold, emit=emit)

    return _train_several(work, folds, prepare_folds, read_results, emit=emit)


def _train_several(
    work: Work,
    numbers: range,
    prepare_all: Callable[[Emit], Vary],
    read_results: Callable[[SeveralFolder], R],
    *,
    emit: Emit,
) -> R:
    """Train those of several runs that have not finished.

    All use the same device and token ids, which are prepared once. ``prepare_all`` gives what they
    share, and a function from this and a number to what one of them needs.
    """
    journal = Journal(emit)
    with kept_awake(), work.lock() as locked:
        folder = work.folder(locked.path)
        assert isinstance(folder, SeveralFolder)
        missing = [one for one in numbers if not work.resumed or not folder.run(one).has_finished]
        if not missing:
            emit(Info(f"the runs in {folder.path} have finished: nothing is left to do"))
            return read_results(folder)
        with interruption_explained(folder):
            shared, vary = prepare_all(journal)
            manifest = Manifest.of(shared)
            if work.resumed:
                remedy = "restore it, or train in another folder"
                Manifest.read(folder).check(manifest, remedy=remedy)
            else:
                folder.start(emit=emit)
                manifest.write(folder)
            folder.write_table(read_results(folder).to_json())
            for number in missing:
                emit(
                    Info(
                        f"{folder.run_kind} {number}, {numbers.index(number) + 1} of {len(numbers)}"
                    )
                )
                own, run_journal = folder.run(number), journal.copy()
                preparation = vary(shared, number, run_journal)
                resumes = own.can_resume
                with (
                    own.lock() if resumes else own.create(overwrite=True),
                    Run.begin(preparation, own, resumes=resumes, journal=run_journal) as run,
                ):
                    run.train()
                    run.finish(write_pages=write_pages if work.keeps_models else None)
                    # With what was chosen by measurements.
                    chosen = run.preparation
                shared = replace(shared, config=chosen.config, choices=chosen.choices)
                folder.write_table(read_results(folder).to_json())
        return read_results(folder)
