"""The training loop: steps, reports, validations, checkpoints, checks and stopping."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed, events
from finetune.events import clock, emit, stage
from finetune.model.structure import set_training
from finetune.tasks.base import Labels
from finetune.tasks.scores import selection_score
from finetune.tokenization.examples import Batch, Examples, longest_first
from finetune.training.checks import check_device, check_losses, check_parameters_finite
from finetune.training.interruption import Stopped, stop_on_signal
from finetune.training.micro_batches import move_batches
from finetune.training.plan import HeadFitter
from finetune.training.trainer import Trainer

# A scheduler sends a signal to all ranks, and their launcher forwards it to each rank again.
_COPIES_SECONDS = 1.0


@dataclass
class Progress:
    """The progress of a run. ``seconds`` includes validation and saving.

    ``unlabeled`` contains the number of unlabeled texts that a head was fitted on, and the fraction
    of test rows that a head without them predicts differently. ``misfits`` are the classes of a run
    without labels whose names don't resemble their texts. ``validations_since_best`` counts
    validations in a row that improved neither score nor loss.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    best_score: float | None = None
    best_loss: float = sys.float_info.max
    best_step: int = 0
    lowest_loss: float | None = None
    validations_since_best: int = 0
    unlabeled: dict[str, float] | None = None
    misfits: list[str] = field(default_factory=list)

    def note_validation(self, *, score: float, loss: float) -> bool:
        """Record a validation. Return whether its score is the best, or equal with a lower loss."""
        # With few examples, accuracy can plateau while the loss still falls.
        is_best = self.best_score is None or (score, -loss) > (self.best_score, -self.best_loss)
        is_lowest = self.lowest_loss is None or loss < self.lowest_loss
        if is_best:
            self.best_score, self.best_loss, self.best_step = score, loss, self.steps
        if is_lowest:
            self.lowest_loss = loss
        self.validations_since_best = 0 if is_best or is_lowest else self.validations_since_best + 1
        return is_best


class Storage(Protocol):
    """Storage for checkpoints, and for the trained parameters of the best model."""

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint with ``--save-strategy time``."""

    def save_best(self, trainer: "TrainingLoop") -> None:
        """Keep the trained parameters as the best model."""

    def save(self, trainer: "TrainingLoop") -> None:
        """Write a checkpoint."""


class TrainingLoop(Trainer):
    """Takes all steps of a run. All ranks validate, save and stop at the same points.

    The run sets ``examples``, by split, and ``checkpoints``.
    """

    examples: Mapping[str, Examples]
    checkpoints: Storage
    fitter: HeadFitter | None = None
    has_trained = False
    _stop_signal = 0

    @cached_property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress()

    def train(self) -> None:
        """Train from the current progress to the end. A signal raises ``Stopped``."""
        plan = self.plan
        copies_seconds = _COPIES_SECONDS * (distributed.world_size() > 1)
        with (
            stage("train", counts_as="steps"),
            stop_on_signal(apart_seconds=copies_seconds) as self._request,
        ):
            if plan.method.takes_steps:
                emit(events.Info(plan.describe(self.examples)))
            self._counted_at = time.perf_counter()
            try:
                if self.fitter and not self.is_over:
                    self.fitter.start()
                if plan.method.takes_steps:
                    self._train_epochs()
                elif self.fitter and not self.is_over:
                    self._fit_head_only(self.fitter)
            finally:
                self._count_seconds()
            # If a rank exited now, the launcher would kill the main one before the last checkpoint
            # is on disk.
            distributed.barrier()
            if self._stop_signal and not self.is_over:
                steps = f"step {self.progress.steps:,} of {plan.total_steps:,}"
                raise Stopped(self._stop_signal, f"stopped after {steps}")
        self.has_trained = self.is_over

    def _train_epochs(self) -> None:
        """Train epoch by epoch, and validate and save after each epoch."""
        plan, progress = self.plan, self.progress
        self._has_warned = False
        self._budget_bytes = self.device.memory.budget_bytes(None)
        if not self.is_over:
            self._check_device()
            distributed.barrier()  # only the main process compares
        while not self.is_over:
            self._train_epoch()
            if self._is_epoch_over:
                self.optimizer.zero_grad(set_to_none=True)
                self._check_parameters()
                if self.fitter and progress.steps == plan.total_steps:
                    self.fitter.finish()
                self.validate()
            distributed.barrier()  # saving the best model can take the main process a while
            stops = self._should_stop()
            if self.is_over and not stops:
                # The finished run replaces the last checkpoint.
                self._check_parameters()
            elif (
                stops
                or (plan.save_strategy == "epoch" and self._is_epoch_over)
                or self._is_save_due()
            ):
                self.save()
            if stops:
                break
        if self.is_over:
            self._check_device()
            if progress.steps < plan.total_steps:
                epoch = progress.best_step / plan.steps_per_epoch
                stopped = f"stopped: {plan.early_stopping_patience} validations without improvement"
                emit(events.Info(f"{stopped}; kept epoch {epoch:.3g}"))

    def _train_epoch(self) -> None:
        """Take the remaining steps of an epoch, or stop on a signal."""
        plan, progress, train = self.plan, self.progress, self.examples["train"]
        epoch, steps_done = divmod(progress.steps, plan.steps_per_epoch)
        batches: Sequence[Batch] = plan.batches(train, epoch=epoch)
        if self.device.shapes.pads_batches:
            batches = longest_first(batches)
        batches = batches[steps_done:][: plan.total_steps - progress.steps]
        set_training(self.model)
        # Keep losses on the device until a report, so that only reports wait for the device.
        self._unreported: list[tuple[Batch, torch.Tensor]] = []
        self._reported_at = time.perf_counter()
        for batch, cut in move_batches(train, batches, device=self.device):
            loss = self.step(progress.steps, cut)
            progress.steps += 1
            progress.examples += len(batch.indices)
            self._unreported.append((batch, loss))
            if progress.steps % plan.logging_steps == 0:
                self._report()
            if self._should_stop():
                break
            # After the last step of an epoch, validate first.
            if not self._is_epoch_over and self._is_save_due():
                self._report()
                self.save()
                self._reported_at = time.perf_counter()
        self._report()

    def _fit_head_only(self, fitter: HeadFitter) -> None:
        """Fit the linear head. There are no gradient steps."""
        self.progress.loss_sum += fitter.finish()
        self.progress.steps += 1
        self.progress.examples += len(self.examples["train"].labels)
        self._check_device()
        self.validate()
        # A head is small, and a killed run has no other checkpoint to resume from.
        if self.plan.save_strategy != "no":
            self.save()

    def validate(self) -> None:
        """Evaluate the model on the validation split, and keep it if it is the best so far.

        Without a validation split, keep the last model.
        """
        plan, progress = self.plan, self.progress
        if "validation" not in self.examples:
            if progress.steps == plan.total_steps:
                progress.best_step = progress.steps
                self.checkpoints.save_best(self)
            return
        with clock("validation"):
            scores = self.task.score(*self.predict("validation"))
        score = selection_score(plan.metric_for_best_model, self.task.problem_type, scores)
        is_best = progress.note_validation(score=score, loss=scores.metrics["loss"])
        if is_best:
            self.checkpoints.save_best(self)
        epoch = progress.steps / plan.steps_per_epoch
        emit(events.Validation(progress.steps, epoch, scores.metrics, is_best))

    def predict(self, split: str) -> tuple[NDArray[np.float32], Labels]:
        """Return the logits and labels of a split."""
        examples = self.examples[split]
        logits = self.predictor.logits(examples, padded_lengths=self.plan.padded_lengths)
        return logits, examples.labels

    def save(self) -> None:
        """Write a checkpoint, unless parameters are NaN or infinite."""
        self._check_parameters()
        self._count_seconds()
        self.checkpoints.save(self)
        distributed.barrier()

    @property
    def is_over(self) -> bool:
        """Whether all steps are taken or validations stopped improving."""
        patience: int = self.plan.early_stopping_patience
        has_stopped_improving = 0 < patience <= self.progress.validations_since_best
        return self.progress.steps >= self.plan.total_steps or has_stopped_improving

    @property
    def _is_epoch_over(self) -> bool:
        steps = self.progress.steps
        return steps == self.plan.total_steps or steps % self.plan.steps_per_epoch == 0

    def _is_save_due(self) -> bool:
        plan, steps = self.plan, self.progress.steps
        if plan.save_strategy == "steps":
            return bool(steps % plan.save_steps == 0)
        # Only at a report, so that the journal doesn't depend on time.
        is_reported = self._is_epoch_over or steps % plan.logging_steps == 0
        is_timed = plan.save_strategy == "time" and is_reported
        return is_timed and distributed.any_rank(self.checkpoints.is_due())

    def _should_stop(self) -> bool:
        """Return whether any rank received a signal. All ranks call this at the same points."""
        signal = self._request.number or 0
        self._stop_signal = distributed.all_reduce_max(signal, seconds=distributed.SECONDS_LATE)
        return self._stop_signal > 0

    def _report(self) -> None:
        """Check and report the steps since the last report, if any."""
        if not self._unreported:
            return
        batches, tensors = zip(*self._unreported, strict=True)
        self._unreported.clear()
        losses = torch.stack(tensors).tolist()
        plan, done, memory = self.plan, self.progress.steps, self.device.memory
        check_losses(losses, batches, last_step=done)
        now = time.perf_counter()
        seconds, self._reported_at = now - self._reported_at, now
        self.progress.loss_sum += sum(losses)
        emit(
            events.Step(
                step=done,
                total_steps=plan.total_steps,
                epoch=done / plan.steps_per_epoch,
                loss=sum(losses) / len(losses),
                learning_rate=plan.rate_at(done - 1),
                examples_per_second=sum(len(batch.indices) for batch in batches) / seconds,
                memory_bytes=memory.allocated_bytes(),
                reserved_bytes=memory.reserved_bytes(),
                budget_bytes=self._budget_bytes,
                remaining_seconds=seconds / len(losses) * (plan.total_steps - done),
            )
        )
        if memory.cache_exceeds_limit():
            memory.release()
        reason = self.cuda_graph_error
        if self.captured and self.examples["train"].windows is not None:
            reason = "texts have different numbers of windows"
        if reason is not None and not self._has_warned:
            self._has_warned = True
            message = f"steps run without CUDA graphs, which is slower, because {reason}"
            emit(events.WarningMessage(message))

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._counted_at
        self._counted_at = now

    def _check_device(self) -> None:
        if self.plan.checks_device:
            with clock("device check"), distributed.alone():
                check_device(self, self.examples["train"], step=self.progress.steps)

    def _check_parameters(self) -> None:
        check_parameters_finite(self.trained_parameters(), step=self.progress.steps)
