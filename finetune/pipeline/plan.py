"""What a run will do, in numbers: how many updates, of which rows, at which rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import (
    Config,
    default_learning_rate,
    effective_batch_size,
    mode_defaults,
)
from finetune.data.load import SOURCES
from finetune.model.load import MINILM
from finetune.pipeline.prepare import Prepared
from finetune.tokenization.buckets import Batch, plan_epoch, real_token_share
from finetune.tokenization.examples import Examples
from finetune.training.schedule import Schedule


@dataclass(frozen=True)
class TrainingPlan:
    """The updates of a run, a function of its configuration and the lengths of its texts.

    Args:
        lengths: Tokens of each training row: int64 of shape [rows].
        padded_lengths: Padded lengths that a batch may have, ascending.
        effective_batch_size: Rows in one update.
        num_train_epochs: Passes over the rows.
        schedule: The learning rate of each update.
        head_lr_multiplier: The head's learning rate over the core's.
        weight_decay: Decoupled decay of the matrices.
        early_stopping_patience: Validations in a row without a better model after which training
            stops; 0: never.
        seed: Of the order of the rows.
    """

    lengths: NDArray[np.int64]
    padded_lengths: Sequence[int]
    effective_batch_size: int
    num_train_epochs: float
    schedule: Schedule
    head_lr_multiplier: float
    weight_decay: float
    early_stopping_patience: int
    seed: int

    @property
    def updates_per_epoch(self) -> int:
        """Effective batches in a pass over the rows."""
        return math.ceil(len(self.lengths) / self.effective_batch_size)

    def batches(self, epoch: int) -> list[Batch]:
        """Return the effective batches of an epoch, counted from 0."""
        return plan_epoch(
            self.lengths,
            effective_batch_size=self.effective_batch_size,
            padded_lengths=self.padded_lengths,
            seed=self.seed,
            epoch=epoch,
        )

    def real_token_share(self) -> float:
        """Return the share of the first epoch's tokens that are not padding, in 0..1."""
        return real_token_share(self.batches(0), self.lengths)


def plan_training(prepared: Prepared, examples: Mapping[str, Examples]) -> TrainingPlan:
    """Work out a run's updates, with the defaults that depend on model and mode.

    Args:
        prepared: The run.
        examples: Its splits; all share the widths, so that evaluation brings no new shapes.
    """
    lengths = examples["train"].lengths
    longest_tokens = max(int(split.lengths.max()) for split in examples.values())
    options = prepared.config.training
    rows_of_update = effective_batch_size(options)
    defaults = mode_defaults(prepared.mode)
    num_train_epochs = options.num_train_epochs or defaults.num_train_epochs
    updates_per_epoch = math.ceil(len(lengths) / rows_of_update)
    total_updates = options.max_steps or math.ceil(num_train_epochs * updates_per_epoch)
    default_rate = default_learning_rate(
        prepared.mode,
        hidden_size=prepared.classifier.model.config.hidden_size,
        classifier_input=prepared.classifier.structure.classifier_input,
    )
    return TrainingPlan(
        lengths=lengths,
        padded_lengths=prepared.classifier.padded_lengths(longest_tokens, prepared.device.shapes),
        effective_batch_size=rows_of_update,
        num_train_epochs=num_train_epochs,
        schedule=Schedule(
            peak=options.learning_rate or default_rate,
            warmup_updates=math.ceil(options.warmup_fraction * total_updates),
            total_updates=total_updates,
        ),
        head_lr_multiplier=options.head_lr_multiplier or defaults.head_lr_multiplier,
        weight_decay=defaults.weight_decay
        if options.weight_decay is None
        else options.weight_decay,
        early_stopping_patience=defaults.early_stopping_patience
        if options.early_stopping_patience is None
        else options.early_stopping_patience,
        seed=options.seed,
    )


def with_plan(config: Config, plan: TrainingPlan) -> Config:
    """Return a configuration that makes the same run again, from any folder.

    It no longer depends on defaults by model and mode, nor on where the command was typed, and
    names no folder for its output.
    """
    data, model = config.data, config.model.model
    return replace(
        config,
        data=replace(
            data,
            data=data.data if data.data in SOURCES else _absolute(data.data),
            data_dir=data.data_dir and _absolute(data.data_dir),
            validation_file=data.validation_file and _absolute(data.validation_file),
            test_file=data.test_file and _absolute(data.test_file),
        ),
        model=replace(config.model, model=model if model == MINILM else _absolute(model)),
        training=replace(
            config.training,
            effective_batch_size=plan.effective_batch_size,
            num_train_epochs=plan.num_train_epochs,
            learning_rate=plan.schedule.peak,
            head_lr_multiplier=plan.head_lr_multiplier,
            weight_decay=plan.weight_decay,
            early_stopping_patience=plan.early_stopping_patience,
        ),
        output=replace(config.output, output_dir=None, overwrite=False),
        cache=replace(
            config.cache, cache_dir=config.cache.cache_dir and _absolute(config.cache.cache_dir)
        ),
    )


def _absolute(source: str) -> str:
    """Return a file or folder with its whole path; what is neither, such as a Hub id, as it is."""
    if not Path(source).expanduser().exists():
        return source
    return str(Path(source).expanduser().resolve())
