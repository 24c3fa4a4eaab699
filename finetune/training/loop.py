"""Epochs of steps, with logging, validation and checkpoints between them."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from finetune import events
from finetune.devices.batch_size import BatchSize
from finetune.devices.host import gibibytes
from finetune.distributed.processes import MAX_SECONDS, SECONDS_LATE
from finetune.errors import LossNotFinite
from finetune.events import Emit
from finetune.model.freeze import set_training
from finetune.tokenization.buckets import Batch, longest_first
from finetune.tokenization.examples import Examples
from finetune.training.clipping import total_norm
from finetune.training.device_check import (
    SHARE_AT_REPORTS,
    SHARE_BEFORE_SAVING,
    CheckedBatches,
    DeviceCheck,
)
from finetune.training.guard import ParameterGuard
from finetune.training.micro_batches import move_batches
from finetune.training.out_of_memory import step_with_retries
from finetune.training.snapshot import Progress
from finetune.training.training_state import TrainingState

# Adam's first steps are as long as the learning rate. A norm's weights stand at 1, where the next
# number in fp32 is 6e-8 away, so shorter steps may change nothing, and rightly so.
MIN_VISIBLE_RATE = 1e-6


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found.

    Args:
        score: Higher is better; it chooses the best model.
        metrics: By name, such as ``accuracy``; ``loss`` among them.
    """

    score: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class LoopSettings:
    """What a run does between its steps.

    Args:
        batch_size: Examples in one forward and backward; fewer after memory ran out.
        steps_per_epoch: Effective batches in a pass over the training split.
        logging_steps: Steps between two readings of the loss.
        patience: Validations in a row without a better score or a lower loss after which training
            stops; 0: never.
        plan_epoch: Returns an epoch's effective batches from its number.
        validate: Tries the model on the validation split; None if there is none.
        save_best: Saves the model as the best so far.
        save_progress: Saves what is needed to resume.
        saves_each_epoch: Whether to do so after every epoch, not only when stopped.
        save_every_steps: Steps between two savings within an epoch; None: never.
        save_seconds: Seconds from one saving to the next report of the loss that saves; 0: never.
        checked_lengths: Padded lengths at which the device is compared with the CPU, ascending;
            none where it is not.
        should_stop: Whether the user asked to stop.
        emit: Receives steps and validations.
    """

    batch_size: BatchSize
    steps_per_epoch: int
    logging_steps: int
    patience: int
    plan_epoch: Callable[[int], Sequence[Batch]]
    validate: Callable[[], ValidationResult] | None
    save_best: Callable[[Progress], None]
    save_progress: Callable[[Progress], None]
    saves_each_epoch: bool
    save_every_steps: int | None
    save_seconds: float
    checked_lengths: Sequence[int]
    should_stop: Callable[[], bool]
    emit: Emit


def train(
    training_state: TrainingState, examples: Examples, progress: Progress, settings: LoopSettings
) -> None:
    """Take a run's steps from where it stands to its end, or until the user stops it.

    Validates, and saves, after each epoch and at the end.

    Args:
        training_state: The model and its optimizer; changed in place.
        examples: The training split.
        progress: Where the run stands; changed in place.
        settings: What happens between the steps.

    Raises:
        LossNotFinite: If a loss is NaN or infinite.
        WrongParametersChanged: If the first steps changed what is frozen, or not what trains.
        DeviceDiffers: If the device computes something else than the CPU.
        BatchDoesNotFit: If not even one example fits the device's memory.
    """
    batches = CheckedBatches(
        examples.without_windows(), settings.checked_lengths, settings.batch_size
    )
    device_check = DeviceCheck(training_state, progress, batches, emit=settings.emit)
    training = _Training(training_state, examples, progress, settings, device_check)
    log, saver = _StepLog(training), _Saver(training)
    total_steps = training_state.schedule.total_steps
    while not is_over(progress, total_steps=total_steps, patience=settings.patience):
        log.start_clock()
        _train_epoch(training, log, saver)
        log.write()
        if training.is_validation_due:
            training_state.optimizer.zero_grad(set_to_none=True)
            saver.check()
            _validate(training)
        # The main process may take its time to keep the best model.
        training_state.processes.barrier()
        stops = settings.should_stop()
        if settings.saves_each_epoch or stops:
            saver.save()
        if stops:
            return


@dataclass(frozen=True)
class _Training:
    """What trains, on which examples, how far it is, and what happens between its steps."""

    state: TrainingState
    examples: Examples
    progress: Progress
    settings: LoopSettings
    device_check: DeviceCheck

    @property
    def is_validation_due(self) -> bool:
        """Whether the last step has ended an epoch, or the run."""
        steps = self.progress.steps
        is_epoch_over = steps % self.settings.steps_per_epoch == 0
        return is_epoch_over or steps == self.state.schedule.total_steps


def _train_epoch(training: _Training, log: "_StepLog", saver: "_Saver") -> None:
    """Take the steps that are left of an epoch, or until the user stops it."""
    training_state, progress, settings = training.state, training.progress, training.settings
    device, processes = training_state.device, training_state.processes
    set_training(training_state.model)
    epoch, done = divmod(progress.steps, settings.steps_per_epoch)
    batches = settings.plan_epoch(epoch)
    if device.shapes.pads_batches:
        batches = longest_first(batches)
    left_steps = training_state.schedule.total_steps - progress.steps
    batches = batches[done:][:left_steps]
    for batch, cut in move_batches(training.examples, batches, device=device, processes=processes):
        loss = step_with_retries(
            training_state, progress.steps, cut=cut, batch_size=settings.batch_size
        )
        progress.steps += 1
        log.add(batch, loss)
        if progress.steps % settings.logging_steps == 0:
            log.write()
            # The main process may take its time to compare its device with the CPU.
            is_compared = not device.is_reference
            processes.barrier(seconds=MAX_SECONDS if is_compared else SECONDS_LATE)
        if settings.should_stop():
            return
        if saver.is_due():
            log.write()
            saver.save()
            log.start_clock()


def is_over(progress: Progress, *, total_steps: int, patience: int) -> bool:
    """Return whether a run has taken all its steps, or has stopped improving."""
    has_stopped_improving = 0 < patience <= progress.validations_since_best
    return progress.steps >= total_steps or has_stopped_improving


def _check_parameters_finite(training: _Training) -> None:
    """Refuse a model that a step has broken; the loss would show it only one step later."""
    parameters = (one.detach() for one in training.state.trained_parameters().values())
    if not total_norm(parameters).isfinite():
        raise LossNotFinite(
            f"parameters are NaN or infinite after step {training.progress.steps}",
            remedy="lower --learning-rate, or use --precision fp32",
        )


def _validate(training: _Training) -> None:
    """Validate the model and save it if it is the best; without a validation, the last is."""
    progress, settings = training.progress, training.settings
    if settings.validate is None:
        if progress.steps == training.state.schedule.total_steps:
            progress.best_step = progress.steps
            settings.save_best(progress)
        return
    found = settings.validate()
    is_best = progress.note_validation(score=found.score, loss=found.metrics["loss"])
    if is_best:
        settings.save_best(progress)
    epoch = progress.steps / settings.steps_per_epoch
    settings.emit(events.Validation(progress.steps, epoch, found.metrics, is_best))


class _Saver:
    """Saves progress, also within an epoch: after some steps, or some time since the last."""

    def __init__(self, training: _Training) -> None:
        self._training = training
        self._saved_at = time.monotonic()

    def is_due(self) -> bool:
        steps, settings = self._training.progress.steps, self._training.settings
        if self._training.is_validation_due:
            return False  # it is saved afterwards
        if settings.save_every_steps and steps % settings.save_every_steps == 0:
            return True
        # At a report, so that the rows of the journal do not depend on the time.
        if settings.save_seconds == 0 or steps % settings.logging_steps:
            return False
        passed_seconds = time.monotonic() - self._saved_at
        return self._training.state.processes.any(passed_seconds >= settings.save_seconds)

    def check(self) -> None:
        """Raise if what would be saved is broken."""
        _check_parameters_finite(self._training)
        self._training.device_check.check_within(SHARE_BEFORE_SAVING)

    def save(self) -> None:
        self.check()
        self._training.settings.save_progress(self._training.progress)
        self._training.state.processes.barrier()
        self._saved_at = time.monotonic()


class _StepLog:
    """Collects losses on the device and reads them together: only that synchronizes."""

    def __init__(self, training: _Training) -> None:
        self._training = training
        self._state, self._progress, self._settings = (
            training.state, training.progress, training.settings
        )  # fmt: skip
        self._batches: list[Batch] = []
        self._losses: list[torch.Tensor] = []
        self._first_step = training.progress.steps
        self._guard: ParameterGuard | None = ParameterGuard(training.state.model)
        self._budget_bytes = training.state.device.memory.budget_bytes(None)
        self._since = 0.0
        self._has_warned_of_cache = False
        self._has_warned_of_launches = False

    def start_clock(self) -> None:
        self._since = time.perf_counter()

    def add(self, batch: Batch, loss: torch.Tensor) -> None:
        if self._guard:
            self._guard.note_gradients(self._state.model)
        self._batches.append(batch)
        self._losses.append(loss)
        self._training.device_check.check_step()

    def write(self) -> None:
        if not self._losses:
            return
        losses = torch.stack(self._losses).tolist()
        self._check_losses(losses)
        now = time.perf_counter()
        seconds = now - self._since
        self._since = now
        examples = sum(len(batch.indices) for batch in self._batches)
        self._batches, self._losses = [], []
        self._progress.seconds += seconds
        self._progress.loss_sum += sum(losses)
        self._check_parameters()
        self._settings.emit(self._update(losses, examples=examples, seconds=seconds))
        self._watch_cache()
        self._warn_of_launches()
        self._since += self._training.device_check.check_within(SHARE_AT_REPORTS)

    def _update(self, losses: Sequence[float], *, examples: int, seconds: float) -> events.Step:
        done, schedule = self._progress.steps, self._state.schedule
        memory = self._state.device.memory
        return events.Step(
            step=done,
            total_steps=schedule.total_steps,
            epoch=done / self._settings.steps_per_epoch,
            loss=sum(losses) / len(losses),
            learning_rate=schedule.learning_rate_at(done - 1),
            examples_per_second=examples / seconds,
            memory_bytes=memory.used_bytes(),
            held_bytes=memory.held_bytes(),
            budget_bytes=self._budget_bytes,
            remaining_seconds=seconds / len(losses) * (schedule.total_steps - done),
        )

    def _warn_of_launches(self) -> None:
        """Say once if the steps of a device that captures them can't be captured."""
        reason = self._state.cuda_graph_error
        if self._state.captured and self._training.examples.windows:
            reason = "the windows of texts differ in number"
        if reason is None or self._has_warned_of_launches:
            return
        self._has_warned_of_launches = True
        self._settings.emit(
            events.WarningMessage(
                f"steps can't be captured as a whole ({reason}): they take longer, since each "
                "operation is launched by itself"
            )
        )

    def _watch_cache(self) -> None:
        """Empty the device's cache if it grows without bound, with one warning."""
        device = self._state.device
        if not device.memory.cache_exceeds_limit():
            return
        if not self._has_warned_of_cache:
            self._has_warned_of_cache = True
            self._settings.emit(
                events.WarningMessage(
                    f"{device.name} held {gibibytes(device.memory.held_bytes())} beside "
                    f"{gibibytes(device.memory.used_bytes())} in use: its cache is emptied "
                    "whenever it grows like this",
                    remedy="if the machine is slow, lower --batch-size or --max-length",
                )
            )
        device.memory.release()

    def _check_losses(self, losses: Sequence[float]) -> None:
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                step = self._progress.steps - len(losses) + index + 1
                raise LossNotFinite(
                    f"the loss is {loss} at step {step}",
                    remedy="lower --learning-rate, use --precision fp32, or look at these texts",
                    examples=self._batches[index].indices.tolist(),
                )

    def _check_parameters(self) -> None:
        """Compare the parameters with those before training, once steps can be seen in them."""
        taken = self._progress.steps - self._first_step
        rate = self._state.schedule.learning_rate_at(self._progress.steps - 1)
        is_visible = rate >= MIN_VISIBLE_RATE
        skipped_steps = self._state.accelerator.skipped_steps
        if self._guard and is_visible and taken > skipped_steps():
            self._guard.check(self._state.model)
            self._guard = None
