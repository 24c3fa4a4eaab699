"""When memory runs out: the same work again, in smaller pieces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from finetune import events
from finetune.devices.base import Device
from finetune.errors import BatchDoesNotFit
from finetune.events import Emit
from finetune.training.micro_batches import MicroBatch
from finetune.training.optimizer import make_state
from finetune.training.training_state import TrainingState

Result = TypeVar("Result")


@dataclass
class BatchSize:
    """How many rows go through a device at once: half as many after each time that memory ran out.

    Args:
        rows: How many they are now.
        name: What they are called, such as ``batch size``.
        device: Whose memory it is.
        emit: Is told when they become fewer.
    """

    rows: int
    name: str
    device: Device
    emit: Emit

    def fit(
        self, attempt: Callable[[int], Result], *, undo: Callable[[], None] = lambda: None
    ) -> Result:
        """Return what an attempt gives, made again with half the rows while memory runs out.

        Args:
            attempt: Takes the number of rows.
            undo: Puts back what a failed attempt has changed.

        Raises:
            BatchDoesNotFit: If not even one row fits.
        """
        while True:
            try:
                return attempt(self.rows)
            except (RuntimeError, MemoryError) as error:
                if not self.device.memory.is_out_of_memory(error):
                    raise
                if self.rows == 1:
                    raise BatchDoesNotFit(
                        f"{self.device.name} ran out of memory: not even one row fits",
                        remedy="shorten the texts with --max-length, use --freeze-core, a smaller "
                        "--model or another --device",
                    ) from error
            # Only here: as long as the error is handled, its traceback keeps the tensors alive.
            undo()
            self.device.memory.release()
            self._halve()

    def clamp(self, *, padded_length: int) -> None:
        """Take no more rows than the device computes right, whatever the memory.

        Args:
            padded_length: Tokens of the widest row.
        """
        most = self.device.shapes.max_examples(padded_length=padded_length)
        if most is None or self.rows <= most:
            return
        before, self.rows = self.rows, most
        self.emit(
            events.WarningMessage(
                f"the {self.name} is {self.rows} instead of {before}: on this chip "
                f"{self.device.name} computes wrongly on more than "
                f"{self.device.shapes.max_tokens:,} tokens at once",
                remedy="nothing is needed: the updates stay the same",
            )
        )

    def _halve(self) -> None:
        before, self.rows = self.rows, self.rows // 2
        self.emit(
            events.WarningMessage(
                f"{self.device.name} ran out of memory: the {self.name} is {self.rows} instead of "
                f"{before} from here on"
            )
        )


@dataclass(frozen=True)
class BatchSizes:
    """The two batch sizes of a run.

    Args:
        training: Rows in one forward and backward.
        evaluation: Rows in one forward without a graph.
    """

    training: BatchSize
    evaluation: BatchSize


def update_as_memory_allows(
    training_state: TrainingState,
    number: int,
    *,
    cut: Callable[[int], Iterable[MicroBatch]],
    batch_size: BatchSize,
) -> torch.Tensor:
    """Take an update in pieces that fit, whatever they are: an update of the same rows.

    All that needs memory comes before the optimizer's step and changes nothing but gradients and
    random numbers, so that it can be done again. A step that has begun can not; it finds its state
    made, and asks for no more.

    Args:
        training_state: Changed in place.
        number: Of the update, counted from 0.
        cut: Cuts the effective batch into pieces of so many rows.
        batch_size: How many to begin with; fewer afterwards if they did not fit.

    Returns:
        The loss, a scalar on the device.

    Raises:
        BatchDoesNotFit: If not even one row fits.
    """
    random_state = training_state.device.random_state()

    def accumulate_gradients(rows: int) -> torch.Tensor:
        make_state(training_state.optimizer)
        return training_state.accumulate_gradients(cut(rows))

    def undo() -> None:
        training_state.discard_gradients()
        training_state.device.set_random_state(random_state)

    loss = batch_size.fit(accumulate_gradients, undo=undo)
    training_state.step(number)
    return loss
