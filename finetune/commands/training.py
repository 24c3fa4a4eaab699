"""The work of ``finetune run``: one training, several seeds, a cross-validation; and of a sweep."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from finetune import distributed
from finetune.commands.report import write_pages
from finetune.commands.resuming import Work
from finetune.config.schema import Config
from finetune.config.yaml_files import dump_config
from finetune.devices.mps.awake import kept_awake
from finetune.errors import BatchDoesNotFit, ConfigurationInvalid, DataError, LossNotFinite
from finetune.events import Emit, Info
from finetune.files import write_text_atomically
from finetune.report.page import write_folds_report
from finetune.runs.failures import interruption_explained
from finetune.runs.folder import RunFolder, SeveralFolder, SweepFolder
from finetune.runs.folds import FoldResults, write_rows
from finetune.runs.journal import Journal
from finetune.runs.manifest import Manifest
from finetune.runs.preparation import Preparation, prepare
from finetune.runs.results import RunResults, SeedResults
from finetune.runs.run import Run
from finetune.runs.sweep import (
    RUNGS,
    Options,
    SweepResults,
    Trial,
    compare_trials,
    describe_request,
    read_trials,
    survivors,
)
from finetune.tasks.metrics import Metric, choose_metric
from finetune.tasks.tables import format_value

R = TypeVar("R", SeedResults, FoldResults)


def train(work: Work, *, emit: Emit) -> RunResults:
    """Train a new run, or one that was interrupted, to its end.

    The folder of a new run is created first, and deleted if nothing came of it. Each of several
    ranks calls this; a run may be resumed with more of them.
    """
    journal = Journal(emit)
    distributed.join()
    lock = work.lock() if distributed.is_main() else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked):
        # The main process tells the others which it is.
        folder = distributed.broadcast(lambda: locked)
        preparation = prepare(work.config, option_sources=work.sources, emit=journal)
        preparation = preparation.keeping_tables(folder)
        resumes, continues = bool(work.resumed), work.continued
        with Run.begin(
            preparation, folder, resumes=resumes, continues=continues, journal=journal
        ) as run:
            run.train()
            results = run.finish(write_pages=write_pages)
        _delete_private_tables(folder, work.config)
        return results


def train_seeds(work: Work, *, emit: Emit) -> SeedResults:
    """Train several seeds, from that of the configuration on; those that have finished stay."""
    training = work.config.training
    seeds = range(training.seed, training.seed + (work.seeds or 1))

    def read_results(folder: SeveralFolder) -> SeedResults:
        return SeedResults.read(folder, seeds, metric=training.metric_for_best_model)

    return _train_several(work, seeds, Preparation.with_seed, read_results, emit=emit)


def train_folds(work: Work, *, emit: Emit) -> FoldResults:
    """Train a model for each fold, without its rows; those that have finished stay."""
    folds = range(1, (work.folds or 1) + 1)

    def read_results(folder: SeveralFolder) -> FoldResults:
        results = FoldResults.read(folder, folds)
        if results.scores and not folder.report_file.exists():
            write_folds_report(folder, results, write_rows(folder, folds))
        return results

    return _train_several(work, folds, Preparation.with_fold, read_results, emit=emit)


def _train_several(
    work: Work,
    numbers: range,
    vary: Callable[..., Preparation],
    read_results: Callable[[SeveralFolder], R],
    *,
    emit: Emit,
) -> R:
    """Train those of several runs that have not finished.

    All use the same device and token ids, which are prepared once. ``vary`` returns from that what
    the run of a number needs.
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
            shared = prepare(
                work.config, option_sources=work.sources, folds=work.folds, emit=journal
            ).keeping_tables(folder)
            _start(folder, shared, resumes=bool(work.resumed), emit=emit)
            folder.write_table(read_results(folder).to_json())
            for number in missing:
                done = f"{numbers.index(number) + 1} of {len(numbers)}"
                emit(Info(f"{folder.run_kind} {number}, {done}"))
                run_journal = journal.copy()
                preparation = vary(shared, number, emit=run_journal)
                with _begin(folder.run(number), preparation, run_journal) as run:
                    run.train()
                    run.finish(write_pages=write_pages if work.keeps_models else None)
                    # With what was chosen by measurements.
                    chosen = run.preparation
                shared = replace(shared, config=chosen.config, choices=chosen.choices)
                results = read_results(folder)
                folder.write_table(results.to_json())
        _delete_private_tables(folder, work.config)
        return results


def _delete_private_tables(folder: RunFolder, config: Config) -> None:
    if config.data.private_data:
        folder.delete_tables()


def _start(folder: SeveralFolder, shared: Preparation, *, resumes: bool, emit: Emit) -> None:
    """Start the folder of several runs, or compare with what the runs in it were made from."""
    manifest = Manifest.of(shared)
    if resumes:
        remedy = "restore it, or train in another folder"
        Manifest.read(folder).check(manifest, remedy=remedy)
    else:
        folder.start(emit=emit)
        manifest.write(folder)


@contextmanager
def _begin(own: RunFolder, preparation: Preparation, journal: Journal) -> Iterator[Run]:
    """Begin one of several runs, or resume it."""
    resumes = own.can_resume
    with (
        own.lock() if resumes else own.create(overwrite=True),
        Run.begin(preparation, own, resumes=resumes, journal=journal) as run,
    ):
        yield run


def train_sweep(work: Work, chosen: Sequence[Options], *, emit: Emit) -> SweepResults:
    """Train trials of these options rung by rung: the best third of each goes on.

    A trial that can't be trained with its options has failed, and the others go on.
    """
    journal, trials = Journal(emit), dict(enumerate(map(Trial, chosen), start=1))
    asked = describe_request(work.config, chosen)
    with kept_awake(), work.lock() as locked:
        folder = SweepFolder(locked.path, len(chosen))
        with interruption_explained(folder):
            if work.resumed:
                trials = read_trials(folder, asked)
            shared = prepare(work.config, option_sources=work.sources, emit=journal)
            shared = shared.keeping_tables(folder)
            if "validation" not in shared.examples:
                raise DataError(
                    "a sweep compares trials on validation rows, and there are none",
                    remedy="add rows, or name some with --validation-file",
                )
            _start(folder, shared, resumes=bool(work.resumed), emit=emit)
            metric = choose_metric(
                work.config.training.metric_for_best_model, shared.task.problem_type
            )
            results = SweepResults(trials, metric.name, str(folder.path), asked=asked)
            folder.write_table(results.to_json())
            alive = [*trials]
            for share in RUNGS:
                for number in alive:
                    trial = trials[number]
                    if trial.share < share and not trial.failure:
                        options = format_value(trial.options)
                        emit(Info(f"trial {number} of {len(trials)}: {options}"))
                        trials[number] = _train_trial(
                            folder.run(number), trial, shared, share, metric, journal.copy()
                        )
                        folder.write_table(results.to_json())
                stopped, alive = alive, survivors(trials, alive)
                for number in {*stopped} - {*alive}:
                    # Of its weights nothing is needed any more.
                    if folder.run(number).checkpoints:
                        folder.run(number).delete_checkpoints()
        results = compare_trials(folder, results, task=shared.task)
        if not results.best:
            failures = "; ".join({trial.failure for trial in trials.values()})
            remedy = "choose other values, and start over with --overwrite"
            raise ConfigurationInvalid(f"no trial could be trained: {failures}", remedy=remedy)
        best = folder.run(results.best).read_config()
        write_text_atomically(folder.best_file, dump_config(best))
        _delete_private_tables(folder, work.config)
        folder.write_table(results.to_json())
        return results


def _train_trial(
    own: RunFolder,
    trial: Trial,
    shared: Preparation,
    share: float,
    metric: Metric,
    journal: Journal,
) -> Trial:
    """Train a trial for a share of its epochs, and return how good it is by then."""
    try:
        preparation = shared.with_options(trial.options, emit=journal)
        with _begin(own, preparation, journal) as run:
            epochs = run.plan.values.num_train_epochs
            is_over = run.train(max_epochs=math.ceil(share * epochs) if share < 1 else None)
            score = run.progress.best_score
            scores = run.finish(write_pages=None).validation if is_over else None
            # A model that misses a class has a score that is no metric.
            value = metric.sign * score if score is not None else None
            value = None if metric.is_fraction and (value or 0.0) < 0 else value
            value = scores.metrics[metric.name] if scores else value
            return replace(trial, share=1.0 if is_over else share, score=score, value=value)
    except (LossNotFinite, BatchDoesNotFit, ConfigurationInvalid) as error:
        journal(Info(f"the trial failed: {error.message}"))
        return replace(trial, failure=error.message)
