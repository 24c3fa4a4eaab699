"""Training: epochs of steps, then validation and saving, until the last step or a stop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from finetune import distributed, events
from finetune.config.schema import SaveStrategy
from finetune.devices.batch_size import BatchSize
from finetune.errors import LossNotFiniteError
from finetune.events import emit
from finetune.model.freeze import set_training
from finetune.tokenization.buckets import Batch, longest_first
from finetune.tokenization.examples import Examples
from finetune.training.guard import ParameterGuard
from finetune.training.micro_batches import move_batches
from finetune.training.snapshot import Progress
from finetune.training.step import TrainingState, total_norm

# Adam's first steps are as long as the learning rate. A norm's weights start at 1, where the next
# number in fp32 is 6e-8 away, so that shorter steps may rightly change nothing.
MIN_VISIBLE_RATE = 1e-6


@dataclass(frozen=True)
class LoopSettings:
    """What a run does besides its steps.

    Args:
        logging_steps: Steps between two reports of the loss.
        patience: Validations in a row without a better score or a lower loss after which training
            stops; 0: never.
        validate: Returns a score, of which the highest chooses the best model, and metrics with
            ``loss``, of the validation split; None if there is none.
        save_progress: Saves progress; without True, only if the run then fails to finish.
        is_save_due: Whether so much time has passed since the last saving that ``time`` saves.
        finish: Called after the last step, before the model is validated and kept.
    """

    batch_size: BatchSize
    steps_per_epoch: int
    logging_steps: int
    patience: int
    plan_epoch: Callable[[int], Sequence[Batch]]
    validate: Callable[[], tuple[float, Mapping[str, float]]] | None
    save_best: Callable[[Progress], None]
    save_progress: Callable[[Progress, bool], None]
    saves: SaveStrategy
    save_steps: int
    is_save_due: Callable[[], bool]
    check_device: Callable[[], None]
    should_stop: Callable[[], bool]
    finish: Callable[[], object] | None = None


def train(
    state: TrainingState, examples: Examples, progress: Progress, settings: LoopSettings
) -> None:
    """Take a run's steps from where it stands to its end, or until the user stops it.

    State and progress are changed in place.
    """
    log = _StepLog(state, progress, settings, has_windows=examples.windows is not None)

    def is_training_over() -> bool:
        total_steps = state.schedule.total_steps
        return is_over(progress, total_steps=total_steps, patience=settings.patience)

    def is_epoch_over() -> bool:
        is_last_step = progress.steps == state.schedule.total_steps
        return is_last_step or progress.steps % settings.steps_per_epoch == 0

    def is_save_due() -> bool:
        if settings.saves == "steps":
            return progress.steps % settings.save_steps == 0
        # At a report, so that the rows of the journal do not depend on the time.
        is_reported = is_epoch_over() or progress.steps % settings.logging_steps == 0
        return (
            settings.saves == "time"
            and is_reported
            and distributed.any_rank(settings.is_save_due())
        )

    def save(*, writes: bool = True) -> None:
        _check_parameters_finite(state, progress)
        settings.save_progress(progress, writes)
        distributed.barrier()

    if not is_training_over():
        settings.check_device()
        distributed.barrier()  # the main process alone compares
    while not is_training_over():
        set_training(state.model)
        log.start_clock()
        batches = _batches_left(state, progress, settings)
        for batch, cut in move_batches(examples, batches, device=state.device):
            loss = state.step(progress.steps, cut, settings.batch_size)
            progress.steps += 1
            log.add(batch, loss)
            if progress.steps % settings.logging_steps == 0:
                log.write()
            if settings.should_stop():
                break
            # After the last step of an epoch the validation comes first.
            if not is_epoch_over() and is_save_due():
                log.write()
                save()
                log.start_clock()
        log.write()
        if is_epoch_over():
            state.optimizer.zero_grad(set_to_none=True)
            _check_parameters_finite(state, progress)
            _validate(state, progress, settings)
        distributed.barrier()  # the main process may take its time to keep the best model
        stops = settings.should_stop()
        if is_training_over() and not stops:
            save(writes=False)  # the finished run takes its place
        elif stops or (settings.saves == "epoch" and is_epoch_over()) or is_save_due():
            save()
        if stops:
            break
    if is_training_over():
        settings.check_device()
        if progress.steps < state.schedule.total_steps:
            epoch = progress.best_step / settings.steps_per_epoch
            stopped = f"stopped: {settings.patience} validations without improvement"
            emit(events.Info(f"{stopped}; kept epoch {epoch:.3g}"))


def solve_at_once(
    state: TrainingState, progress: Progress, settings: LoopSettings, *, solve: Callable[[], float]
) -> None:
    """Take the only step of a run whose output layer is solved; ``solve`` returns its loss."""
    progress.loss_sum += solve()
    progress.steps += 1
    settings.check_device()
    _validate(state, progress, settings)
    # An output layer is written in no time, and nothing else says where a killed run goes on.
    settings.save_progress(progress, settings.saves != "no")


def is_over(progress: Progress, *, total_steps: int, patience: int) -> bool:
    """Return whether a run has taken all its steps, or has stopped improving."""
    has_stopped_improving = 0 < patience <= progress.validations_since_best
    return progress.steps >= total_steps or has_stopped_improving


def _batches_left(
    state: TrainingState, progress: Progress, settings: LoopSettings
) -> Sequence[Batch]:
    """Return the effective batches of an epoch whose steps are still to be taken."""
    epoch, steps_done = divmod(progress.steps, settings.steps_per_epoch)
    batches = settings.plan_epoch(epoch)
    if state.device.shapes.pads_batches:
        batches = longest_first(batches)
    return batches[steps_done:][: state.schedule.total_steps - progress.steps]


def _validate(state: TrainingState, progress: Progress, settings: LoopSettings) -> None:
    """Validate the model and save it if it is the best; without a validation, the last is."""
    if settings.finish and progress.steps == state.schedule.total_steps:
        settings.finish()
    if settings.validate is None:
        if progress.steps == state.schedule.total_steps:
            progress.best_step = progress.steps
            settings.save_best(progress)
        return
    score, metrics = settings.validate()
    is_best = progress.note_validation(score=score, loss=metrics["loss"])
    if is_best:
        settings.save_best(progress)
    epoch = progress.steps / settings.steps_per_epoch
    emit(events.Validation(progress.steps, epoch, metrics, is_best))


def _check_parameters_finite(state: TrainingState, progress: Progress) -> None:
    """Refuse a model that a step has broken; the loss would show it one step later."""
    parameters = (one.detach() for one in state.trained_parameters().values())
    if not total_norm(parameters).isfinite():
        raise LossNotFiniteError(
            f"parameters are NaN or infinite after step {progress.steps}",
            remedy="lower --learning-rate, or use --precision fp32",
        )


class _StepLog:
    """Collects losses on the device and reads them together: only that waits for the device."""

    def __init__(
        self, state: TrainingState, progress: Progress, settings: LoopSettings, *, has_windows: bool
    ) -> None:
        self._state, self._progress, self._settings = state, progress, settings
        self._has_windows = has_windows
        self._batches: list[Batch] = []
        self._losses: list[torch.Tensor] = []
        # Gradients of a resumed run may have become too small to change what they train.
        self._guard = ParameterGuard(state.model) if progress.steps == 0 else None
        self._budget_bytes = state.device.memory.budget_bytes(None)
        self._since = 0.0
        self._has_warned = False

    def start_clock(self) -> None:
        self._since = time.perf_counter()

    def add(self, batch: Batch, loss: torch.Tensor) -> None:
        if self._guard:
            self._guard.note_gradients(self._state.model)
        self._batches.append(batch)
        self._losses.append(loss)

    def write(self) -> None:
        """Check and report the steps since the last report, if there are any."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).tolist()
        self._check_losses(losses)
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        examples = sum(len(batch.indices) for batch in self._batches)
        self._batches, self._losses = [], []
        self._progress.loss_sum += sum(losses)
        done, schedule = self._progress.steps, self._state.schedule
        memory, rate = self._state.device.memory, schedule.learning_rate_at(done - 1)
        is_visible = rate >= MIN_VISIBLE_RATE
        if self._guard and is_visible and self._state.took_last_step:
            self._guard.check(self._state.model)
            self._guard = None
        emit(
            events.Step(
                step=done,
                total_steps=schedule.total_steps,
                epoch=done / self._settings.steps_per_epoch,
                loss=sum(losses) / len(losses),
                learning_rate=rate,
                examples_per_second=examples / seconds,
                memory_bytes=memory.allocated_bytes(),
                reserved_bytes=memory.reserved_bytes(),
                budget_bytes=self._budget_bytes,
                remaining_seconds=seconds / len(losses) * (schedule.total_steps - done),
            )
        )
        if memory.cache_exceeds_limit():
            memory.release()
        reason = self._state.cuda_graph_error
        if self._state.captured and self._has_windows:
            reason = "the windows of texts differ in number"
        if reason is not None and not self._has_warned:
            self._has_warned = True
            message = f"steps are slower, since no CUDA graph can hold them: {reason}"
            emit(events.WarningMessage(message))

    def _check_losses(self, losses: Sequence[float]) -> None:
        for index, loss in enumerate(losses):
            if not math.isfinite(loss):
                step = self._progress.steps - len(losses) + index + 1
                raise LossNotFiniteError(
                    f"the loss is {loss} at step {step}",
                    remedy="lower --learning-rate, use --precision fp32, or look at these texts",
                    examples=self._batches[index].indices.tolist(),
                )
