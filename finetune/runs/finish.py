"""The end of a run: its best model is saved and evaluated, and its results are written."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.evaluation.calibration import measure_calibration
from finetune.events import stage
from finetune.files import read_jsonl, write_json, write_jsonl
from finetune.model.save import save_model
from finetune.runs.calibration import Predicted, finish_task
from finetune.runs.confidences import write_confidences
from finetune.runs.failures import write_errors_explained
from finetune.runs.folder import RunFolder
from finetune.runs.inference import write_inference
from finetune.runs.results import RunFacts, RunResults, TrainingMetrics
from finetune.runs.run import Run
from finetune.tasks.base import Labels, warn_unless_better

WritePages = Callable[[RunFolder, RunResults], object]


def finish(run: Run, *, write_pages: WritePages) -> RunResults:
    """Save the best model, evaluate it on validation and test split, and write the results.

    Args:
        run: That has taken its steps.
        write_pages: Writes what people read, from the files of the folder. The run counts as
            finished only afterwards.

    Raises:
        NotWritten: If its folder can't be written.
    """
    peak_bytes = run.training_state.device.memory.peak_bytes()
    run.checkpoints.load_best(run.training_state, run.progress)
    run, validation = _finish_task(run)
    with write_errors_explained(run.folder):
        results = _write_results(run, validation, peak_bytes, write_pages=write_pages)
    run.checkpoints.remove()
    return results


def _finish_task(run: Run) -> tuple[Run, Predicted | None]:
    """Let the task change the best model; return its run, and its logits of the validation split.

    The run that was given keeps the task for the seeds that are still to be trained.
    """
    text_model, validation = run.preparation.text_model, None
    if "validation" in run.examples:
        predict, calibrates = partial(run.predict, "validation"), run.config.training.calibrate
        task, validation = finish_task(text_model, predict, calibrates=calibrates, emit=run.emit)
    else:
        task = text_model.task.fold(text_model.output_parameters)
    finished = replace(run.preparation, text_model=replace(text_model, task=task))
    return replace(run, preparation=finished), validation


def _write_results(
    run: Run, validation: Predicted | None, peak_bytes: int | None, *, write_pages: WritePages
) -> RunResults:
    task, folder = run.preparation.task, run.folder
    if run.processes.is_main:
        with stage("save", run.emit):
            _write_model(run, validation)
    with stage("evaluate", run.emit):
        test = run.predict("test")
    results = RunResults(
        task=task,
        facts=RunFacts.of(run.preparation),
        training=_training_metrics(run, peak_bytes),
        details=run.preparation.details,
        validation=task.score(*validation) if validation else None,
        test=task.score(*test),
        calibration=measure_calibration(task, validation, test) if validation else None,
        output_dir=str(folder.path),
    )
    # Once the run counts as finished nothing more is said of it.
    warn_unless_better(results.test, emit=run.emit)
    if run.processes.is_main:
        _write_predictions(run, test)
        write_json(folder.state_file, _trainer_state(run))
        write_json(folder.results_file, results.to_json())
        with stage("report", run.emit):
            write_pages(folder, results)
        folder.delete_previous()
    return results


def _write_model(run: Run, validation: Predicted | None) -> None:
    text_model = run.preparation.text_model
    save_model(text_model, run.folder.model_folder)
    write_inference(run.folder, run.config.model, max_tokens=text_model.max_tokens)
    if validation:
        write_confidences(run.folder, run.preparation.task, validation)


def _write_predictions(run: Run, test: Predicted) -> None:
    table = run.preparation.splits["test"].remove_columns("label")
    given = table.with_format("arrow")[:].to_pylist()
    found, losses = run.preparation.task.predictions(*test), _losses_of(run, *test)
    rows = (
        {**row, **own, "loss": loss} for row, own, loss in zip(given, found, losses, strict=True)
    )
    write_jsonl(run.folder.predictions_file, rows)


def _losses_of(run: Run, logits: NDArray[np.float32], labels: Labels) -> list[float]:
    losses: list[float] = run.preparation.task.losses(
        torch.tensor(logits), torch.tensor(labels)
    ).tolist()
    return losses


def _training_metrics(run: Run, peak_bytes: int | None) -> TrainingMetrics:
    progress, samples = run.progress, len(run.plan.examples.labels)
    epochs = progress.steps / run.plan.steps_per_epoch
    return TrainingMetrics(
        epoch=epochs,
        train_samples=samples,
        train_runtime=progress.seconds,
        train_samples_per_second=samples * epochs / progress.seconds,
        train_steps_per_second=progress.steps / progress.seconds,
        train_loss=progress.loss_sum / progress.steps,
        train_batch_size=run.batch_size.examples,
        train_peak_bytes=peak_bytes,
    )


def _trainer_state(run: Run) -> dict[str, object]:
    progress = run.progress
    return {
        "global_step": progress.steps,
        "max_steps": run.plan.schedule.total_steps,
        "num_train_epochs": run.plan.num_train_epochs,
        "epoch": progress.steps / run.plan.steps_per_epoch,
        "best_metric": progress.best_score and run.metric_sign * progress.best_score,
        "best_global_step": progress.best_step,
        "log_history": read_jsonl(run.folder.metrics_file),
    }
