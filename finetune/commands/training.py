"""What ``finetune run`` and ``finetune sweep`` do: train one run, or several."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from finetune import distributed
from finetune.commands.report import write_pages
from finetune.commands.resuming import Work
from finetune.config.schema import Config
from finetune.config.yaml_files import dump_config
from finetune.devices.mps.awake import kept_awake
from finetune.errors import ConfigurationError, DataError
from finetune.events import Info, emit, sent_to
from finetune.files import write_text_atomically
from finetune.report.page import write_folds_report
from finetune.runs.failures import interruption_explained
from finetune.runs.folder import RunFolder, SeveralFolder, SweepFolder
from finetune.runs.journal import Journal
from finetune.runs.manifest import Manifest
from finetune.runs.prepare import RunInputs, keep_tables, prepare
from finetune.runs.results import RunResults
from finetune.runs.run import Run
from finetune.runs.several import (
    SeveralResults,
    describe_request,
    read_failures,
    run_variants,
    write_rows,
)
from finetune.tasks.metrics import choose_metric
from finetune.tasks.tables import format_value


@distributed.joined()
def train(work: Work) -> RunResults:
    """Train a new or an interrupted run to its end.

    The folder of a new run is created first, and deleted if the run fails before it trains. With
    several ranks, each calls this; a run can resume with another number of ranks.
    """
    journal = Journal()
    lock = work.lock() if distributed.is_main() else nullcontext(RunFolder(Path()))
    with kept_awake(), lock as locked, interruption_explained(locked), sent_to(journal):
        folder = distributed.broadcast(lambda: locked)
        inputs = keep_tables(prepare(work.config, sources=work.sources), folder)
        resumes, continues = bool(work.resumed), work.continued
        with Run.begin(
            inputs, folder, resumes=resumes, continues=continues, journal=journal
        ) as run:
            run.train()
            results = run.finish(write_pages=write_pages)
        _delete_private_tables(folder, work.config)
        return results


def train_several(work: Work) -> SeveralResults:
    """Train several seeds, the folds of a cross-validation, or the trials of a sweep.

    Runs that have finished stay as they are.
    """
    journal, variants, request = Journal(), _variants(work), None
    metric = work.config.training.metric_for_best_model
    if work.trials:
        request = describe_request(work.config, work.trials)
    with kept_awake(), work.lock() as locked:
        folder = work.folder(locked.path)
        assert isinstance(folder, SeveralFolder)
        failures: Mapping[int, str] = {}
        if work.resumed and isinstance(folder, SweepFolder) and request:
            failures = read_failures(folder, request)
        options = dict(enumerate(work.trials, start=1))
        read = partial(SeveralResults.read, folder, [*variants], options=options)
        finished = {number for number in variants if folder.run(number).has_finished}
        if work.resumed and not work.trials and finished == variants.keys():
            emit(Info(f"the runs in {folder.path} have finished: nothing is left to do"))
            return _complete(folder, read(metric=metric))
        with interruption_explained(folder), sent_to(journal):
            shared = prepare(work.config, sources=work.sources, folds=work.folds)
            shared = keep_tables(shared, folder)
            if work.trials:
                metric = choose_metric(metric, shared.task.problem_type).name
                if "validation" not in shared.examples:
                    raise DataError(
                        "a sweep compares trials on validation rows, but there are none",
                        remedy="add rows, or add --validation-file",
                    )
            _start(folder, shared, resumes=bool(work.resumed))

            def write_table(failures: Mapping[int, str]) -> SeveralResults:
                results = read(metric=metric, failures=failures)
                content = results.to_json()
                folder.write_table({**content, "request": request} if request else content)
                return results

            write_table(failures)
            failures = run_variants(
                folder, variants, shared, journal=journal, write_table=write_table,
                write_pages=write_pages if work.keeps_models and not work.trials else None,
                failures=failures,
            )  # fmt: skip
        _delete_private_tables(folder, work.config)
        return _complete(folder, write_table(failures))


def _variants(work: Work) -> dict[int, tuple[str, Mapping[str, Any]]]:
    """Return the title and the options of each run by its number."""
    if work.trials:
        titles = [
            f"trial {n} ({format_value(options)})" for n, options in enumerate(work.trials, 1)
        ]
        return dict(enumerate(zip(titles, work.trials, strict=True), start=1))
    if work.folds:
        return {number: (f"fold {number}", {}) for number in range(1, work.folds + 1)}
    first = work.config.training.seed
    seeds = range(first, first + (work.seeds or 1))
    return {seed: (f"seed {seed}", {"seed": seed}) for seed in seeds}


def _complete(folder: SeveralFolder, results: SeveralResults) -> SeveralResults:
    """Write the page and the best configuration of runs that have all finished."""
    if results.scores and not folder.report_file.exists():
        write_folds_report(folder, results, write_rows(folder, results.numbers))
    if results.options:
        if results.best is None:
            failures = "; ".join({*results.failures.values()})
            remedy = "choose other values, and start over with --overwrite"
            raise ConfigurationError(f"no trial could be trained: {failures}", remedy=remedy)
        best = folder.run(results.best).read_config()
        write_text_atomically(folder.best_file, dump_config(best))
    return results


def _delete_private_tables(folder: RunFolder, config: Config) -> None:
    if config.data.private_data:
        folder.delete_tables()


def _start(folder: SeveralFolder, shared: RunInputs, *, resumes: bool) -> None:
    """Start the folder of several runs, or check that it was made from the same data and model."""
    manifest = Manifest.of(shared)
    if resumes:
        remedy = "restore it, or train in another folder"
        Manifest.read(folder).check(manifest, remedy=remedy)
    else:
        folder.start()
        manifest.write(folder)
