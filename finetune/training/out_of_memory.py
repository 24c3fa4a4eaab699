"""A step that is taken again in smaller pieces when memory runs out."""

from collections.abc import Callable, Iterable

import torch

from finetune.devices.batch_size import BatchSize
from finetune.training.micro_batches import StepPart
from finetune.training.optimizer import make_room_for_step, make_state
from finetune.training.training_state import TrainingState


def step_with_retries(
    training_state: TrainingState,
    number: int,
    *,
    cut: Callable[[int], Iterable[StepPart]],
    batch_size: BatchSize,
) -> torch.Tensor:
    """Take a step in pieces that fit: whatever they are, it is a step of the same examples.

    All that needs memory comes before the optimizer's step and changes nothing but gradients and
    random states, so that it can be repeated. A step that has begun can not; its state exists by
    then, and what else it takes has just been free.

    Args:
        training_state: Changed in place.
        number: Of the step, counted from 0.
        cut: Cuts the effective batch into micro-batches of at most so many examples.
        batch_size: How many to begin with; fewer afterwards if they did not fit.

    Returns:
        The loss, a scalar on the device.

    Raises:
        BatchDoesNotFit: If not even one example fits.
    """
    random_state = training_state.device.random_state()

    def prepare(examples: int) -> Callable[[int], torch.Tensor]:
        with training_state.processes.oom_on_all_ranks(training_state.device.memory):
            make_state(training_state.optimizer)
            take_step = training_state.prepare_step(cut(examples))
            make_room_for_step(training_state.optimizer)
        return take_step

    def undo() -> None:
        training_state.discard_gradients()
        training_state.device.set_random_state(random_state)

    take_step = batch_size.retry_on_out_of_memory(prepare, undo=undo)
    return take_step(number)
