"""The batch sizes of a run; a search replaces ``auto``."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from finetune import distributed
from finetune.batch_finder.results import Case, Result, architecture_of
from finetune.batch_finder.search import find
from finetune.config.schema import AutoTunedOption
from finetune.devices.base import BatchSize
from finetune.devices.host import gibibytes
from finetune.errors import BatchDoesNotFitError
from finetune.events import Info, emit, stage
from finetune.model.tensor_store import cache_folder
from finetune.runs.features import split_text_model, stores_features
from finetune.runs.prepare import RunInputs
from finetune.training.plan import Plan

# Measured speeds are off by a few percent. A larger difference than this counts.
FASTER = 1.05


def make_batch_sizes(inputs: RunInputs, plan: Plan) -> tuple[BatchSize, BatchSize]:
    """Return the batch sizes of training and evaluation.

    They are equal on devices that limit the number of batch shapes.
    """
    device, examples, ranks = inputs.device, int(plan.batch_size), distributed.world_size()
    if ranks > 1:
        # If batches are padded with examples, a larger batch would only repeat more of them.
        examples = min(examples, math.ceil(_rows_per_step(inputs, plan) / ranks))
    batch_size = eval_batch_size = BatchSize(examples, "batch size", device)
    if not device.shapes.counts_evaluation:
        eval_batch_size = BatchSize(plan.eval_batch_size, "evaluation batch size", device)
    for size in (batch_size, eval_batch_size):
        size.clamp(padded_length=plan.padded_lengths[-1])
    return batch_size, eval_batch_size


def _rows_per_step(inputs: RunInputs, plan: Plan) -> int:
    """Return the mean number of texts or windows per step."""
    examples = inputs.examples["train"]
    windows_per_text = len(examples.lengths) / len(examples.labels)
    return math.ceil(windows_per_text * plan.effective_batch_size)


def search_batch_sizes(inputs: RunInputs, plan: Plan) -> Plan:
    """Return a plan in which a search replaced the ``auto`` batch size.

    Each search starts with the largest size worth trying, so one trial is usually enough. Each rank
    searches on its own device, and all ranks use the smallest result.
    """
    config, device, text_model = inputs.config, inputs.device, inputs.text_model
    options = config.training
    choices: list[AutoTunedOption] = []
    cache = cache_folder(config.cache, "batches")
    rows_per_step = math.ceil(_rows_per_step(inputs, plan) / distributed.world_size())

    def search(case: Case, largest: int = rows_per_step) -> Result:
        with distributed.alone():
            result = find(case, device, config.search, limit=largest, first=largest, cache=cache)
        subject = "evaluation batch size" if case.part == "features" else "batch size"
        subject += ", with gradient checkpointing" * case.gradient_checkpointing
        trials = {str(trial.batch_size): trial.examples_per_second for trial in result.trials}
        speeds = {size: speed for size, speed in trials.items() if speed}
        note = ""
        if result.first_failed is not None:
            budget = gibibytes(result.budget_bytes or 0)
            note = f"a batch of {result.first_failed} does not fit into {budget}"
        size = str(result.recommended)
        choices.append(AutoTunedOption(subject, size, "examples/s", speeds, note))
        return result

    with stage("batch size"):
        emit(Info("searching for the batch size"))
        case = Case(
            device.name,
            architecture_of(text_model.model.config.to_dict()),
            classes=len(text_model.task.output_names),
            mode=inputs.mode,
            padded_length=plan.padded_lengths[-1],
            precision=plan.precision,
            gradient_checkpointing=plan.gradient_checkpointing,
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
        if options.gradient_checkpointing is None and may_choose:
            training, checkpointing = _search_both_ways(case, search, rows_per_step)
        else:
            training, checkpointing = search(case).recommended, case.gradient_checkpointing
        all_sizes = distributed.gather((training, evaluation or training, checkpointing))
        training, evaluation = (min(sizes[i] for sizes in all_sizes) for i in (0, 1))
        if is_one_size:
            training = evaluation = min(training, evaluation)
        # On ranks that did not need it, checkpointing only saves memory.
        checkpointing = any(sizes[2] for sizes in all_sizes)
        emit(Info(f"batch size: {training} in training, {evaluation} in evaluation"))
    return replace(
        plan,
        batch_size=training,
        eval_batch_size=evaluation,
        gradient_checkpointing=checkpointing,
        choices=[*plan.choices, *choices],
    )


def _search_both_ways(
    case: Case, search: Callable[[Case], Result], rows_per_step: int
) -> tuple[int, bool]:
    """Search for the batch size of a step, with gradient checkpointing if that is faster.

    If memory is short, checkpointing can be faster, because micro-batches are fewer and larger.
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
