"""What ``finetune run --dry-run`` does: nothing that trains or draws is imported."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from finetune.commands.folders import find_free
from finetune.config.schema import Config
from finetune.data.check import describe_lengths
from finetune.events import Emit
from finetune.runs.preparation import prepare
from finetune.runs.results import RunFacts

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DryRun:
    """What a run would do.

    Args:
        rows: Of each split.
        rows_by_class: Of the training split.
        tokens: Of the training texts: mean, percentiles, max.
        batches_by_padded_length: Of the first epoch.
        learning_rate: The peak.
    """

    facts: RunFacts
    rows: dict[str, int]
    rows_by_class: dict[str, int]
    tokens: dict[str, float]
    batch_size: int | str
    effective_batch_size: int
    batches_by_padded_length: dict[int, int]
    num_train_epochs: float
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    learning_rate: float
    output_dir: str

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune run --dry-run --json`` prints."""
        own = asdict(self)
        facts = own.pop("facts")
        # Nothing has been timed.
        del facts["class_names"], facts["precision_timing"]
        own["batches_by_width"] = own.pop("batches_by_padded_length")
        return {"schema_version": SCHEMA_VERSION, **facts, **own}


def describe(config: Config, *, emit: Emit) -> DryRun:
    """Return what a run would do, from all that it prepares before its first step."""
    folder = find_free(config)
    preparation = prepare(config, emit=emit)
    plan = preparation.plan
    lengths = Counter(batch.padded_length for batch in plan.batches(0))
    return DryRun(
        facts=RunFacts.of(preparation),
        rows=dict(preparation.splits.num_rows),
        rows_by_class=preparation.task.count_classes(preparation.examples["train"].labels),
        tokens=asdict(describe_lengths(plan.lengths)),
        batch_size=config.training.batch_size,
        effective_batch_size=plan.effective_batch_size,
        batches_by_padded_length=dict(sorted(lengths.items())),
        num_train_epochs=plan.num_train_epochs,
        steps_per_epoch=plan.steps_per_epoch,
        total_steps=plan.schedule.total_steps,
        warmup_steps=plan.schedule.warmup_steps,
        learning_rate=plan.schedule.peak,
        output_dir=str(folder),
    )
