"""A run, from its configuration to a folder with a model and its figures."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.config.load import dump_config
from finetune.config.schema import Config
from finetune.errors import BatchDoesNotFit, Interrupted, UsageError
from finetune.events import Stage, Tell
from finetune.pipeline.examples import encode_split
from finetune.pipeline.features import run_frozen_once
from finetune.pipeline.find import with_found_sizes
from finetune.pipeline.finish import BEST_CHECKPOINT, finish
from finetune.pipeline.journal import continue_journal, journal
from finetune.pipeline.plan import TrainingPlan, plan_training, with_plan
from finetune.pipeline.prepare import Prepared, find_run_folder, prepare
from finetune.pipeline.score import evaluation_batch_size, score_examples
from finetune.runs.checkpoint import (
    checkpoint_path,
    latest_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
    write_checkpoint,
)
from finetune.runs.environment import describe_environment
from finetune.runs.folder import (
    RunFolder,
    create_run_folder,
    lock,
    open_run_folder,
    write_json,
    write_text_atomically,
)
from finetune.training.assemble import Assembly, assemble
from finetune.training.interruption import stop_on_signal
from finetune.training.loop import Course, is_over, train
from finetune.training.micro_batches import Examples
from finetune.training.recovery import BatchSize, BatchSizes
from finetune.training.state import Progress, capture_state, restore_state, trained_tensors


def run(config: Config, *, tell: Tell, resume_from: Path | None = None) -> dict[str, Any]:
    """Fine-tune a classifier and write its run folder.

    Args:
        config: Every option of the run.
        tell: Is told what goes on.
        resume_from: A run folder to go on with, made with the same configuration.

    Returns:
        The figures of ``all_results.json``, and ``output_dir``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    folder = find_run_folder(config) if resume_from is None else _find_unfinished(resume_from)
    prepared = prepare(config, tell=tell)
    started = time.perf_counter()
    examples = {"train": encode_split(prepared, "train", tell=tell)}
    encoding_seconds = time.perf_counter() - started
    for split in prepared.table:
        if split not in examples:
            examples[split] = encode_split(prepared, split, tell=tell)
    plan = plan_training(prepared, examples)
    if config.training.batch_size == "auto":
        prepared = with_found_sizes(prepared, plan, tell=tell)
    if resume_from is None:
        create_run_folder(folder.path, overwrite=config.output.overwrite)
    sizes = _batch_sizes(prepared, plan, tell=tell)
    with lock(folder), _out_of_memory_explained(folder, sizes), _way_on_shown(folder):
        started = time.perf_counter()
        model, examples = run_frozen_once(
            prepared, examples, widths=plan.widths, batch_size=sizes.evaluation, tell=tell
        )
        frozen_seconds = time.perf_counter() - started
        assembly = assemble(
            model,
            head=prepared.classifier.structure.head,
            device=prepared.device,
            precision=config.training.precision,
            schedule=plan.schedule,
            head_rate_factor=plan.head_rate_factor,
            weight_decay=plan.weight_decay,
            max_grad_norm=config.training.max_grad_norm,
        )
        if resume_from is None:
            progress = _begin(folder, prepared, plan)
        else:
            progress = _go_on(folder, assembly, tell=tell)
        progress.seconds += encoding_seconds + frozen_seconds
        _train(folder, prepared, plan, sizes, assembly, examples, progress, tell=tell)
        return finish(folder, prepared, plan, sizes, assembly, examples, progress, tell=tell)


def _batch_sizes(prepared: Prepared, plan: TrainingPlan, *, tell: Tell) -> BatchSizes:
    rows = prepared.config.training.batch_size
    assert isinstance(rows, int), "auto has been replaced by what was found"
    sizes = BatchSizes(
        training=BatchSize(rows, "batch size", prepared.device, tell),
        evaluation=evaluation_batch_size(prepared.config, prepared.device, tell=tell),
    )
    for size in (sizes.training, sizes.evaluation):
        size.keep_right(width=plan.widths[-1])
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


def _go_on(folder: RunFolder, assembly: Assembly, *, tell: Tell) -> Progress:
    checkpoint = latest_checkpoint(folder.checkpoints_folder, tell=tell)
    if checkpoint is None:
        raise UsageError(
            f"the run in {folder.path} has no checkpoint to resume from",
            remedy="start it anew with --overwrite",
        )
    progress = restore_state(assembly, *read_checkpoint(checkpoint))
    continue_journal(folder, updates=progress.updates)
    tell(Stage(f"resuming after update {progress.updates:,}"))
    return progress


def _train(
    folder: RunFolder,
    prepared: Prepared,
    plan: TrainingPlan,
    sizes: BatchSizes,
    assembly: Assembly,
    examples: Mapping[str, Examples],
    progress: Progress,
    *,
    tell: Tell,
) -> None:
    schedule = plan.schedule
    tell(
        Stage(
            f"training: {schedule.total_updates:,} updates of {plan.effective_batch_size} rows, "
            f"learning rate {schedule.peak:g}, {plan.real_token_share():.1%} of the tokens are not "
            "padding"
        )
    )
    with stop_on_signal() as should_stop:
        course = Course(
            batch_size=sizes.training,
            updates_per_epoch=plan.updates_per_epoch,
            report_every=prepared.config.output.logging_steps,
            patience=plan.early_stopping_patience,
            plan_epoch=plan.batches,
            validate=_validation(prepared, plan, sizes, assembly, examples.get("validation")),
            keep_best=lambda: write_checkpoint(
                folder.checkpoints_folder / BEST_CHECKPOINT,
                tensors={"model": trained_tensors(assembly)},
                state={},
            ),
            keep_progress=lambda progress: _keep_progress(folder, assembly, progress),
            keeps_each_epoch=prepared.config.output.save_strategy == "epoch",
            should_stop=should_stop,
            tell=journal(folder, tell),
        )
        train(assembly, examples["train"], progress, course)
        if should_stop() and not is_over(
            progress, total_updates=schedule.total_updates, patience=course.patience
        ):
            raise KeyboardInterrupt(
                f"stopped after update {progress.updates:,} of {schedule.total_updates:,}"
            )


def _validation(
    prepared: Prepared,
    plan: TrainingPlan,
    sizes: BatchSizes,
    assembly: Assembly,
    examples: Examples | None,
) -> Callable[[], tuple[float, dict[str, float]]] | None:
    """Return the function that scores the model on the validation split, if there is one."""
    if examples is None:
        return None
    chooser = prepared.config.training.metric_for_best_model

    def validate() -> tuple[float, dict[str, float]]:
        figures, _ = score_examples(
            assembly.model,
            examples,
            prepared,
            widths=plan.widths,
            batch_size=sizes.evaluation,
        )
        metrics = {name: figures[name] for name in ("accuracy", "macro_f1", "loss")}
        return (-metrics["loss"] if chooser == "loss" else metrics[chooser]), metrics

    return validate


def _keep_progress(folder: RunFolder, assembly: Assembly, progress: Progress) -> None:
    tensors, state = capture_state(assembly, progress)
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
        if not batch_size.device.is_out_of_memory(error):
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
