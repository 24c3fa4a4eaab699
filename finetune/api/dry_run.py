"""What ``finetune run --dry-run`` does: nothing that trains or draws is imported."""

from collections import Counter
from pathlib import Path

from finetune.config.schema import Config, mode_of
from finetune.data.check import describe_lengths
from finetune.data.load import source_name
from finetune.events import Emit
from finetune.runs.folder import RunFolder, check_run_folder, next_free_folder
from finetune.runs.plan import plan_training
from finetune.runs.preparation import prepare
from finetune.runs.results import DryRun, RunFacts

RUNS_FOLDER = Path("runs")


def describe(config: Config, *, emit: Emit) -> DryRun:
    """Return what a run would do, from all that it prepares before its first update."""
    folder = _free_folder(config)
    preparation = prepare(config, emit=emit)
    plan = plan_training(preparation)
    lengths = Counter(batch.padded_length for batch in plan.batches(0))
    return DryRun(
        facts=RunFacts.of(preparation, plan),
        rows=dict(preparation.splits.num_rows),
        rows_by_class=preparation.task.count_classes(preparation.examples["train"].labels),
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


def _free_folder(config: Config) -> Path:
    """Return the folder that a run would get, having made sure that it may be written."""
    if config.output.output_dir is None:
        return next_free_folder(RUNS_FOLDER, default_name(config))
    path = Path(config.output.output_dir).expanduser()
    check_run_folder(RunFolder(path), overwrite=config.output.overwrite)
    return path


def default_name(config: Config) -> str:
    """Return the name of a run folder, such as ``trec-minilm-full``."""
    parts = source_name(config.data.data), Path(config.model.model).name, mode_of(config.model)
    return "-".join(parts)
