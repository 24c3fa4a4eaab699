"""Plans a run: the training method with its reason, the steps and the learning rate."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from finetune import distributed
from finetune.config.schema import OPTIONS, Config, default_learning_rate, mode_defaults
from finetune.devices.base import Device
from finetune.errors import ConfigurationError
from finetune.model.load import TextModel
from finetune.tasks.base import Task
from finetune.tokenization.examples import Examples
from finetune.training.contrastive import LEARNING_RATE_FACTOR, TEXTS_PER_STEP, count_steps
from finetune.training.plan import Plan, TrainingMethod

DEFAULT_SAVE_STEPS = 500
# With more, plain fine-tuning is as good and takes less time (docs/measurements.md).
MAX_ROWS_PER_CLASS = 100


def choose_method(config: Config, task: Task, *, rows: int) -> TrainingMethod:
    """Return the training method for a configuration and its rows.

    Raises:
        ConfigurationError: If a requested method can't be used.
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
        rows_per_class = rows / max(len(task.class_names), 1)
        is_due = rows_per_class <= MAX_ROWS_PER_CLASS and training.fit_head != "off"
        reason = (
            f"{rows_per_class:.0f} rows per class are few: contrastive steps, then a linear head"
        )
    else:
        option, choice, is_due = "fit-head", training.fit_head, True
        reason = "a linear head is fitted on the features of the frozen encoder"
    if choice == "on" or (option == "contrastive" and training.fit_head == "on"):
        if obstacle:
            raise ConfigurationError(
                f"--{option} on can't be used: {obstacle}", remedy=f"use --{option} auto"
            )
    elif choice == "off" or obstacle or not is_due:
        return TrainingMethod()
    elif names := [
        each.flag for each in OPTIONS.values() if each.selects_steps and each.value_in(config)
    ]:
        return TrainingMethod(reason=f"plain gradient descent, because {names[0]} is set")
    return TrainingMethod(True, is_contrastive=option == "contrastive", reason=reason)


def _find_obstacle(config: Config) -> str | None:
    """Return why no linear head can be fitted."""
    if distributed.world_size() > 1:
        return f"there are {distributed.world_size()} processes"
    if config.training.loss == "focal":
        return "the loss is focal, which has no single optimum"
    return None


def plan_training(
    config: Config,
    examples: Mapping[str, Examples],
    text_model: TextModel,
    device: Device,
    method: TrainingMethod,
) -> Plan:
    """Plan the steps of a run, with defaults that depend on model, mode and device."""
    options, output, mode, shapes = config.training, config.output, config.model.mode, device.shapes
    rows, examples_per_step = len(examples["train"].labels), options.examples_per_step
    steps_per_epoch = math.ceil(rows / examples_per_step)
    values = mode_defaults(mode, steps_per_epoch=steps_per_epoch)
    changes = {name: getattr(options, name) for name in vars(values)}
    values = replace(
        values, **{name: value for name, value in changes.items() if value is not None}
    )
    total_steps = options.max_steps or math.ceil(values.num_train_epochs * steps_per_epoch)
    if method.fits_head:
        total_steps = count_steps(rows) if method.is_contrastive else 1
        examples_per_step = TEXTS_PER_STEP if method.is_contrastive else rows
        steps_per_epoch = total_steps
    patience = values.early_stopping_patience
    if method.fits_head or "validation" not in examples:
        patience = 0
    learning_rate = options.learning_rate or default_learning_rate(
        mode, hidden_size=text_model.model.config.hidden_size, structure=text_model.structure
    )
    if method.is_contrastive and options.learning_rate is None:
        learning_rate *= LEARNING_RATE_FACTOR
    if shapes.max_shapes is not None and not mode.trains_encoder:
        # A head over stored features has a shape of its own: one vector per text.
        shapes = replace(shapes, max_shapes=shapes.max_shapes - 1)
    # All splits count, so that evaluation needs no new shapes.
    lengths = np.concatenate([split.lengths for split in examples.values()])
    is_checked = options.check_device
    if is_checked is None:
        is_checked = device.has_silent_faults
    return Plan(
        peak=learning_rate,
        total_steps=total_steps,
        warmup_steps=math.ceil(options.warmup_fraction * total_steps),
        head_lr_multiplier=values.head_lr_multiplier,
        weight_decay=values.weight_decay,
        max_grad_norm=options.max_grad_norm,
        precision=options.precision,
        method=method,
        seed=options.seed,
        padded_lengths=text_model.padded_lengths(lengths, shapes),
        pads_batches=shapes.pads_batches,
        is_padded_right=text_model.tokenizer.padding_side == "right",
        effective_batch_size=examples_per_step,
        steps_per_epoch=steps_per_epoch,
        num_train_epochs=values.num_train_epochs,
        logging_steps=output.logging_steps,
        patience=patience,
        saves=output.saves,
        save_steps=output.save_steps or DEFAULT_SAVE_STEPS,
        metric_for_best_model=options.metric_for_best_model,
        checks_device=is_checked and not device.is_reference and distributed.is_main(),
    )
