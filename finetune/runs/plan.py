"""What a run will do: by steps or a solved head, and why; how many steps, at which rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from finetune import distributed
from finetune.config.schema import (
    OPTIONS,
    Config,
    ModeDefaults,
    default_learning_rate,
    mode_defaults,
)
from finetune.devices.base import BatchShapes
from finetune.errors import ConfigurationError
from finetune.model.load import TextModel
from finetune.tasks.base import Task
from finetune.tokenization.buckets import Batch, plan_epoch
from finetune.tokenization.examples import Examples
from finetune.training.contrastive import (
    LEARNING_RATE_FACTOR,
    TEXTS_A_STEP,
    count_steps,
    plan_contrast,
)
from finetune.training.optimizers import Hyperparameters, Schedule

# With more, plain fine-tuning is as good and takes less time (docs/measurements.md).
MAX_ROWS_A_CLASS = 100


@dataclass(frozen=True)
class Recipe:
    """What replaces the steps of plain fine-tuning, and why.

    With ``is_contrastive`` the encoder takes contrastive steps; with ``solves_head`` the output
    layer is solved, after these or on the features of the frozen encoder.
    """

    solves_head: bool = False
    is_contrastive: bool = False
    reason: str = field(default="", compare=False)

    @property
    def takes_steps(self) -> bool:
        """Whether any step is taken before the head is solved, or instead."""
        return self.is_contrastive or not self.solves_head


def choose_recipe(config: Config, task: Task, *, rows: int) -> Recipe:
    """Return what ``contrastive`` and ``fit_head`` make of a configuration and its rows.

    Raises:
        ConfigurationError: If one of them is on where it can't be.
    """
    training, obstacle = config.training, _find_obstacle(config)
    if config.model.mode.trains_encoder:
        option, choice = "contrastive", training.contrastive
        if training.fit_head == "on" and choice == "off":
            obstacle = "--fit-head on needs a frozen encoder, or contrastive steps"
        elif task.name != "single":
            obstacle = f"the task is {task.name}"
        elif training.label_smoothing:
            obstacle = "the labels are smoothed"
        rows_a_class = rows / max(len(task.class_names), 1)
        is_due = rows_a_class <= MAX_ROWS_A_CLASS and training.fit_head != "off"
        reason = f"{rows_a_class:.0f} rows a class are few: contrastive steps, then a solved head"
    else:
        option, choice, is_due = "fit-head", training.fit_head, True
        reason = "the output layer is solved on the features of the frozen encoder"
    if choice == "on" or (option == "contrastive" and training.fit_head == "on"):
        if obstacle:
            raise ConfigurationError(
                f"--{option} on can't be used: {obstacle}", remedy=f"use --{option} auto"
            )
    elif choice == "off" or obstacle or not is_due:
        return Recipe()
    elif names := [
        one.flag for one in OPTIONS.values() if one.selects_steps and one.value_in(config)
    ]:
        return Recipe(reason=f"plain gradient descent, because {names[0]} is set")
    return Recipe(True, is_contrastive=option == "contrastive", reason=reason)


def _find_obstacle(config: Config) -> str | None:
    """Return why no head can be solved."""
    if distributed.world_size() > 1:
        return f"there are {distributed.world_size()} processes"
    if config.training.loss == "focal":
        return "the loss is focal, which has no single optimum"
    return None


@dataclass(frozen=True)
class TrainingPlan:
    """The steps of a run over the training split, a function of its configuration and examples.

    Padded lengths ascend. ``pads_batches`` says whether repeated examples fill up a batch with too
    few; ``values`` are the options whose defaults depend on the mode, as given or by default.
    """

    examples: Examples
    padded_lengths: Sequence[int]
    pads_batches: bool
    is_padded_right: bool
    effective_batch_size: int
    recipe: Recipe
    values: ModeDefaults
    hyperparameters: Hyperparameters
    seed: int

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return self.hyperparameters.schedule

    @property
    def steps_per_epoch(self) -> int:
        """Effective batches in a pass over the examples; all of them with a solved head."""
        if self.recipe.solves_head:
            return self.schedule.total_steps
        return math.ceil(len(self.examples.labels) / self.effective_batch_size)

    @property
    def rows_per_step(self) -> int:
        """Texts or windows in a step, on average."""
        windows_per_text = len(self.examples.lengths) / len(self.examples.labels)
        return math.ceil(windows_per_text * self.effective_batch_size)

    def batches(self, epoch: int) -> list[Batch]:
        """Return the effective batches of an epoch, counted from 0."""
        if self.recipe.is_contrastive:
            return plan_contrast(
                self.examples.labels,
                self.examples.max_lengths,
                padded_lengths=self.padded_lengths,
                is_padded_right=self.is_padded_right and not self.pads_batches,
                steps=self.schedule.total_steps,
                seed=self.seed,
                epoch=epoch,
            )
        return plan_epoch(
            self.examples.max_lengths,
            effective_batch_size=self.effective_batch_size,
            padded_lengths=self.padded_lengths,
            seed=self.seed,
            epoch=epoch,
        )

    def real_token_fraction(self) -> float:
        """Return the fraction of the first epoch's tokens that are not padding."""
        tokens, padded_tokens = 0, 0
        filled_to = self.effective_batch_size if self.pads_batches else 1
        for batch in self.batches(0):
            sequences = self.examples.sequences_of(batch.indices)
            tokens += self.examples.lengths[sequences].sum()
            whole = [(max(len(sequences), filled_to), batch.padded_length)]
            padded_tokens += sum(rows * length for rows, length in batch.parts or whole)
        return float(tokens / padded_tokens)


def plan_training(
    config: Config,
    examples: Mapping[str, Examples],
    text_model: TextModel,
    shapes: BatchShapes,
    recipe: Recipe,
) -> TrainingPlan:
    """Work out a run's steps, with the defaults that depend on model, mode and device."""
    options, mode = config.training, config.model.mode
    rows, examples_per_step = len(examples["train"].labels), options.examples_per_step
    steps_per_epoch = math.ceil(rows / examples_per_step)
    values = mode_defaults(mode, steps_per_epoch=steps_per_epoch)
    given = {name: getattr(options, name) for name in vars(values)}
    values = replace(values, **{name: one for name, one in given.items() if one is not None})
    total_steps = options.max_steps or math.ceil(values.num_train_epochs * steps_per_epoch)
    if recipe.solves_head:
        total_steps = count_steps(rows) if recipe.is_contrastive else 1
        examples_per_step = TEXTS_A_STEP if recipe.is_contrastive else rows
    if recipe.solves_head or "validation" not in examples:
        values = replace(values, early_stopping_patience=0)
    learning_rate = options.learning_rate or default_learning_rate(
        mode, hidden_size=text_model.model.config.hidden_size, structure=text_model.structure
    )
    if recipe.is_contrastive and options.learning_rate is None:
        learning_rate *= LEARNING_RATE_FACTOR
    if shapes.max_shapes is not None and not mode.trains_encoder:
        # A head over stored features has a shape of its own: one vector a text.
        shapes = replace(shapes, max_shapes=shapes.max_shapes - 1)
    # Of all splits, so that evaluation brings no new shapes.
    lengths = np.concatenate([split.lengths for split in examples.values()])
    return TrainingPlan(
        examples=examples["train"],
        padded_lengths=text_model.padded_lengths(lengths, shapes),
        pads_batches=shapes.pads_batches,
        is_padded_right=text_model.tokenizer.padding_side == "right",
        effective_batch_size=examples_per_step,
        recipe=recipe,
        values=values,
        hyperparameters=Hyperparameters(
            schedule=Schedule(
                peak=learning_rate,
                warmup_steps=math.ceil(options.warmup_fraction * total_steps),
                total_steps=total_steps,
            ),
            head_lr_multiplier=values.head_lr_multiplier,
            weight_decay=values.weight_decay,
            max_grad_norm=options.max_grad_norm,
        ),
        seed=options.seed,
    )
