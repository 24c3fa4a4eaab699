"""A run, from its configuration to a folder with a model and its figures."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.config.load import dump_config
from finetune.config.schema import Config
from finetune.errors import BatchDoesNotFit, Interrupted, UsageError
from finetune.events import Emit, Stage
from finetune.files import write_json, write_text_atomically
from finetune.pipeline.examples import encode_split
from finetune.pipeline.features import (
    cache_folder,
    caches_features,
    extract_features,
    make_feature_extractor,
)
from finetune.pipeline.finish import BEST_CHECKPOINT, finish
from finetune.pipeline.journal import continue_journal, journal
from finetune.pipeline.plan import TrainingPlan, plan_training, with_plan
from finetune.pipeline.prepare import Prepared, find_run_folder, prepare
from finetune.pipeline.score import evaluation_batch_size, score_examples
from finetune.runs.batch_sizes import SizeRequest, find_sizes
from finetune.runs.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    write_checkpoint,
)
from finetune.runs.environment import describe_environment
from finetune.runs.folder import RunFolder, create_run_folder, lock, open_run_folder
from finetune.tokenization.examples import Examples
from finetune.training.interruption import stop_on_signal
from finetune.training.loop import LoopSettings, is_over, train
from finetune.training.out_of_memory import BatchSize, BatchSizes
from finetune.training.snapshot import Progress, capture_state, restore_state, trained_tensors
from finetune.training.training_state import TrainingState, prepare_training


def run(config: Config, *, emit: Emit, resume_from: Path | None = None) -> dict[str, Any]:
    """Fine-tune a classifier and write its run folder.

    Args:
        config: Every option of the run.
        emit: Receives progress events.
        resume_from: A run folder to go on with, made with the same configuration.

    Returns:
        The figures of ``all_results.json``, and ``output_dir``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    folder = find_run_folder(config) if resume_from is None else _find_unfinished(resume_from)
    prepared = prepare(config, emit=emit)
    started = time.perf_counter()
    examples = {"train": encode_split(prepared, "train", emit=emit)}
    encoding_seconds = time.perf_counter() - started
    for split in prepared.table:
        if split not in examples:
            examples[split] = encode_split(prepared, split, emit=emit)
    plan = plan_training(prepared, examples)
    if config.training.batch_size == "auto":
        prepared = _with_found_sizes(prepared, plan, emit=emit)
    if resume_from is None:
        create_run_folder(folder.path, overwrite=config.output.overwrite)
    sizes = _batch_sizes(prepared, plan, emit=emit)
    with lock(folder), _out_of_memory_explained(folder, sizes), _way_on_shown(folder):
        started = time.perf_counter()
        model, examples = extract_features(
            prepared,
            examples,
            padded_lengths=plan.padded_lengths,
            batch_size=sizes.evaluation,
            emit=emit,
        )
        frozen_seconds = time.perf_counter() - started
        training_state = prepare_training(
            model,
            head=prepared.classifier.structure.head,
            device=prepared.device,
            precision=config.training.precision,
            schedule=plan.schedule,
            head_lr_multiplier=plan.head_lr_multiplier,
            weight_decay=plan.weight_decay,
            max_grad_norm=config.training.max_grad_norm,
        )
        if resume_from is None:
            progress = _begin(folder, prepared, plan)
        else:
            progress = _go_on(folder, training_state, emit=emit)
        progress.seconds += encoding_seconds + frozen_seconds
        _train(folder, prepared, plan, sizes, training_state, examples, progress, emit=emit)
        return finish(folder, prepared, plan, sizes, training_state, examples, progress, emit=emit)


def _with_found_sizes(prepared: Prepared, plan: TrainingPlan, *, emit: Emit) -> Prepared:
    config, classifier, mode = prepared.config, prepared.classifier, prepared.mode
    request = SizeRequest(
        device=prepared.device,
        classifier=classifier,
        mode=mode,
        padded_length=plan.padded_lengths[-1],
        precision=config.training.precision,
        batch_size=plan.effective_batch_size,
        eval_batch_size=config.training.eval_batch_size,
        stores_features=caches_features(config, mode)
        and make_feature_extractor(classifier) is not None,
    )
    folder = cache_folder(config.cache, "batches")
    found = find_sizes(request, config.search, cache=folder, emit=emit)
    training = dataclasses.replace(
        config.training, batch_size=found.training, eval_batch_size=found.evaluation
    )
    return dataclasses.replace(prepared, config=dataclasses.replace(config, training=training))


def _batch_sizes(prepared: Prepared, plan: TrainingPlan, *, emit: Emit) -> BatchSizes:
    rows = prepared.config.training.batch_size
    assert isinstance(rows, int), "auto has been replaced by what was found"
    sizes = BatchSizes(
        training=BatchSize(rows, "batch size", prepared.device, emit),
        evaluation=evaluation_batch_size(prepared.config, prepared.device, emit=emit),
    )
    for size in (sizes.training, sizes.evaluation):
        size.clamp(padded_length=plan.padded_lengths[-1])
    return sizes


def _find_unfinished(run: Path) -> RunFolder:
    folder = open_run_folder(run, needs_model=False)
    if folder.results_file.is_file() and not (folder.checkpoints_folder / BEST_CHECKPOINT).exists():
        raise UsageError(
            f"the run in {run} has finished",
            remedy="use it with finetune evaluate or predict, or start another run",
        )
    return folder


def _begin(folder: RunFolder, prepared: Prepared, plan: TrainingPlan) -> Progress:
    write_text_atomically(folder.config_file, dump_config(with_plan(prepared.config, plan)))
    environment = {**describe_environment(), "device": prepared.device.description}
    write_json(folder.environment_file, environment)
    return Progress()


def _go_on(folder: RunFolder, training_state: TrainingState, *, emit: Emit) -> Progress:
    checkpoint = latest_checkpoint(folder.checkpoints_folder, emit=emit)
    if checkpoint is None:
        raise UsageError(
            f"the run in {folder.path} has no checkpoint to resume from",
            remedy="start it anew with --overwrite",
        )
    progress = restore_state(training_state, *read_checkpoint(checkpoint))
    continue_journal(folder, updates=progress.updates)
    emit(Stage(f"resuming after update {progress.updates:,}"))
    return progress


def _train(
    folder: RunFolder,
    prepared: Prepared,
    plan: TrainingPlan,
    sizes: BatchSizes,
    training_state: TrainingState,
    examples: Mapping[str, Examples],
    progress: Progress,
    *,
    emit: Emit,
) -> None:
    schedule = plan.schedule
    emit(
        Stage(
            f"training: {schedule.total_updates:,} updates of {plan.effective_batch_size} rows, "
            f"learning rate {schedule.peak:g}, {plan.real_token_share():.1%} of the tokens are not "
            "padding"
        )
    )
    with stop_on_signal() as should_stop:
        settings = LoopSettings(
            batch_size=sizes.training,
            updates_per_epoch=plan.updates_per_epoch,
            report_every=prepared.config.output.logging_steps,
            patience=plan.early_stopping_patience,
            plan_epoch=plan.batches,
            validate=_validation(prepared, plan, sizes, training_state, examples.get("validation")),
            keep_best=lambda: write_checkpoint(
                folder.checkpoints_folder / BEST_CHECKPOINT,
                tensors={"model": trained_tensors(training_state)},
                state={},
            ),
            keep_progress=lambda progress: _keep_progress(folder, training_state, progress),
            keeps_each_epoch=prepared.config.output.save_strategy == "epoch",
            should_stop=should_stop,
            emit=journal(folder, emit),
        )
        train(training_state, examples["train"], progress, settings)
        if should_stop() and not is_over(
            progress, total_updates=schedule.total_updates, patience=settings.patience
        ):
            raise KeyboardInterrupt(
                f"stopped after update {progress.updates:,} of {schedule.total_updates:,}"
            )


def _validation(
    prepared: Prepared,
    plan: TrainingPlan,
    sizes: BatchSizes,
    training_state: TrainingState,
    examples: Examples | None,
) -> Callable[[], tuple[float, dict[str, float]]] | None:
    """Return the function that scores the model on the validation split, if there is one."""
    if examples is None:
        return None
    chooser = prepared.config.training.metric_for_best_model

    def validate() -> tuple[float, dict[str, float]]:
        metrics, _ = score_examples(
            training_state.model,
            examples,
            prepared,
            padded_lengths=plan.padded_lengths,
            batch_size=sizes.evaluation,
        )
        metrics = {name: metrics[name] for name in ("accuracy", "macro_f1", "loss")}
        return (-metrics["loss"] if chooser == "loss" else metrics[chooser]), metrics

    return validate


def _keep_progress(folder: RunFolder, training_state: TrainingState, progress: Progress) -> None:
    tensors, state = capture_state(training_state, progress)
    path = checkpoint_path(folder.checkpoints_folder, update=progress.updates)
    write_checkpoint(path, tensors=tensors, state=state)
    remove_old_checkpoints(folder.checkpoints_folder, keep=1)


@contextmanager
def _way_on_shown(folder: RunFolder) -> Iterator[None]:
    """Tell a user who stops the run how it goes on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(
            str(stop) or "stopped",
            remedy=f"go on with: {_command_to_go_on(folder)}"
            if _has_checkpoint(folder)
            else "start it anew with --overwrite: it had saved nothing yet",
        ) from None


@contextmanager
def _out_of_memory_explained(folder: RunFolder, sizes: BatchSizes) -> Iterator[None]:
    """Tell a user what to do where memory ran out in work that can't be done again in pieces.

    Such as the optimizer's step: on a GPU that answers late, what it was given before is lost too.
    """
    batch_size = sizes.training
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not batch_size.device.memory.is_out_of_memory(error):
            raise
        smaller = f"--batch-size {max(1, batch_size.rows // 2)}"
        raise BatchDoesNotFit(
            f"{batch_size.device.name} ran out of memory in work that can't be done again in "
            "smaller pieces",
            remedy=f"go on with: {_command_to_go_on(folder)} {smaller}"
            if _has_checkpoint(folder)
            else f"use {smaller} with --effective-batch-size as it is, lower --eval-batch-size or "
            "--max-length, or use --freeze-core",
        ) from error


def _has_checkpoint(folder: RunFolder) -> bool:
    return any(folder.checkpoints_folder.glob("step-*"))


def _command_to_go_on(folder: RunFolder) -> str:
    return f"finetune run --resume-from-checkpoint {shlex.quote(str(folder.path))}"
