"""The training loop: loss, gradients, steps, validation, checkpoints, and what ends it.

The part of a step that needs memory comes first and changes only gradients. If memory runs out, it
is repeated with the same random numbers in smaller micro-batches, and gives the same gradients.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from copy import copy
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune import distributed, events
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.captured import CapturedFunction, Tensors
from finetune.evaluation.predict import Predictor
from finetune.events import clock, emit, stage
from finetune.model.structure import set_training
from finetune.tasks.base import Labels, Task
from finetune.tasks.scores import selection_score
from finetune.tokenization.examples import Batch, Examples, Inputs, longest_first
from finetune.training.checks import check_device, check_losses, check_parameters_finite
from finetune.training.interruption import Stopped, StopRequest, stop_on_signal
from finetune.training.micro_batches import MicroBatch, move_batches
from finetune.training.optimizers import (
    build_optimizer,
    clip_gradients,
    flatten,
    gradients_of,
    make_state,
    set_learning_rate,
    trained_by,
    unflatten,
)
from finetune.training.plan import HeadFitter, Plan, contrastive_losses
from finetune.training.progress import Progress

# Logits in fp32, [examples, outputs], and labels give the loss of each example: fp32, [examples].
# A contrastive loss, which compares the examples with each other, reads their loss weights too.
Losses = Callable[..., torch.Tensor]
Cut = Callable[[int], Iterable[MicroBatch]]

# A scheduler sends a signal to all ranks, and their launcher forwards it to each rank again.
_COPIES_SECONDS = 1.0


class Storage(Protocol):
    """Storage for checkpoints, and for the trained parameters of the best model."""

    def is_due(self) -> bool:
        """Return whether it is time for a checkpoint with ``--save-strategy time``."""

    def save_best(self, trainer: "Trainer") -> None:
        """Keep the trained parameters as the best model."""

    def save(self, trainer: "Trainer") -> None:
        """Write a checkpoint."""


class Trainer:
    """Trains a model on a device, in place, according to a plan.

    ``head`` has the names of the head's parameters. The head and all trainable parameters stay in
    fp32. With ``frozen_in_bf16``, frozen matrices are stored in bf16, to which autocast would round
    them at every step. In fp16, ``scaler`` scales losses. ``captured`` is a step without its
    learning rate, as CUDA graphs, if the device has them. A run sets ``examples`` by split, and
    ``checkpoints``.
    """

    examples: Mapping[str, Examples]
    checkpoints: Storage
    fitter: HeadFitter | None = None
    captured: CapturedFunction | None = None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        task: Task,
        device: Device,
        head: Set[str],
        batch_size: BatchSize | None = None,
        eval_batch_size: BatchSize | None = None,
        frozen_in_bf16: bool = False,
    ) -> None:
        self.model, self.plan, self.task, self.device = model, plan, task, device
        self.losses: Losses = contrastive_losses if plan.method.is_contrastive else task.losses
        self.optimizer = build_optimizer(model, plan, head=head, device=device)
        if frozen_in_bf16 and plan.precision == "bf16":
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and not parameter.requires_grad and name not in head:
                    parameter.data = parameter.data.to(torch.bfloat16)
        move_to_device(model, device.torch_device)
        is_fp16 = plan.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.torch_device.type, enabled=is_fp16)
        self.batch_size = batch_size or BatchSize(1, "batch size", device)
        eval_batch_size = eval_batch_size or self.batch_size
        self.predictor = Predictor(model, device, plan.precision, eval_batch_size)
        self.progress = Progress()
        self.has_trained, self._stop_signal = False, 0
        self._request = StopRequest()
        if not self.cuda_graph_error:
            # A copy, so that the graphs don't keep the trainer alive.
            self.captured = device.capture(copy(self)._captured_step)

    def train(self) -> None:
        """Train from the current progress to the end; a signal raises ``Stopped``."""
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
        """Train epoch by epoch; after each, validate and save."""
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
            distributed.barrier()  # the main process may take its time to keep the best model
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
        """Take the remaining steps of an epoch, or stop at a signal."""
        plan, progress, train = self.plan, self.progress, self.examples["train"]
        epoch, steps_done = divmod(progress.steps, plan.steps_per_epoch)
        batches: Sequence[Batch] = plan.batches(train, epoch=epoch)
        if self.device.shapes.pads_batches:
            batches = longest_first(batches)
        batches = batches[steps_done:][: plan.total_steps - progress.steps]
        set_training(self.model)
        # Losses stay on the device until a report: only reports wait for the device.
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
            # After the last step of an epoch the validation comes first.
            if not self._is_epoch_over and self._is_save_due():
                self._report()
                self.save()
                self._reported_at = time.perf_counter()
        self._report()

    def _fit_head_only(self, fitter: HeadFitter) -> None:
        """Take the only step of a run without steps: fit its linear head."""
        self.progress.loss_sum += fitter.finish()
        self.progress.steps += 1
        self.progress.examples += len(self.examples["train"].labels)
        self._check_device()
        self.validate()
        # A head is written quickly, and a killed run has no other checkpoint to continue from.
        if self.plan.save_strategy != "no":
            self.save()

    def step(self, number: int, cut: Cut) -> torch.Tensor:
        """Take a step, numbered from 0; return its loss, a scalar on the device.

        ``cut`` returns the micro-batches for a batch size. When memory runs out, all ranks halve
        the batch size together. ``BatchDoesNotFitError`` is raised if one example does not fit.
        """
        random_state = self.device.random_state()
        while True:
            try:
                with distributed.oom_on_all_ranks(self.device.memory):
                    finish = self.compute_gradients(cut(self.batch_size.examples))
                break
            except (RuntimeError, MemoryError) as error:
                self.batch_size.raise_unless_smaller_fits(error)
            # Not in the except block, whose traceback keeps the tensors alive.
            self.discard_gradients()
            self.device.set_random_state(random_state)
            self.batch_size.halve()
        set_learning_rate(self.optimizer, self.plan.rate_at(number))
        return finish()

    def take_step(self, number: int, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Take a step with these micro-batches, without repeating it if memory runs out."""
        finish = self.compute_gradients(micro_batches)
        set_learning_rate(self.optimizer, self.plan.rate_at(number))
        return finish()

    def compute_gradients(self, micro_batches: Iterable[MicroBatch]) -> Callable[[], torch.Tensor]:
        """Compute the gradients of a step; return a function that changes the weights.

        It changes nothing but gradients, and waits neither for the device nor for other ranks.
        """
        make_state(self.optimizer)
        if any(parameter.grad is not None for parameter in trained_by(self.optimizer)):
            self.optimizer.zero_grad(set_to_none=True)
        if self.captured:
            micro_batches = list(micro_batches)
            has_windows = any(each.members is not None for each in micro_batches)
            tensors = [each.tensors() for each in micro_batches]
            if not has_windows and (replay := self.captured.prepare(tensors)):
                return replay
        losses = []
        for micro_batch in micro_batches:
            if micro_batch.members is not None and micro_batch.parts:
                loss = self._backward_by_slices(micro_batch)
            else:
                logits = list(map(self.logits, micro_batch.slices()))
                loss = self.loss(torch.cat(logits), micro_batch)
                torch.autograd.backward(self.scaler.scale(loss))
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        flat_gradients = None
        if distributed.world_size() > 1:
            # With bf16, gradients have 16 bits anyway, and half as many bytes have to be sent.
            dtype = torch.bfloat16 if self.plan.precision == "bf16" else torch.float32
            flat_gradients = flatten(gradients_of(self.optimizer), dtype=dtype)
        else:
            self._clip_gradients()
        return partial(self._change_weights, loss, flat_gradients)

    def _backward_by_slices(self, batch: MicroBatch) -> torch.Tensor:
        """Go backward through one example in slices of its windows; return its loss.

        The first pass gives the logits of all windows, and so the gradient of the loss with respect
        to each logit. The second pass goes backward from these gradients with the same dropout.
        """
        random_state = self.device.random_state()
        # The graph is not needed, but the second pass must use the same kernels.
        logits = torch.cat([self.logits(inputs).detach() for inputs in batch.slices()])
        loss = self.loss(logits.requires_grad_(), batch)
        [gradient] = torch.autograd.grad(loss, [logits])
        self.device.set_random_state(random_state)
        gradients = torch.split(gradient, [rows for rows, _ in batch.parts])
        for inputs, slice_gradient in zip(batch.slices(), gradients, strict=True):
            slice_loss = (self.logits(inputs) * slice_gradient).sum()
            torch.autograd.backward(self.scaler.scale(slice_loss))
        return loss

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Return the model's logits in fp32, computed in the precision of the run."""
        with self.device.autocast(self.plan.precision):
            logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()

    def loss(self, logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the sum of the examples' weighted losses: a scalar in fp32."""
        weights, arguments = micro_batch.loss_weights, [micro_batch.labels]
        if self.losses is contrastive_losses:
            arguments.append(weights)
        return (self.losses(micro_batch.aggregate(logits), *arguments) * weights).sum()

    def _change_weights(
        self, loss: torch.Tensor, flat_gradients: torch.Tensor | None
    ) -> torch.Tensor:
        if flat_gradients is not None:
            distributed.all_reduce_sum(loss)
            distributed.all_reduce_sum(flat_gradients)
            unflatten(flat_gradients, gradients_of(self.optimizer))
            self._clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _captured_step(self, micro_batches: Sequence[Tensors]) -> torch.Tensor:
        loss = self.compute_gradients(map(MicroBatch.from_tensors, micro_batches))()
        # The next captured shape may reuse the gradients' memory.
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _clip_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_gradients(self.optimizer, self.plan.max_grad_norm, device=self.device)

    def discard_gradients(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self.optimizer.zero_grad(set_to_none=True)
        # The scaler remembers that gradients were unscaled until a scale is set. It has a scale
        # from the first loss on.
        self.scaler.scale(torch.zeros((), device=self.device.torch_device))
        self.scaler.update(self.scaler.get_scale())
        if self.captured:
            self.captured.clear()

    def validate(self) -> None:
        """Score the model on the validation split, and keep it if it is the best so far.

        Without a validation split the last model is kept.
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
        """Return logits and labels of a split."""
        examples = self.examples[split]
        logits = self.predictor.logits(examples, padded_lengths=self.plan.padded_lengths)
        return logits, examples.labels

    def save(self) -> None:
        """Write a checkpoint, unless a step has broken the model."""
        self._check_parameters()
        self._count_seconds()
        self.checkpoints.save(self)
        distributed.barrier()

    @property
    def is_over(self) -> bool:
        """Whether all steps are taken, or validations have stopped improving."""
        has_stopped_improving = (
            0 < self.plan.early_stopping_patience <= self.progress.validations_since_best
        )
        return self.progress.steps >= self.plan.total_steps or has_stopped_improving

    @property
    def _is_epoch_over(self) -> bool:
        steps = self.progress.steps
        return steps == self.plan.total_steps or steps % self.plan.steps_per_epoch == 0

    def _is_save_due(self) -> bool:
        plan, steps = self.plan, self.progress.steps
        if plan.save_strategy == "steps":
            return steps % plan.save_steps == 0
        # Only at a report, so that the rows of the journal do not depend on time.
        is_reported = self._is_epoch_over or steps % plan.logging_steps == 0
        is_timed = plan.save_strategy == "time" and is_reported
        return is_timed and distributed.any_rank(self.checkpoints.is_due())

    def _should_stop(self) -> bool:
        """Return whether a signal reached any rank; all ranks call this at the same points."""
        signal = self._request.number or 0
        self._stop_signal = distributed.all_reduce_max(signal, seconds=distributed.SECONDS_LATE)
        return self._stop_signal > 0

    def _report(self) -> None:
        """Check and report the steps since the last report, if there are any."""
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
            message = f"steps run without CUDA graphs and are slower, because {reason}"
            emit(events.WarningMessage(message))

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.progress.seconds += now - self._counted_at
        self._counted_at = now

    def _check_device(self) -> None:
        if self.plan.checks_device:
            with clock("device check"), distributed.alone():
                check_device(self, self.examples["train"])

    @property
    def cuda_graph_error(self) -> str | None:
        """Why steps can't be captured as CUDA graphs; None if they can, or without CUDA graphs."""
        if self.captured or not self.device.captures:
            return self.captured.failure if self.captured else None
        if self.scaler.is_enabled():
            return "gradients are scaled in fp16"
        if any(getattr(each, "gradient_checkpointing", False) for each in self.model.modules()):
            return "gradient checkpointing repeats random numbers"
        return None

    def _check_parameters(self) -> None:
        check_parameters_finite(self.trained_parameters(), step=self.progress.steps)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        parameters = self.model.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}
