"""A run: one training of a model.

``Run.prepare`` begins one and ``Run.resume`` goes on with one; ``Run.train`` takes the steps.
Then ``finish`` saves the best model and writes what was found.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from finetune.config.load import dump_config
from finetune.config.schema import Config
from finetune.devices.batch_size import BatchSize
from finetune.distributed.processes import SECONDS_LATE, Processes
from finetune.evaluation.predict import Predictor
from finetune.events import Emit, Info, stage
from finetune.files import write_text_atomically
from finetune.runs.batch_sizes import make_batch_sizes, with_batch_sizes
from finetune.runs.calibration import Predicted
from finetune.runs.environment import read_measured, restore_threads, write_environment
from finetune.runs.failures import (
    device_fault_explained,
    examples_explained,
)
from finetune.runs.features import stored_features
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal, continue_journal
from finetune.runs.manifest import Manifest
from finetune.runs.plan import TrainingPlan
from finetune.runs.precision import with_precision
from finetune.runs.preparation import Preparation
from finetune.runs.saving import Checkpoints, nothing_to_resume
from finetune.tokenization.examples import Examples
from finetune.training.interruption import DistributedStopFlag, Stopped, stop_on_signal
from finetune.training.loop import LoopSettings, ValidationResult, is_over, train
from finetune.training.snapshot import Progress
from finetune.training.training_state import TrainingState, prepare_training

# A scheduler sends a signal to all processes, and their launcher sends it to each once more.
_COPIES_SECONDS = 1.0


@dataclass(frozen=True)
class Run:
    """One training of a model.

    Args:
        folder: Where it writes; held by this process.
        examples: The splits as the model in training reads them: token ids, or features.
        training_state: What trains: the model, or its trainable layers.
        batch_size: Examples in one forward and backward.
        predictor: Gives logits for validation and test.
    """

    folder: RunFolder
    preparation: Preparation
    examples: Mapping[str, Examples]
    training_state: TrainingState
    batch_size: BatchSize
    predictor: Predictor
    checkpoints: Checkpoints
    progress: Progress
    emit: Emit

    @classmethod
    def prepare(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        """Make all ready for the first step, and write what the run is made from.

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
        folder.set_aside_previous()
        write_text_atomically(folder.config_file, dump_config(preparation.resolved_config))
        Manifest.of(preparation).write(folder.manifest_file)
        write_environment(folder.environment_file, preparation)

    @classmethod
    def resume(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        """Restore an interrupted run, whose folder this process holds, from its last checkpoint.

        Raises:
            DataDiffers: If data or model are not those that the run began with.
            UsageError: If there is no checkpoint.
        """
        processes = preparation.processes
        processes.broadcast(lambda: _check_resumable(preparation, folder))
        restore_threads(folder.environment_file)
        choices, timing = processes.broadcast(lambda: read_measured(folder.environment_file))
        preparation = replace(preparation, precision_timing=timing, choices=choices)
        run = cls._build(preparation, folder, emit=emit)
        progress = run.checkpoints.restore(run.training_state)
        progress.seconds += run.progress.seconds
        if processes.is_main:
            continue_journal(folder, steps=progress.steps)
        emit(Info(f"resuming after step {progress.steps:,}"))
        return replace(run, progress=progress)

    @classmethod
    def _build(cls, preparation: Preparation, folder: RunFolder, *, emit: Emit) -> "Run":
        preparation = with_batch_sizes(preparation, emit=emit)
        batch_size, eval_batch_size = make_batch_sizes(preparation, emit=emit)
        longest_tokens = preparation.plan.padded_lengths[-1]
        preparation.device.choose_attention(longest_tokens=longest_tokens)
        if hint := preparation.device.busy_hint():
            emit(Info(hint))
        with stage("precision", emit):
            preparation = with_precision(preparation, batch_size, emit=emit)
        started = time.perf_counter()
        with stage("features", emit):
            model, examples = stored_features(preparation, eval_batch_size, emit=emit)
        seconds = preparation.encoding_seconds + time.perf_counter() - started
        training_state = _make_training_state(preparation, model)
        device, processes = preparation.device, preparation.processes
        precision = preparation.config.training.precision
        predictor = Predictor(training_state.model, device, precision, eval_batch_size, processes)
        return cls(
            folder=folder,
            preparation=preparation,
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
    def plan(self) -> TrainingPlan:
        """The run's steps."""
        return self.preparation.plan

    @property
    def processes(self) -> Processes:
        """Those that train together; the main one alone writes."""
        return self.preparation.processes

    def train(self) -> None:
        """Take the steps that are left, with validation and checkpoints.

        Raises:
            Stopped: By a signal; the progress is saved.
        """
        schedule = self.plan.schedule
        with (
            stage("train", self.emit),
            examples_explained(self.preparation),
            device_fault_explained(
                self.folder, self.progress, device_name=self.preparation.device.name
            ),
            stop_on_signal(apart_seconds=_COPIES_SECONDS * (self.processes.count > 1)) as request,
        ):
            self.emit(
                Info(
                    f"training: {schedule.total_steps:,} steps of "
                    f"{self.plan.effective_batch_size} examples, learning rate {schedule.peak:g}, "
                    f"{self.plan.real_token_share():.1%} of the tokens are not padding"
                )
            )
            stop = DistributedStopFlag(
                request, partial(self.processes.all_reduce_max, seconds=SECONDS_LATE)
            )
            settings = self._loop_settings(should_stop=stop)
            with self.checkpoints:
                train(self.training_state, self.examples["train"], self.progress, settings)
            # None ends, and with it all, before the last checkpoint is written.
            self.processes.barrier()
            if stop.number and not self._is_over():
                raise Stopped(
                    stop.number,
                    f"stopped after step {self.progress.steps:,} of {schedule.total_steps:,}",
                )

    def _loop_settings(self, *, should_stop: Callable[[], bool]) -> LoopSettings:
        checkpoints, output = self.checkpoints, self.config.output
        journal = Journal(self.folder, self.emit) if self.processes.is_main else None
        saves = output.save_strategy == "epoch"
        return LoopSettings(
            batch_size=self.batch_size,
            steps_per_epoch=self.plan.steps_per_epoch,
            logging_steps=output.logging_steps,
            patience=self.plan.early_stopping_patience,
            plan_epoch=self.plan.batches,
            validate=self._validate if "validation" in self.examples else None,
            save_best=lambda progress: checkpoints.save_best(self.training_state, progress),
            save_progress=lambda progress: self._save_progress(progress, journal),
            saves_each_epoch=saves,
            save_every_steps=output.save_steps if saves else None,
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
            total_steps=self.plan.schedule.total_steps,
            patience=self.plan.early_stopping_patience,
        )

    def _validate(self) -> ValidationResult:
        metrics = self.preparation.task.score(*self.predict("validation")).metrics
        return ValidationResult(self.metric_sign * metrics[self._metric], metrics)

    @property
    def _metric(self) -> str:
        """The one by which the best model is chosen."""
        return self.preparation.task.chosen_metric(self.config.training.metric_for_best_model)

    @property
    def metric_sign(self) -> int:
        """1, or -1 where a lower value of the metric that chooses the best model is better."""
        return self.preparation.task.sign_of(self._metric)

    def predict(self, split: str) -> Predicted:
        """Return logits and labels of a split."""
        examples = self.examples[split]
        logits = self.predictor.logits(examples, padded_lengths=self.plan.padded_lengths)
        return logits, examples.labels


def _make_training_state(preparation: Preparation, model: nn.Module) -> TrainingState:
    processes = preparation.processes
    training_state = prepare_training(
        model,
        head=preparation.text_model.structure.head,
        device=preparation.device,
        precision=preparation.config.training.precision,
        losses=preparation.task.losses,
        hyperparameters=preparation.plan.hyperparameters,
        processes=processes,
    )
    if not processes.is_main:
        # The same dropout for other examples would make the noise of a step larger.
        torch.manual_seed(preparation.plan.seed + processes.index)
    return training_state


def _check_resumable(preparation: Preparation, folder: RunFolder) -> None:
    """Raise unless a run has a checkpoint, and was made from the same as this one."""
    if not folder.can_resume:
        raise nothing_to_resume(folder)
    saved = Manifest.read(folder.manifest_file)
    saved.check(Manifest.of(preparation), remedy="restore it, or start a new run")
