"""A run: one training of a classifier, from its preparation to a folder with a model."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.config.load import dump_config
from finetune.config.schema import Config
from finetune.devices.batch_size import BatchSize
from finetune.devices.processes import SECONDS_LATE, Processes
from finetune.evaluation.calibration import measure_calibration
from finetune.evaluation.predict import Predictor
from finetune.events import Emit, Info, stage
from finetune.files import read_jsonl, write_json, write_jsonl, write_text_atomically
from finetune.model.gradient_checkpointing import enable_gradient_checkpointing
from finetune.model.save import save_classifier
from finetune.runs.batch_sizes import find_sizes
from finetune.runs.calibration import Predicted, finish_task
from finetune.runs.confidences import write_confidences
from finetune.runs.details import CHOICES, ORIGINS, read_choices
from finetune.runs.environment import describe_environment
from finetune.runs.failures import (
    device_fault_explained,
    examples_explained,
    unwritten_model_kept,
)
from finetune.runs.features import stored_features
from finetune.runs.folder import RunFolder, delete_previous_run, set_aside_previous_run
from finetune.runs.inference import write_inference
from finetune.runs.journal import Journal, continue_journal
from finetune.runs.manifest import Manifest
from finetune.runs.plan import TrainingPlan, plan_training, with_plan
from finetune.runs.precision import TIMING, read_timing, with_precision
from finetune.runs.preparation import Preparation
from finetune.runs.results import RunFacts, RunResults, TrainingMetrics
from finetune.runs.saving import Checkpoints
from finetune.runs.threads import choose_run_threads
from finetune.tasks.base import Labels
from finetune.tokenization.examples import Examples
from finetune.training.interruption import AgreedStop, Stopped, stop_on_signal
from finetune.training.loop import LoopSettings, ValidationResult, is_over, train
from finetune.training.snapshot import Progress
from finetune.training.training_state import TrainingState, prepare_training


@dataclass
class Run:
    """One training of a classifier.

    Args:
        folder: Where it writes; held by this process.
        examples: The splits as the model in training reads them: token ids, or features.
        training_state: What trains: the model, or its trainable layers.
        batch_size: Examples in one forward and backward.
        predictor: Gives logits for validation and test.
    """

    folder: RunFolder
    preparation: Preparation
    plan: TrainingPlan
    manifest: Manifest
    examples: Mapping[str, Examples]
    training_state: TrainingState
    batch_size: BatchSize
    predictor: Predictor
    checkpoints: Checkpoints
    progress: Progress
    emit: Emit

    @classmethod
    def prepare(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        """Make all ready for the first update, and write what the run is made from.

        Args:
            preparation: Device, data and model; the model is moved and changed.
            folder: Held by this process; an earlier run in it is deleted when this one has a model.
            emit: Receives progress events.

        Raises:
            BatchDoesNotFit: If not even one example fits.
        """
        run = cls._build(preparation, folder, emit=emit)
        if run.processes.is_main:
            run._write_origin()
        return run

    def _write_origin(self) -> None:
        """Write what the run is made from, with which versions on which machine."""
        folder, preparation = self.folder, self.preparation
        set_aside_previous_run(folder)
        config = with_plan(preparation, self.plan)
        write_text_atomically(folder.config_file, dump_config(config))
        self.manifest.write(folder.manifest_file)
        environment = {**describe_environment(), "device": preparation.device.description}
        environment[ORIGINS] = dict(preparation.origins)
        environment[CHOICES] = [asdict(one) for one in preparation.choices]
        if self.processes.count > 1:
            environment["processes"] = self.processes.count
        if timing := preparation.precision_timing:
            environment[TIMING] = asdict(timing)
        write_json(folder.environment_file, environment)

    @classmethod
    def resume(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        """Restore an interrupted run, whose folder this process holds, from its last checkpoint.

        Raises:
            DataDiffers: If data or model are not those that the run began with.
            UsageError: If there is no checkpoint.
        """
        processes = preparation.processes
        intact = processes.broadcast(lambda: _check_resumable(preparation, folder, emit=emit))
        choices = processes.broadcast(lambda: read_choices(folder.environment_file))
        timing = processes.broadcast(lambda: read_timing(folder.environment_file))
        preparation = replace(preparation, precision_timing=timing, choices=choices)
        run = cls._build(preparation, folder, emit=emit)
        prepared_seconds = run.progress.seconds
        run.progress = run.checkpoints.restore(intact, run.training_state)
        run.progress.seconds += prepared_seconds
        if processes.is_main:
            continue_journal(folder, updates=run.progress.updates)
        emit(Info(f"resuming after update {run.progress.updates:,}"))
        return run

    @classmethod
    def _build(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        plan = plan_training(preparation)
        if preparation.config.training.batch_size == "auto":
            preparation = _with_found_sizes(preparation, plan, emit=emit)
        device, processes = preparation.device, preparation.processes
        batch_size, eval_batch_size = _batch_sizes(preparation, plan, emit=emit)
        device.choose_attention(longest_tokens=plan.padded_lengths[-1])
        with stage("threads", emit):
            preparation = choose_run_threads(preparation, emit=emit)
        with stage("precision", emit):
            preparation = with_precision(preparation, plan, batch_size, emit=emit)
        precision = preparation.config.training.precision
        started = time.perf_counter()
        with stage("features", emit):
            model, examples = stored_features(preparation, plan, eval_batch_size, emit=emit)
        seconds = preparation.encoding_seconds + time.perf_counter() - started
        training_state = prepare_training(
            model,
            head=preparation.classifier.structure.head,
            device=device,
            precision=precision,
            losses=preparation.task.losses,
            hyperparameters=plan.hyperparameters,
            processes=processes,
        )
        if not processes.is_main:
            # The same dropout for other examples would make the noise of an update larger.
            torch.manual_seed(plan.seed + processes.index)
        predictor = Predictor(training_state.model, device, precision, eval_batch_size, processes)
        return cls(
            folder=folder,
            preparation=preparation,
            plan=plan,
            manifest=Manifest.of(preparation),
            examples=examples,
            training_state=training_state,
            batch_size=batch_size,
            predictor=predictor,
            checkpoints=Checkpoints(
                folder,
                keep=preparation.config.output.save_total_limit,
                emit=emit,
                processes=processes,
            ),
            progress=Progress(seconds=seconds),
            emit=emit,
        )

    @property
    def config(self) -> Config:
        """The run's options."""
        return self.preparation.config

    @property
    def processes(self) -> Processes:
        """Those that train together; the main one alone writes."""
        return self.preparation.processes

    def train(self) -> None:
        """Take the updates that are left, with validation and checkpoints.

        Raises:
            Stopped: By a signal; the progress is saved.
        """
        schedule = self.plan.schedule
        self.emit(
            Info(
                f"training: {schedule.total_updates:,} updates of "
                f"{self.plan.effective_batch_size} examples, learning rate {schedule.peak:g}, "
                f"{self.plan.real_token_share():.1%} of the tokens are not padding"
            )
        )
        with (
            stage("train", self.emit),
            examples_explained(self.preparation),
            device_fault_explained(
                self.folder, self.progress, device_name=self.preparation.device.name
            ),
            stop_on_signal() as request,
        ):
            stop = AgreedStop(request, partial(self.processes.highest, seconds=SECONDS_LATE))
            settings = self._loop_settings(should_stop=stop)
            with self.checkpoints:
                train(self.training_state, self.examples["train"], self.progress, settings)
            if stop.number and not self._is_over():
                raise Stopped(
                    stop.number,
                    f"stopped after update {self.progress.updates:,} of {schedule.total_updates:,}",
                )

    def finish(self, *, write_pages: Callable[[RunFolder, RunResults], object]) -> RunResults:
        """Save the best model, evaluate it on validation and test split, and write the results.

        Args:
            write_pages: Writes what people read, from the files of the folder. The run counts as
                finished only afterwards.
        """
        peak_bytes = self.training_state.device.memory.peak_bytes()
        self.checkpoints.load_best(self.training_state, self.progress)
        validation = self._finish_task()
        with unwritten_model_kept(self.folder, self.preparation.classifier):
            results = self._write_results(peak_bytes, validation, write_pages=write_pages)
        self.checkpoints.remove()
        return results

    def _write_results(
        self,
        peak_bytes: int | None,
        validation: Predicted | None,
        *,
        write_pages: Callable[[RunFolder, RunResults], object],
    ) -> RunResults:
        task = self.preparation.task
        if self.processes.is_main:
            with stage("save", self.emit):
                self._write_model(validation)
        with stage("evaluate", self.emit):
            test = self._predict("test")
        results = RunResults(
            task=task,
            facts=RunFacts.of(self.preparation, self.plan),
            training=self._training_metrics(peak_bytes),
            details=self.preparation.details,
            validation=task.score(*validation) if validation else None,
            test=task.score(*test),
            calibration=measure_calibration(task, validation, test) if validation else None,
            output_dir=str(self.folder.path),
        )
        if self.processes.is_main:
            self._write_predictions(*test)
            write_json(self.folder.state_file, self._trainer_state())
            write_json(self.folder.results_file, results.to_json())
            with stage("report", self.emit):
                write_pages(self.folder, results)
            delete_previous_run(self.folder)
        return results

    def _write_model(self, validation: Predicted | None) -> None:
        self.folder.path.stat()  # save_pretrained would make a folder anew that was moved
        classifier = self.preparation.classifier
        save_classifier(classifier, self.folder.model_folder)
        write_inference(self.folder, self.config.model, max_tokens=classifier.max_tokens)
        if validation:
            write_confidences(self.folder, self.preparation.task, validation)

    def _loop_settings(self, *, should_stop: Callable[[], bool]) -> LoopSettings:
        checkpoints, output = self.checkpoints, self.config.output
        journal = Journal(self.folder, self.emit) if self.processes.is_main else None
        saves = output.save_strategy == "epoch"
        return LoopSettings(
            batch_size=self.batch_size,
            updates_per_epoch=self.plan.updates_per_epoch,
            logging_updates=output.logging_steps,
            patience=self.plan.early_stopping_patience,
            plan_epoch=self.plan.batches,
            validate=self._validate if "validation" in self.examples else None,
            save_best=lambda progress: checkpoints.save_best(self.training_state, progress),
            save_progress=lambda progress: self._save_progress(progress, journal),
            saves_each_epoch=saves,
            save_updates=output.save_steps if saves else None,
            save_seconds=60 * output.save_minutes if saves else 0,
            checked_lengths=self.plan.padded_lengths if self.preparation.checks_device else (),
            should_stop=should_stop,
            emit=journal or self.emit,
        )

    def _save_progress(self, progress: Progress, journal: Journal | None) -> None:
        # Without its rows a checkpoint would not be resumed as it was left.
        if self.processes.broadcast(lambda: journal is not None and journal.write()):
            self.checkpoints.save(self.training_state, progress, is_over=self._is_over())

    def _is_over(self) -> bool:
        return is_over(
            self.progress,
            total_updates=self.plan.schedule.total_updates,
            patience=self.plan.early_stopping_patience,
        )

    def _validate(self) -> ValidationResult:
        scores = self.preparation.task.score(*self._predict("validation"))
        return ValidationResult(self._sign() * scores.metrics[self._metric()], scores.metrics)

    def _metric(self) -> str:
        return self.preparation.task.chosen_metric(self.config.training.metric_for_best_model)

    def _sign(self) -> int:
        """Return what makes a higher value of the metric the better one."""
        return -1 if self._metric() in self.preparation.task.lower_is_better else 1

    def _write_predictions(self, logits: NDArray[np.float32], labels: Labels) -> None:
        table = self.preparation.splits["test"].remove_columns("label")
        given = table.with_format("arrow")[:].to_pylist()
        found = self.preparation.task.predictions(logits, labels)
        rows = ({**row, **own} for row, own in zip(given, found, strict=True))
        write_jsonl(self.folder.predictions_file, rows)

    def _predict(self, split: str) -> Predicted:
        """Return logits and labels of a split."""
        examples = self.examples[split]
        logits = self.predictor.logits(examples, padded_lengths=self.plan.padded_lengths)
        return logits, examples.labels

    def _finish_task(self) -> Predicted | None:
        """Let the task change the best model; return its logits of the validation split."""
        classifier, validation = self.preparation.classifier, None
        if "validation" in self.examples:
            predict = partial(self._predict, "validation")
            calibrates = self.config.training.calibrate
            task, validation = finish_task(
                classifier, predict, calibrates=calibrates, emit=self.emit
            )
        else:
            task = classifier.task.fold(classifier.output_parameters)
        classifier = replace(classifier, task=task)
        self.preparation = replace(self.preparation, classifier=classifier)
        return validation

    def _training_metrics(self, peak_bytes: int | None) -> TrainingMetrics:
        progress, samples = self.progress, len(self.plan.examples.labels)
        epochs = progress.updates / self.plan.updates_per_epoch
        return TrainingMetrics(
            epoch=epochs,
            train_samples=samples,
            train_runtime=progress.seconds,
            train_samples_per_second=samples * epochs / progress.seconds,
            train_steps_per_second=progress.updates / progress.seconds,
            train_loss=progress.loss_sum / progress.updates,
            train_batch_size=self.batch_size.examples,
            train_peak_bytes=peak_bytes,
        )

    def _trainer_state(self) -> dict[str, object]:
        progress = self.progress
        return {
            "global_step": progress.updates,
            "max_steps": self.plan.schedule.total_updates,
            "num_train_epochs": self.plan.num_train_epochs,
            "epoch": progress.updates / self.plan.updates_per_epoch,
            "best_metric": progress.best_score and self._sign() * progress.best_score,
            "best_global_step": progress.best_updates,
            "log_history": read_jsonl(self.folder.metrics_file),
        }


def _check_resumable(preparation: Preparation, folder: RunFolder, *, emit: Emit) -> list[Path]:
    """Return the checkpoints that verify, of a run that was made from the same as this one."""
    keep = preparation.config.output.save_total_limit
    intact = Checkpoints(folder, keep=keep, emit=emit).intact()
    saved = Manifest.read(folder.manifest_file)
    if saved is not None:
        saved.check(Manifest.of(preparation), remedy="restore it, or start a new run")
    return intact


def _batch_sizes(
    preparation: Preparation, plan: TrainingPlan, *, emit: Emit
) -> tuple[BatchSize, BatchSize]:
    """Return the batch sizes of training and evaluation, one where both count as shapes."""
    options, device = preparation.config.training, preparation.device
    assert isinstance(options.batch_size, int), "auto has been replaced by what was found"
    examples, count = options.batch_size, preparation.processes.count
    if count > 1:
        # Where batches are filled up, all beyond a process's share of an update would be filling.
        examples = min(examples, math.ceil(plan.rows_per_update / count))
    batch_size = BatchSize(examples, "batch size", device, emit)
    batch_size.clamp(padded_length=plan.padded_lengths[-1])
    if device.shapes.counts_evaluation:
        return batch_size, batch_size
    eval_batch_size = BatchSize(options.eval_batch_size, "evaluation batch size", device, emit)
    eval_batch_size.clamp(padded_length=plan.padded_lengths[-1])
    return batch_size, eval_batch_size


def _with_found_sizes(preparation: Preparation, plan: TrainingPlan, *, emit: Emit) -> Preparation:
    """Return a preparation with the batch sizes that were found for it, in place of ``auto``."""
    with stage("batch size", emit):
        found = find_sizes(preparation, plan, emit=emit)
    if found.gradient_checkpointing:
        enable_gradient_checkpointing(preparation.classifier.model, preparation.device)
    config = preparation.config
    training = replace(
        config.training,
        batch_size=found.training,
        eval_batch_size=found.evaluation,
        gradient_checkpointing=found.gradient_checkpointing,
    )
    with_sizes = replace(preparation, config=replace(config, training=training))
    return with_sizes.with_choices(*found.choices)
