"""The batch sizes of a run, searched for where they are ``auto``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.find import Search, find
from finetune.batch_finder.search import SearchResult
from finetune.config.schema import precision_without_timing
from finetune.devices.batch_size import BatchSize
from finetune.errors import BatchDoesNotFit
from finetune.events import Emit, Info, stage
from finetune.model.gradient_checkpointing import enable_gradient_checkpointing
from finetune.runs.cache import cache_folder
from finetune.runs.details import AutoTunedOption
from finetune.runs.features import make_feature_extractor, stores_features
from finetune.runs.preparation import Preparation

# Speeds of trials have an error of a few per cent: this much faster is faster.
FASTER = 1.05


@dataclass(frozen=True)
class FoundSizes:
    """The batch sizes of training, and of evaluation and feature extraction: both were tried.

    They are the same where the shapes of evaluation count.

    Args:
        gradient_checkpointing: Whether training takes it, at its batch size.
        choices: What was measured in each search.
    """

    training: int
    evaluation: int
    gradient_checkpointing: bool
    choices: Sequence[AutoTunedOption] = field(default=(), compare=False)


def with_batch_sizes(preparation: Preparation, *, emit: Emit) -> Preparation:
    """Return a preparation with batch sizes that were searched for, in place of ``auto``."""
    config = preparation.config
    if config.training.batch_size != "auto":
        return preparation
    with stage("batch size", emit):
        found = find_sizes(preparation, emit=emit)
    if found.gradient_checkpointing:
        enable_gradient_checkpointing(preparation.text_model.model, preparation.device)
    training = replace(
        config.training,
        batch_size=found.training,
        effective_batch_size=preparation.plan.effective_batch_size,
        eval_batch_size=found.evaluation,
        gradient_checkpointing=found.gradient_checkpointing,
    )
    preparation = replace(preparation, config=replace(config, training=training))
    return preparation.with_choices(*found.choices)


def make_batch_sizes(preparation: Preparation, *, emit: Emit) -> tuple[BatchSize, BatchSize]:
    """Return the batch sizes of training and evaluation, one where both count as shapes."""
    options, device, plan = preparation.config.training, preparation.device, preparation.plan
    assert isinstance(options.batch_size, int), "auto has been replaced by what was found"
    examples, count = options.batch_size, preparation.processes.count
    if count > 1:
        # Where batches are filled up, all beyond a process's share of a step would be filling.
        examples = min(examples, math.ceil(plan.rows_per_step / count))
    batch_size = BatchSize(examples, "batch size", device, emit)
    batch_size.clamp(padded_length=plan.padded_lengths[-1])
    if device.shapes.counts_evaluation:
        return batch_size, batch_size
    eval_batch_size = BatchSize(options.eval_batch_size, "evaluation batch size", device, emit)
    eval_batch_size.clamp(padded_length=plan.padded_lengths[-1])
    return batch_size, eval_batch_size


def find_sizes(preparation: Preparation, *, emit: Emit) -> FoundSizes:
    """Search for the batch sizes of a run.

    Each search begins with the largest size worth trying, that of a step or of an evaluation, so
    that mostly one trial is enough. It raises what ``find`` does. Of several processes each tries
    its own device, and the least is taken.
    """
    config, text_model = preparation.config, preparation.text_model
    case = _case_of(preparation)

    def search(case: Case, *, most: int) -> SearchResult:
        cache = cache_folder(config.cache, "batches")
        found = find(case, Search(preparation.device, config.search, most, most, cache, emit))
        choices.append(_describe(found, case))
        return found

    choices: list[AutoTunedOption] = []
    rows_per_step = math.ceil(preparation.plan.rows_per_step / preparation.processes.count)
    emit(Info("searching for the batch size"))
    evaluation = None
    is_one_size = preparation.device.shapes.counts_evaluation
    if stores_features(config.cache, case.mode) and make_feature_extractor(text_model) is not None:
        most = rows_per_step if is_one_size else config.training.eval_batch_size
        evaluation = search(replace(case, part="features"), most=most).recommended
        case = replace(case, part="trainable")
    may_choose = case.mode.trains_encoder and text_model.model.supports_gradient_checkpointing
    search_update = partial(search, most=rows_per_step)
    if config.training.gradient_checkpointing is None and may_choose:
        case, found = _choose_checkpointing(
            case, search_update, rows_per_step=rows_per_step, emit=emit
        )
    else:
        found = search_update(case)
    training = found.recommended
    evaluation = evaluation or training
    if is_one_size:
        training = evaluation = min(training, evaluation)
    own = FoundSizes(training, evaluation, case.gradient_checkpointing, choices)
    sizes = _least(preparation.processes.gather(own))
    emit(Info(f"batch size: {sizes.training}, and {sizes.evaluation} without gradients"))
    return sizes


def _case_of(preparation: Preparation) -> Case:
    options, text_model = preparation.config.training, preparation.text_model
    return Case(
        preparation.device.name,
        architecture_of(text_model.model.config.to_dict()),
        classes=len(text_model.task.output_names),
        mode=preparation.mode,
        padded_length=preparation.plan.padded_lengths[-1],
        precision=precision_without_timing(options),
        optimizer=options.optimizer,
        gradient_checkpointing=bool(options.gradient_checkpointing),
        task=text_model.task.name,
    )


def _choose_checkpointing(
    case: Case, search: Callable[[Case], SearchResult], *, rows_per_step: int, emit: Emit
) -> tuple[Case, SearchResult]:
    """Search for the batch size of a step, with gradient checkpointing if that is faster.

    It is tried where memory allows only pieces of an effective batch. A step of fewer and larger
    pieces may be faster although each layer is computed twice, above all on a GPU.
    """
    with_checkpointing = replace(case, gradient_checkpointing=True)
    try:
        plain = search(case)
    except BatchDoesNotFit:
        found = search(with_checkpointing)
        emit(Info("gradient checkpointing: on, without it not even one example fits in memory"))
        return with_checkpointing, found
    pieces = math.ceil(rows_per_step / plain.recommended)
    if pieces == 1 or not plain.is_short_of_memory:
        return case, plain
    emit(Info("searching again, with gradient checkpointing"))
    found = search(with_checkpointing)
    speedup = found.examples_per_second / plain.examples_per_second
    has_fewer_pieces = math.ceil(rows_per_step / found.recommended) < pieces
    is_on = has_fewer_pieces and speedup >= FASTER
    emit(
        Info(
            f"gradient checkpointing: {'on' if is_on else 'off'}, with it the batch size is "
            f"{found.recommended} instead of {plain.recommended}, at {speedup:.2f} times the speed"
        )
    )
    return (with_checkpointing, found) if is_on else (case, plain)


def _describe(found: SearchResult, case: Case) -> AutoTunedOption:
    subject = "batch size" if case.part != "features" else "batch size without gradients"
    if case.gradient_checkpointing:
        subject = f"{subject}, with gradient checkpointing"
    speeds = {
        str(one.batch_size): one.examples_per_second
        for one in found.trials
        if one.examples_per_second
    }
    failed = found.first_failed
    note = f"{failed} does not fit into {found.budget_bytes / 2**30:.1f} GiB" if failed else ""
    return AutoTunedOption(subject, str(found.recommended), "examples/s", speeds, note)


def _least(found: Sequence[FoundSizes]) -> FoundSizes:
    """Return sizes that fit in each of the processes that have found these."""
    return replace(
        found[0],
        training=min(one.training for one in found),
        evaluation=min(one.evaluation for one in found),
        # It only makes memory less.
        gradient_checkpointing=any(one.gradient_checkpointing for one in found),
    )
