"""What a run will do, in numbers: how many steps, of which examples, at which rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import (
    OPTIONS,
    Config,
    change_options,
    default_learning_rate,
    mode_defaults,
)
from finetune.data.load import KNOWN_BY_NAME
from finetune.devices.base import BatchShapes
from finetune.model.load import TextModel
from finetune.model.source import MINILM
from finetune.tokenization.buckets import Batch, plan_epoch, real_token_fraction
from finetune.tokenization.examples import Examples
from finetune.training.optimizers import Hyperparameters
from finetune.training.schedule import Schedule

# Forwards that a text of each split takes in a run of three epochs: a step is as long as three,
# validation comes after each epoch and at the end.
_PASSES = {"train": 9.0, "validation": 4.0, "test": 1.0}


@dataclass(frozen=True)
class TrainingPlan:
    """The steps of a run, a function of its configuration and its examples.

    Args:
        examples: The training split.
        padded_lengths: Those that a batch may have, ascending.
        pads_batches: Whether repeated examples fill up a batch with too few.
    """

    examples: Examples
    padded_lengths: Sequence[int]
    effective_batch_size: int
    pads_batches: bool
    num_train_epochs: float
    hyperparameters: Hyperparameters
    early_stopping_patience: int
    seed: int

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return self.hyperparameters.schedule

    @property
    def steps_per_epoch(self) -> int:
        """Effective batches in a pass over the examples."""
        return math.ceil(len(self.examples.labels) / self.effective_batch_size)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each text or window that the model reads: int64 of shape [texts or windows]."""
        return self.examples.lengths

    @property
    def rows_per_step(self) -> int:
        """Texts or windows in a step, on average."""
        windows_per_text = len(self.lengths) / len(self.examples.labels)
        return math.ceil(windows_per_text * self.effective_batch_size)

    def batches(self, epoch: int) -> list[Batch]:
        """Return the effective batches of an epoch, counted from 0."""
        return plan_epoch(
            self.examples.max_lengths,
            effective_batch_size=self.effective_batch_size,
            padded_lengths=self.padded_lengths,
            seed=self.seed,
            epoch=epoch,
        )

    def real_token_fraction(self) -> float:
        """Return the fraction of the first epoch's tokens that are not padding."""
        filled_to = self.effective_batch_size if self.pads_batches else 1
        batches = [
            replace(batch, indices=self.examples.sequences_of(batch.indices))
            for batch in self.batches(0)
        ]
        return real_token_fraction(batches, self.lengths, filled_to=filled_to)


def plan_training(
    config: Config, examples: Mapping[str, Examples], text_model: TextModel, shapes: BatchShapes
) -> TrainingPlan:
    """Work out a run's steps, with the defaults that depend on model, mode and device."""
    options, mode = config.training, config.model.mode
    per_step = options.examples_per_step
    steps_per_epoch = math.ceil(len(examples["train"].labels) / per_step)
    defaults = mode_defaults(mode, steps_per_epoch=steps_per_epoch)
    patience, weight_decay = options.early_stopping_patience, options.weight_decay
    num_train_epochs = options.num_train_epochs or defaults.num_train_epochs
    total_steps = options.max_steps or math.ceil(num_train_epochs * steps_per_epoch)
    learning_rate = options.learning_rate or default_learning_rate(
        mode, hidden_size=text_model.model.config.hidden_size, structure=text_model.structure
    )
    if shapes.max_shapes is not None and not mode.trains_encoder:
        # A head over stored features has a shape of its own: one vector a text.
        shapes = replace(shapes, max_shapes=shapes.max_shapes - 1)
    return TrainingPlan(
        examples=examples["train"],
        # Of all splits, so that evaluation brings no new shapes.
        padded_lengths=text_model.padded_lengths(
            np.concatenate([split.lengths for split in examples.values()]),
            shapes,
            weights=np.concatenate(
                [np.full(len(split.lengths), _PASSES[name]) for name, split in examples.items()]
            ),
        ),
        effective_batch_size=per_step,
        pads_batches=shapes.pads_batches,
        num_train_epochs=num_train_epochs,
        hyperparameters=Hyperparameters(
            optimizer=options.optimizer,
            schedule=Schedule(
                peak=learning_rate,
                warmup_steps=math.ceil(options.warmup_fraction * total_steps),
                total_steps=total_steps,
            ),
            head_lr_multiplier=options.head_lr_multiplier or defaults.head_lr_multiplier,
            weight_decay=defaults.weight_decay if weight_decay is None else weight_decay,
            max_grad_norm=options.max_grad_norm,
        ),
        early_stopping_patience=defaults.early_stopping_patience if patience is None else patience,
        seed=options.seed,
    )


def with_plan(
    config: Config, plan: TrainingPlan, *, data_commit: str | None, model_commit: str | None
) -> Config:
    """Return a configuration that makes the same run again, from any folder.

    It has the values of all defaults, absolute paths, and the commits of data and model on the Hub.
    """
    paths = {option.name: option.value_in(config) for option in OPTIONS.values() if option.is_path}
    data, model, hyperparameters = config.data.data, config.model.model, plan.hyperparameters
    if data not in KNOWN_BY_NAME:
        data = f"{data.partition('@')[0]}@{data_commit}" if data_commit else _absolute(data)
    pinned: dict[str, Any] = {
        **{option: path and _absolute(path) for option, path in paths.items()},
        "data": data,
        "model": model if model == MINILM else _absolute(model),
        "revision": model_commit,
        "gradient_checkpointing": bool(config.training.gradient_checkpointing),
        "effective_batch_size": plan.effective_batch_size,
        "num_train_epochs": plan.num_train_epochs,
        "learning_rate": hyperparameters.schedule.peak,
        "head_lr_multiplier": hyperparameters.head_lr_multiplier,
        "weight_decay": hyperparameters.weight_decay,
        "early_stopping_patience": plan.early_stopping_patience,
        "output_dir": None,
        "overwrite": False,
    }
    return change_options(config, pinned)


def _absolute(source: str) -> str:
    """Return the absolute path of a file or folder; anything else, such as a Hub id, as it is."""
    if not Path(source).expanduser().exists():
        return source
    return str(Path(source).expanduser().resolve())
