"""What ``finetune run`` does once its configuration is known."""

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from finetune.config.schema import Config, mode_of
from finetune.data.check import describe_lengths
from finetune.data.load import source_name
from finetune.evaluation.baseline import warn_unless_better
from finetune.events import Emit
from finetune.report.card import write_model_card
from finetune.report.page import write_report
from finetune.runs.failures import interruption_explained, out_of_memory_explained
from finetune.runs.folder import (
    RunFolder,
    check_run_folder,
    lock,
    next_free_folder,
    reserve_folder,
    reserve_new_folder,
)
from finetune.runs.plan import plan_training
from finetune.runs.preparation import prepare
from finetune.runs.results import DryRun, RunFacts, RunResults
from finetune.runs.run import Run

RUNS_FOLDER = Path("runs")


def train_new(config: Config, *, emit: Emit) -> RunResults:
    """Train in a folder of its own, which is reserved first and given back if nothing came of it.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    with _reserve(config) as folder, interruption_explained(folder):
        preparation = prepare(config, emit=emit)
        with out_of_memory_explained(folder, preparation):
            return _complete(Run.prepare(preparation, folder, emit=emit))


def train_on(config: Config, folder: RunFolder, *, emit: Emit) -> RunResults:
    """Train an interrupted run to its end.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    with lock(folder), interruption_explained(folder):
        preparation = prepare(config, emit=emit)
        with out_of_memory_explained(folder, preparation):
            return _complete(Run.resume(preparation, folder, emit=emit))


def describe(config: Config, *, emit: Emit) -> DryRun:
    """Return what a run would do, from all that it prepares before its first update."""
    folder = _free_folder(config)
    preparation = prepare(config, emit=emit)
    plan = plan_training(preparation)
    rows_by_class = Counter(preparation.examples["train"].labels.tolist())
    lengths = Counter(batch.padded_length for batch in plan.batches(0))
    names = preparation.classifier.class_names
    return DryRun(
        facts=RunFacts.of(preparation, plan),
        rows={split: len(rows) for split, rows in preparation.splits.items()},
        rows_by_class={name: rows_by_class[number] for number, name in enumerate(names)},
        tokens=describe_lengths(plan.lengths).to_json(),
        batch_size=config.training.batch_size,
        effective_batch_size=plan.effective_batch_size,
        batches_by_padded_length=dict(sorted(lengths.items())),
        num_train_epochs=plan.num_train_epochs,
        updates_per_epoch=plan.updates_per_epoch,
        total_updates=plan.schedule.total_updates,
        warmup_updates=plan.schedule.warmup_updates,
        learning_rate=plan.schedule.peak,
        output_dir=str(folder),
    )


def _complete(run: Run) -> RunResults:
    run.train()
    results = run.finish(write_pages=_write_pages)
    test = results.test
    warn_unless_better(test.accuracy, test.confusion_matrix, emit=run.emit)
    return results


def _write_pages(folder: RunFolder, results: RunResults) -> None:
    write_model_card(folder, results)
    write_report(folder, results)


def _reserve(config: Config) -> AbstractContextManager[RunFolder]:
    if config.output.output_dir is None:
        return reserve_new_folder(RUNS_FOLDER, _default_name(config))
    path = Path(config.output.output_dir).expanduser()
    return reserve_folder(path, overwrite=config.output.overwrite)


def _free_folder(config: Config) -> Path:
    """Return the folder that a run would get, having made sure that it may be written."""
    if config.output.output_dir is None:
        return next_free_folder(RUNS_FOLDER, _default_name(config))
    path = Path(config.output.output_dir).expanduser()
    check_run_folder(RunFolder(path), overwrite=config.output.overwrite)
    return path


def _default_name(config: Config) -> str:
    """Return the name of a run folder, such as ``trec-minilm-full``."""
    parts = source_name(config.data.data), Path(config.model.model).name, mode_of(config.model)
    return "-".join(parts)
