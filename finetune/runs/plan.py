"""Plans a run: every number of its training, from options, defaults and measurements."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune import distributed
from finetune.config.schema import (
    OPTIONS,
    AutoTunedOption,
    Config,
    change_options,
    default_learning_rate,
    mode_defaults,
)
from finetune.data.load import KNOWN_BY_NAME
from finetune.events import Info, emit, stage
from finetune.model.source import MINILM
from finetune.model.structure import enable_gradient_checkpointing
from finetune.model.tensor_store import cache_folder
from finetune.runs.batch_sizes import search_batch_sizes
from finetune.runs.prepare import RunInputs
from finetune.training.plan import TEXTS_PER_STEP, Plan, count_steps
from finetune.training.precision import choose_precision

DEFAULT_SAVE_STEPS = 500


def make_plan(inputs: RunInputs, measured: Plan | None = None) -> Plan:
    """Return every number of a run, and measure precision and batch sizes that are ``auto``.

    ``measured`` is the plan of an earlier run of the same call, whose measurements are reused.
    """
    plan = _plan_steps(inputs)
    if measured:
        names = ("batch_size", "eval_batch_size", "gradient_checkpointing", "precision", "choices")
        plan = replace(plan, **{name: getattr(measured, name) for name in names})
    if plan.precision == "auto":
        with stage("precision"):
            choice = _choose_precision(inputs)
        plan = replace(plan, precision=choice.value, choices=[*plan.choices, choice])
    if plan.batch_size == "auto":
        plan = search_batch_sizes(inputs, plan)
    if plan.gradient_checkpointing:
        enable_gradient_checkpointing(inputs.text_model.model, inputs.device)
    return plan


def _choose_precision(inputs: RunInputs) -> AutoTunedOption:
    hidden_size = inputs.text_model.model.config.hidden_size
    cache = cache_folder(inputs.config.cache, "precision")
    choice = distributed.broadcast(
        lambda: choose_precision(inputs.device, hidden_size=hidden_size, cache=cache)
    )
    emit(Info(f"precision: {choice.value}, because {choice.note}; --precision overrides it"))
    return choice


def _plan_steps(inputs: RunInputs) -> Plan:
    """Return a plan with defaults that depend on model, mode and device, before measurements."""
    options, output, method = inputs.config.training, inputs.config.output, inputs.method
    text_model, examples, device = inputs.text_model, inputs.examples, inputs.device
    mode, shapes = inputs.mode, device.shapes
    rows, examples_per_step = len(examples["train"].labels), options.examples_per_step
    steps_per_epoch = math.ceil(rows / examples_per_step)
    values = mode_defaults(mode, steps_per_epoch=steps_per_epoch)
    chosen = {name: getattr(options, name) for name in values}
    values |= {name: value for name, value in chosen.items() if value is not None}
    total_steps = options.max_steps or math.ceil(values["num_train_epochs"] * steps_per_epoch)
    if method.fits_head:
        total_steps = count_steps(rows) if method.is_contrastive else 1
        examples_per_step = TEXTS_PER_STEP if method.is_contrastive else rows
        steps_per_epoch = total_steps
    patience = values["early_stopping_patience"]
    if method.fits_head or "validation" not in examples:
        patience = 0
    learning_rate = options.learning_rate or default_learning_rate(
        mode, hidden_size=text_model.model.config.hidden_size, structure=text_model.structure
    )
    batch_size = options.batch_size
    if method.is_contrastive and "batch_size" not in inputs.sources:
        # Each text is only contrasted with the texts of its micro-batch.
        batch_size = TEXTS_PER_STEP
    if shapes.max_shapes is not None and not mode.trains_encoder:
        # A head on stored features reads one vector per text, so it needs only one shape.
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
        head_lr_multiplier=values["head_lr_multiplier"],
        weight_decay=values["weight_decay"],
        max_grad_norm=options.max_grad_norm,
        precision=options.precision,
        method=method,
        seed=options.seed,
        batch_size=batch_size,
        eval_batch_size=options.eval_batch_size,
        gradient_checkpointing=bool(options.gradient_checkpointing),
        padded_lengths=text_model.padded_lengths(lengths, shapes),
        pads_batches=shapes.pads_batches,
        is_padded_right=text_model.tokenizer.padding_side == "right",
        effective_batch_size=examples_per_step,
        steps_per_epoch=steps_per_epoch,
        num_train_epochs=values["num_train_epochs"],
        logging_steps=output.logging_steps,
        patience=patience,
        saves=output.saves,
        save_steps=output.save_steps or DEFAULT_SAVE_STEPS,
        metric_for_best_model=options.metric_for_best_model,
        checks_device=is_checked and not device.is_reference and distributed.is_main(),
    )


def resolve_config(inputs: RunInputs, plan: Plan) -> Config:
    """Return all options, to repeat the same run from any folder.

    They have the numbers of the plan, absolute paths, and the commits of data and model.
    """
    config, method = inputs.config, plan.method
    data, model = config.data.data, config.model.model
    if data not in KNOWN_BY_NAME:
        commit = next((source.commit for source in inputs.data.sources if source.commit), None)
        data = f"{data.partition('@')[0]}@{commit}" if commit else _absolute(data)
    paths = {name: option.value_in(config) for name, option in OPTIONS.items() if option.is_path}
    names = ["batch_size", "eval_batch_size", "gradient_checkpointing", "precision"]
    pinned: dict[str, Any] = {
        name: path if path in (None, *OPTIONS[name].names) else _absolute(path)
        for name, path in paths.items()
    }
    if method.takes_steps:
        pinned["learning_rate"] = plan.peak
    if not method.fits_head:
        names += ["num_train_epochs", "head_lr_multiplier", "weight_decay", "effective_batch_size"]
        pinned["early_stopping_patience"] = plan.patience
    pinned |= {name: getattr(plan, name) for name in names}
    pinned |= {
        "data": data,
        "model": model if model == MINILM else _absolute(model),
        "revision": inputs.text_model.source.commit,
        "pooling": inputs.text_model.pooling,
        "lora_alpha": config.model.lora and config.model.lora.alpha,
        "contrastive": "on" if method.is_contrastive else "off",
        "fit_head": "on" if method.fits_head else "off",
        "output_dir": None,
        "overwrite": False,
    }
    return change_options(config, pinned)


def _absolute(source: str) -> str:
    """Return the absolute path of a file or folder; other values, such as a Hub ID, unchanged."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source
