"""Makes the plan of a run from options, defaults and measurements, and estimates its time."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from finetune import distributed
from finetune.batch_finder.results import Case, Result, architecture_of
from finetune.batch_finder.search import find
from finetune.batch_finder.trials import TrialServer
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.devices.base import BatchSize
from finetune.errors import BatchDoesNotFitError
from finetune.events import Info, clock, emit, stage
from finetune.model.structure import enable_gradient_checkpointing, set_training
from finetune.model.tensor_store import cache_folder
from finetune.runs.features import split_text_model, stores_features
from finetune.runs.prepare import RunInputs, find_unread
from finetune.tasks.metrics import choose_metric
from finetune.tokenization.examples import Batch
from finetune.training.micro_batches import move_batches
from finetune.training.plan import TEXTS_PER_STEP, Plan, count_steps
from finetune.training.precision import choose_precision
from finetune.training.trainer import Trainer

DEFAULT_SAVE_STEPS = 500
# Measured speeds are off by a few percent, so smaller speedups are ignored.
FASTER = 1.05
# The first step is not timed, because it has the most tokens and warms up the device.
TIMED_STEPS = 3
# Rows of the timed batch if the run takes no steps.
TIMED_ROWS = 256


def make_plan(inputs: RunInputs, measured: Plan | None = None) -> Plan:
    """Make the plan of a run, with a complete configuration.

    Each option that the run reads and that is None or ``auto`` gets its value here, once, before
    the trainer is built. Precision and batch sizes are measured, with reasons in ``choices``, or
    are taken from ``measured``, the plan of an earlier run of the same call.

    The run writes this configuration to config.yaml, which is a contract: a run that reads it, to
    resume or repeat this run from any folder, resolves and measures nothing, and has the same
    bits on the same machine. So paths are absolute, and data and model have their commits.
    ``device`` and ``check_device`` stay, because the machine may be another one. The columns and
    splits are found in the data again.
    """
    plan, device = _plan_steps(inputs, _resolve_defaults(inputs, measured)), inputs.device
    if measured:
        plan = replace(plan, choices=measured.choices)
    if plan.precision == "auto":
        cache = cache_folder(inputs.config.cache, "precision")
        size = inputs.text_model.model.config.hidden_size
        with stage("precision"):
            choice = distributed.broadcast(
                lambda: choose_precision(device, hidden_size=size, cache=cache)
            )
            because = f"because {choice.note}; --precision overrides it"
            emit(Info(f"precision: {choice.value}, {because}"))
        config = change_options(plan.config, {"precision": choice.value})
        plan = replace(plan, config=config, choices=[*plan.choices, choice])
    if plan.batch_size == "auto":
        plan = replace(plan, config=_search_batch_sizes(inputs, plan))
    if plan.gradient_checkpointing:
        enable_gradient_checkpointing(inputs.text_model.model, device)
    return plan


def _resolve_defaults(inputs: RunInputs, measured: Plan | None) -> Config:
    """Return a configuration that is complete up to measurements."""
    config, method, mode = inputs.config, inputs.method, inputs.mode
    training, text_model, unread = config.training, inputs.text_model, find_unread(inputs)
    rows = len(inputs.examples["train"].labels)
    defaults = mode.defaults(steps_per_epoch=math.ceil(rows / training.examples_per_step)) | {
        "effective_batch_size": training.examples_per_step,
        "learning_rate": mode.learning_rate(
            hidden_size=text_model.model.config.hidden_size, structure=text_model.structure
        ),
        "gradient_checkpointing": None if training.batch_size == "auto" else False,
        "metric_for_best_model": choose_metric(None, inputs.task.problem_type).name,
        "save_strategy": config.output.saves,
        "save_steps": DEFAULT_SAVE_STEPS,
    }
    if "early_stopping_patience" in unread:
        defaults["early_stopping_patience"] = 0
    # The trainer reads these with any method.
    read = defaults.keys() - unread | {
        "head_lr_multiplier", "weight_decay", "early_stopping_patience"
    }  # fmt: skip
    values = {name: defaults[name] for name in read if OPTIONS[name].value_in(config) is None}
    if method.is_contrastive and "batch_size" not in inputs.sources:
        # Texts are only contrasted with texts in the same micro-batch.
        values["batch_size"] = TEXTS_PER_STEP
    if measured:
        names = ("batch_size", "eval_batch_size", "gradient_checkpointing", "precision")
        values |= {name: getattr(measured, name) for name in names}
    values |= {
        "revision": text_model.source.commit,
        "pooling": text_model.pooling,
        "lora_alpha": config.model.lora and config.model.lora.alpha,
        "contrastive": "on" if method.is_contrastive else "off",
        "fit_head": "on" if method.fits_head else "off",
        "output_dir": None,
        "overwrite": False,
    }
    return change_options(config, _pin_sources(inputs) | values)


def _pin_sources(inputs: RunInputs) -> dict[str, str]:
    """Return file options as absolute paths, and the data with its commit."""
    values = {}
    for name, option in OPTIONS.items():
        source = option.value_in(inputs.config)
        if option.path and source not in (None, *option.names):
            # Values other than files and folders, such as a Hub ID, don't change.
            path = Path(source).expanduser()
            values[name] = str(path.resolve()) if path.exists() else source
    data = inputs.config.data.data
    commit = next((source.commit for source in inputs.data.sources if source.commit), None)
    if commit and data not in OPTIONS["data"].names:
        values["data"] = f"{data.partition('@')[0]}@{commit}"
    return values


def _plan_steps(inputs: RunInputs, config: Config) -> Plan:
    """Derive the numbers of a plan from a configuration."""
    training, method, device = config.training, inputs.method, inputs.device
    text_model, examples, shapes = inputs.text_model, inputs.examples, device.shapes
    rows = len(examples["train"].labels)
    if method.fits_head:
        steps_per_epoch = total_steps = count_steps(rows) if method.is_contrastive else 1
        examples_per_step = TEXTS_PER_STEP if method.is_contrastive else rows
    else:
        examples_per_step = training.examples_per_step
        steps_per_epoch = math.ceil(rows / examples_per_step)
        epochs = training.num_train_epochs or 0
        total_steps = training.max_steps or math.ceil(epochs * steps_per_epoch)
    if shapes.max_shapes is not None and not inputs.mode.trains_encoder:
        # A head on stored features reads one vector per text, so it needs only one shape.
        shapes = replace(shapes, max_shapes=shapes.max_shapes - 1)
    # Include all splits, so that evaluation needs no new shapes.
    lengths = np.concatenate([split.lengths for split in examples.values()])
    is_checked = training.check_device
    if is_checked is None:
        is_checked = device.has_silent_faults
    return Plan(
        config,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        examples_per_step=examples_per_step,
        method=method,
        padded_lengths=text_model.padded_lengths(lengths, shapes),
        pads_batches=shapes.pads_batches,
        is_padded_right=text_model.tokenizer.padding_side == "right",
        checks_device=is_checked and not device.is_reference and distributed.is_main(),
    )


def make_batch_sizes(inputs: RunInputs, plan: Plan) -> tuple[BatchSize, BatchSize]:
    """Return the batch sizes for training and evaluation.

    They are equal on devices that limit the number of batch shapes.
    """
    device, examples = inputs.device, int(plan.batch_size)
    if distributed.world_size() > 1:
        # If batches are padded with examples, a larger batch would only repeat more examples.
        examples = min(examples, _rows_per_step(inputs, plan))
    batch_size = eval_batch_size = BatchSize(examples, "batch size", device)
    if not device.shapes.counts_evaluation:
        eval_batch_size = BatchSize(plan.eval_batch_size, "evaluation batch size", device)
    for size in (batch_size, eval_batch_size):
        size.clamp(padded_length=plan.padded_lengths[-1])
    return batch_size, eval_batch_size


def _rows_per_step(inputs: RunInputs, plan: Plan) -> int:
    """Return the mean number of texts or windows per step and rank."""
    examples = inputs.examples["train"]
    windows_per_text = len(examples.lengths) / len(examples.labels)
    windows_per_step = math.ceil(windows_per_text * plan.examples_per_step)
    return math.ceil(windows_per_step / distributed.world_size())


def _search_batch_sizes(inputs: RunInputs, plan: Plan) -> Config:
    """Replace the ``auto`` batch size in the configuration by the result of a search.

    Each search starts with the largest size worth trying, so one trial is usually enough. Each rank
    searches on its own device, and all ranks use the smallest result.
    """
    config, device, text_model = plan.config, inputs.device, inputs.text_model
    cache = cache_folder(config.cache, "batches")
    rows_per_step = _rows_per_step(inputs, plan)

    def search(case: Case, size: int = rows_per_step) -> Result:
        with distributed.alone():
            return find(case, device, config.search, server, limit=size, first=size, cache=cache)

    with stage("batch size"), TrialServer() as server:
        emit(Info("searching for the batch size"))
        case = Case(
            device.name,
            architecture_of(text_model.model.config.to_dict()),
            classes=len(text_model.task.output_names),
            mode=inputs.mode,
            padded_length=plan.padded_lengths[-1],
            precision=plan.precision,
            gradient_checkpointing=bool(plan.gradient_checkpointing),
            task=text_model.task.name,
            has_mean_layer=bool(text_model.structure.mean_layer),
            lora=config.model.lora,
        )
        evaluation, is_one_size = None, device.shapes.counts_evaluation
        if stores_features(config.cache, case.mode) and split_text_model(text_model, device):
            largest = rows_per_step if is_one_size else plan.eval_batch_size
            evaluation = search(replace(case, part="features"), largest).recommended
            case = replace(case, part="trainable")
        may_choose = case.mode.trains_encoder and text_model.model.supports_gradient_checkpointing
        if plan.gradient_checkpointing is None and may_choose:
            training, checkpointing = _search_both_ways(case, search, rows_per_step)
        else:
            training, checkpointing = search(case).recommended, case.gradient_checkpointing
        all_sizes = distributed.gather((training, evaluation or training, checkpointing))
        training, evaluation = (min(sizes[i] for sizes in all_sizes) for i in (0, 1))
        if is_one_size:
            training = evaluation = min(training, evaluation)
        # On ranks that don't need it, checkpointing only saves memory.
        checkpointing = any(sizes[2] for sizes in all_sizes)
        emit(Info(f"batch size: {training} in training, {evaluation} in evaluation"))
    sizes = {"batch_size": training, "eval_batch_size": evaluation}
    return change_options(config, sizes | {"gradient_checkpointing": checkpointing})


def _search_both_ways(
    case: Case, search: Callable[[Case], Result], rows_per_step: int
) -> tuple[int, bool]:
    """Search for the batch size of a step, with gradient checkpointing if that is faster.

    If memory is short, checkpointing can be faster, because micro-batches are larger and fewer.
    """
    size, speed = 0, 0.0
    with suppress(BatchDoesNotFitError):
        plain = search(case)
        size, speed = plain.recommended, plain.examples_per_second
        if size >= rows_per_step or not plain.is_short_of_memory:
            return size, False
    emit(Info("searching again, with gradient checkpointing"))
    other = search(replace(case, gradient_checkpointing=True))
    is_on = size == 0 or other.examples_per_second >= FASTER * speed
    emit(Info(f"gradient checkpointing: {'on' if is_on else 'off'}"))
    return other.recommended if is_on else size, is_on


def estimate_seconds(inputs: RunInputs, plan: Plan) -> float:
    """Estimate the seconds of the whole command, including the time so far.

    Time a few predictions and steps, which change the model. Time is proportional to tokens.
    """
    spent_seconds = sum(clock.seconds().values())
    text_model, examples = inputs.text_model, inputs.examples["train"]
    batch_size, eval_batch_size = make_batch_sizes(inputs, plan)
    trainer = Trainer(
        text_model.model,
        plan,
        task=inputs.task,
        device=inputs.device,
        head=text_model.structure.head,
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
    )

    def tokens(batch: Batch) -> int:
        whole = [(len(examples.sequences_of(batch.indices)), batch.padded_length)]
        return sum(rows * length for rows, length in batch.parts or whole)

    batches = sorted(plan.batches(examples, epoch=0), key=tokens)
    timed = [batches[int(at)] for at in np.linspace(0, len(batches) - 1, TIMED_STEPS + 2)[1:-1]]
    timed_rows = np.concatenate([batch.indices for batch in timed])
    step_seconds = 0.0
    if plan.method.takes_steps:
        set_training(trainer.model)
        seconds = []
        for number, (_, cut) in enumerate(
            move_batches(examples, [batches[-1], *timed], device=trainer.device)
        ):
            step = partial(trainer.step, number, cut)
            if trainer.captured:
                step()  # captures the CUDA graph
            seconds.append(trainer.device.time_calls(step, calls=1))
        step_seconds = sum(seconds[1:]) / sum(map(tokens, timed))
    else:
        timed_rows = timed_rows[:: 1 + len(timed_rows) // TIMED_ROWS]
    rows = examples.subset(examples.sequences_of(timed_rows))
    forward_seconds = trainer.device.time_calls(
        lambda: trainer.predictor.logits(rows, padded_lengths=plan.padded_lengths), calls=1
    ) / int(rows.lengths.sum())
    frozen_seconds = _frozen_share(inputs) * forward_seconds
    split_tokens = {name: int(split.lengths.sum()) for name, split in inputs.examples.items()}
    step_tokens = sum(map(tokens, batches)) / len(batches) * plan.total_steps
    # One evaluation after each epoch, and one of the final model.
    validations = plan.total_steps / plan.steps_per_epoch + 1
    predicted_tokens = split_tokens.get("validation", 0) * validations + split_tokens.get("test", 0)
    return (
        spent_seconds
        + sum(split_tokens.values()) * frozen_seconds
        + step_tokens * max(0.0, step_seconds - frozen_seconds)
        + predicted_tokens * max(0.0, forward_seconds - frozen_seconds)
    )


def _frozen_share(inputs: RunInputs) -> float:
    """Return the fraction of encoder layers that run only once per text."""
    layers = inputs.text_model.structure.layers
    if not layers or not stores_features(inputs.config.cache, inputs.mode):
        return 0.0
    parameters = dict(inputs.text_model.model.named_parameters())
    frozen = [all(not parameters[name].requires_grad for name in layer) for layer in layers]
    return sum(frozen) / len(layers)
