"""A batch size that is halved when memory runs out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from finetune import events
from finetune.devices.base import Device
from finetune.errors import BatchDoesNotFitError
from finetune.events import emit

Result = TypeVar("Result")


@dataclass
class BatchSize:
    """The number of examples per pass on a device; ``name`` is for messages."""

    examples: int
    name: str
    device: Device

    def retry_on_out_of_memory(self, attempt: Callable[[int], Result]) -> Result:
        """Return the result of a function; if memory runs out, halve the examples and repeat."""
        while True:
            try:
                return attempt(self.examples)
            except (RuntimeError, MemoryError) as error:
                self.raise_unless_smaller_fits(error)
            # Not in the except block, whose traceback keeps the tensors alive.
            self.halve()

    def raise_unless_smaller_fits(self, error: Exception) -> None:
        """Raise an error, unless memory ran out and there is more than one example."""
        if not self.device.memory.is_out_of_memory(error):
            raise error
        if self.examples == 1:
            raise BatchDoesNotFitError(
                f"{self.device.name} ran out of memory with a single example",
                remedy="shorten the texts with --max-length, use --gradient-checkpointing, "
                "--freeze-core, a smaller --model or another --device",
            ) from error

    def halve(self) -> None:
        """Halve the batch size for good, and free the cache."""
        self.device.memory.release()
        before, self.examples = self.examples, self.examples // 2
        emit(
            events.WarningMessage(
                f"{self.device.name} ran out of memory: the {self.name} is now "
                f"{self.examples} instead of {before}"
            )
        )

    def clamp(self, *, padded_length: int) -> None:
        """Limit the batch size to the largest that the device computes correctly at a length."""
        most = self.device.shapes.max_examples(padded_length=padded_length)
        if most is None or self.examples <= most:
            return
        before, self.examples = self.examples, most
        emit(
            events.WarningMessage(
                f"the {self.name} is {self.examples} instead of {before}, because "
                f"{self.device.name} on this chip returns wrong results for more than "
                f"{self.device.shapes.max_tokens:,} tokens per batch; the effective batch size "
                "stays the same"
            )
        )
