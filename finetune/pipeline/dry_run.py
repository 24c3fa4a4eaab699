"""What a run would do, worked out without doing it."""

from collections import Counter
from typing import Any

from finetune.config.schema import Config
from finetune.data.check import describe_lengths
from finetune.events import Emit
from finetune.model.freeze import count_parameters
from finetune.pipeline.examples import encode_split
from finetune.pipeline.plan import plan_training
from finetune.pipeline.prepare import find_run_folder, prepare

DRY_RUN_SCHEMA_VERSION = 1


def dry_run(config: Config, *, emit: Emit) -> dict[str, Any]:
    """Prepare a run up to its first update, write nothing, and return what it would do.

    Whatever would keep the run from starting is raised here too.

    Returns:
        Device, data, lengths in tokens, parameters, updates and folder, by name.
    """
    folder = find_run_folder(config)
    prepared = prepare(config, emit=emit)
    options = config.training
    examples = {split: encode_split(prepared, split, emit=emit) for split in prepared.table}
    plan = plan_training(prepared, examples)
    names = prepared.classifier.class_names
    rows_by_class = Counter(examples["train"].labels.tolist())
    trained, total = count_parameters(prepared.classifier.model)
    batches_by_width = Counter(batch.padded_length for batch in plan.batches(0))
    return {
        "schema_version": DRY_RUN_SCHEMA_VERSION,
        "device": prepared.device.name,
        "device_description": prepared.device.description,
        "precision": options.precision,
        "data": config.data.data,
        "rows": {split: len(rows) for split, rows in prepared.table.items()},
        "rows_by_class": {name: rows_by_class[number] for number, name in enumerate(names)},
        "tokens": describe_lengths(plan.lengths).to_json(),
        "model": config.model.model,
        "mode": prepared.mode,
        "trained_parameters": trained,
        "total_parameters": total,
        "batch_size": options.batch_size,
        "effective_batch_size": plan.effective_batch_size,
        "batches_by_width": dict(sorted(batches_by_width.items())),
        "real_token_share": plan.real_token_share(),
        "num_train_epochs": plan.num_train_epochs,
        "updates_per_epoch": plan.updates_per_epoch,
        "total_updates": plan.schedule.total_updates,
        "warmup_updates": plan.schedule.warmup_updates,
        "learning_rate": plan.schedule.peak,
        "output_dir": str(folder.path),
    }
