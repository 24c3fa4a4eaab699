"""The batch sizes of a run; a search replaces ``auto``."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from finetune import distributed
from finetune.batch_finder.find import Search, find
from finetune.batch_finder.results import Case, Result, architecture_of
from finetune.config.schema import change_options
from finetune.devices.batch_size import BatchSize
from finetune.devices.host import gibibytes
from finetune.errors import BatchDoesNotFitError
from finetune.events import Info, emit, stage
from finetune.model.freeze import enable_gradient_checkpointing
from finetune.model.tensor_store import cache_folder
from finetune.runs.features import split_text_model, stores_features
from finetune.runs.preparation import Preparation
from finetune.runs.results import AutoTunedOption

# Measured speeds are off by a few percent. A larger difference than this counts.
FASTER = 1.05


def make_batch_sizes(preparation: Preparation) -> tuple[BatchSize, BatchSize]:
    """Return the batch sizes of training and evaluation; they are equal if shapes are limited."""
    options, device, plan = preparation.config.training, preparation.device, preparation.plan
    assert isinstance(options.batch_size, int), "auto has been replaced"
    examples, ranks = options.batch_size, distributed.world_size()
    if ranks > 1:
        # If batches are padded with examples, a larger size would only add repeated ones.
        examples = min(examples, math.ceil(_rows_per_step(preparation) / ranks))
    batch_size = eval_batch_size = BatchSize(examples, "batch size", device)
    if not device.shapes.counts_evaluation:
        eval_batch_size = BatchSize(options.eval_batch_size, "evaluation batch size", device)
    for size in (batch_size, eval_batch_size):
        size.clamp(padded_length=plan.padded_lengths[-1])
    return batch_size, eval_batch_size


def _rows_per_step(preparation: Preparation) -> int:
    """Return the mean number of texts or windows per step."""
    examples = preparation.examples["train"]
    windows_per_text = len(examples.lengths) / len(examples.labels)
    return math.ceil(windows_per_text * preparation.plan.effective_batch_size)


def with_batch_sizes(preparation: Preparation) -> Preparation:
    """Return a preparation in which a search replaced ``auto`` batch sizes.

    Each search starts with the largest size worth trying, so one trial is usually enough. Each rank
    searches on its own device, and all ranks use the smallest result.
    """
    config, device = preparation.config, preparation.device
    options, text_model = config.training, preparation.text_model
    if options.batch_size != "auto":
        return preparation
    choices: list[AutoTunedOption] = []
    cache = cache_folder(config.cache, "batches")
    rows_per_step = math.ceil(_rows_per_step(preparation) / distributed.world_size())

    def search(case: Case, largest: int = rows_per_step) -> Result:
        with distributed.alone():
            result = find(case, Search(device, config.search, largest, largest, cache))
        subject = "batch size without gradients" if case.part == "features" else "batch size"
        subject += ", with gradient checkpointing" * case.gradient_checkpointing
        trials = {str(trial.batch_size): trial.examples_per_second for trial in result.trials}
        speeds = {size: speed for size, speed in trials.items() if speed}
        note = f"{result.first_failed} does not fit into {gibibytes(result.budget_bytes or 0)}"
        note *= result.first_failed is not None
        size = str(result.recommended)
        choices.append(AutoTunedOption(subject, size, "examples/s", speeds, note))
        return result

    with stage("batch size"):
        emit(Info("searching for the batch size"))
        case = Case(
            device.name,
            architecture_of(text_model.model.config.to_dict()),
            classes=len(text_model.task.output_names),
            mode=preparation.mode,
            padded_length=preparation.plan.padded_lengths[-1],
            precision=options.precision_without_timing,
            gradient_checkpointing=bool(options.gradient_checkpointing),
            task=text_model.task.name,
            has_mean_layer=bool(text_model.structure.mean_layer),
            lora=config.model.lora,
        )
        evaluation, is_one_size = None, device.shapes.counts_evaluation
        if stores_features(config.cache, case.mode) and split_text_model(text_model, device):
            largest = rows_per_step if is_one_size else options.eval_batch_size
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
        # It only lowers the memory of those that did not need it.
        checkpointing = any(sizes[2] for sizes in all_sizes)
        emit(Info(f"batch size: {training}, and {evaluation} without gradients"))
    if checkpointing:
        enable_gradient_checkpointing(text_model.model, device)
    sizes = {
        "batch_size": training,
        "effective_batch_size": preparation.plan.effective_batch_size,
        "eval_batch_size": evaluation,
        "gradient_checkpointing": checkpointing,
    }
    return replace(preparation, config=change_options(config, sizes)).with_choices(*choices)


def _search_both_ways(
    case: Case, search: Callable[[Case], Result], rows_per_step: int
) -> tuple[int, bool]:
    """Search for the batch size of a step, with gradient checkpointing if that is faster.

    It can be faster if memory is short: micro-batches are fewer and larger.
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
