"""What a run will do, in numbers: how many updates, of which rows, at which rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import Config, default_learning_rate, default_num_train_epochs
from finetune.pipeline.prepare import Prepared
from finetune.tokenization.buckets import Batch, plan_epoch, real_token_share
from finetune.training.schedule import Schedule


@dataclass(frozen=True)
class TrainingPlan:
    """The updates of a run, a function of its configuration and the lengths of its texts.

    Args:
        lengths: Tokens of each training row: int64 of shape [rows].
        widths: Padded lengths that a batch may have, ascending.
        effective_batch_size: Rows in one update.
        num_train_epochs: Passes over the rows.
        schedule: The learning rate of each update.
        seed: Of the order of the rows.
    """

    lengths: NDArray[np.int64]
    widths: Sequence[int]
    effective_batch_size: int
    num_train_epochs: float
    schedule: Schedule
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
            widths=self.widths,
            seed=self.seed,
            epoch=epoch,
        )

    def real_token_share(self) -> float:
        """Return the share of the first epoch's tokens that are not padding, in 0..1."""
        return real_token_share(self.batches(0), self.lengths)


def plan_training(prepared: Prepared, lengths: NDArray[np.int64]) -> TrainingPlan:
    """Work out a run's updates, with the defaults that depend on model and mode."""
    options = prepared.config.training
    effective_batch_size = options.effective_batch_size or options.batch_size
    num_train_epochs = options.num_train_epochs or default_num_train_epochs(prepared.mode)
    updates_per_epoch = math.ceil(len(lengths) / effective_batch_size)
    total_updates = options.max_steps or math.ceil(num_train_epochs * updates_per_epoch)
    hidden_size = prepared.classifier.model.config.hidden_size
    return TrainingPlan(
        lengths=lengths,
        widths=prepared.device.widths(int(lengths.max())),
        effective_batch_size=effective_batch_size,
        num_train_epochs=num_train_epochs,
        schedule=Schedule(
            peak=options.learning_rate
            or default_learning_rate(prepared.mode, hidden_size=hidden_size),
            warmup_updates=math.ceil(options.warmup_fraction * total_updates),
            total_updates=total_updates,
        ),
        seed=options.seed,
    )


def with_plan(config: Config, plan: TrainingPlan) -> Config:
    """Return a configuration that makes the same run again, from any folder.

    It no longer depends on defaults by model and mode, nor on where the command was typed, and
    names no folder for its output.
    """
    return replace(
        config,
        data=replace(
            config.data, data_dir=config.data.data_dir and _absolute(config.data.data_dir)
        ),
        model=replace(config.model, model=_absolute(config.model.model)),
        training=replace(
            config.training,
            effective_batch_size=plan.effective_batch_size,
            num_train_epochs=plan.num_train_epochs,
            learning_rate=plan.schedule.peak,
        ),
        output=replace(config.output, output_dir=None, overwrite=False),
    )


def _absolute(source: str) -> str:
    """Return a folder with its whole path; what is no folder, such as a Hub id, as it is."""
    if not Path(source).expanduser().is_dir():
        return source
    return str(Path(source).expanduser().resolve())
