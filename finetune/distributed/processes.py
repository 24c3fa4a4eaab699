"""What the processes of a run do together: add up, agree, wait for one another."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from finetune.devices.base import Device, DeviceMemory, OutOfMemoryElsewhere
from finetune.errors import ProcessLost

Value = TypeVar("Value")
# Where in gloo's source an error arose.
_PLACE = re.compile(r"^\[\S+\] ")

# Where all do the same work at the same time, one that is so much later than this one is lost.
SECONDS_LATE = 20
_TIMES_OWN_WORK = 2
# What only one does, such as a search or a download, may keep the others waiting for so long.
MAX_SECONDS = 4 * 3600


@dataclass(frozen=True)
class Processes:
    """The processes that train one model; alone, each of its methods does nothing.

    The default group, over gloo, carries values of the host. A process that fails leaves the group
    as it ends, which the others notice.

    Args:
        index: Of this process; 0 is the main one, which alone writes and prints.
        count: How many there are on all hosts.
        of_device: The group that adds up tensors on the device; None for the default group.
    """

    index: int = 0
    count: int = 1
    of_device: distributed.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.index == 0

    def on(self, device: Device) -> "Processes":
        """Return the same processes with a group for tensors on a device.

        Raises:
            UsageError: If the device is one, and can't be had by several.
        """
        return self if self.count == 1 else replace(self, of_device=device.make_group())

    def slice(self, length: int) -> slice:
        """Return this process's share of a sequence, contiguous; the last may be empty.

        All but the last are of one size, so that batches that are filled up have one shape.
        """
        size = -(-length // self.count)
        return slice(self.index * size, (self.index + 1) * size)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all processes, in place; does not wait for a GPU."""
        if self.count == 1:
            return
        with raise_if_rank_died():
            work = distributed.all_reduce(tensor, group=self.of_device, async_op=True)
            assert work is not None
            # On a GPU a limit would have the host wait.
            work.wait() if self.of_device else work.wait(timedelta(seconds=SECONDS_LATE))

    def broadcast(self, make: Callable[[], Value]) -> Value:
        """Return what ``make`` returns in the main process, which alone calls it."""
        if self.count == 1:
            return make()
        values = [make() if self.is_main else None]
        with raise_if_rank_died():
            distributed.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes, by index."""
        if self.count == 1:
            return [value]
        values: list[Value | None] = [None] * self.count
        with raise_if_rank_died():
            distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def highest(self, number: int, *, seconds: float = MAX_SECONDS) -> int:
        """Return the highest of a number of each process; wait for the others so many seconds."""
        if self.count == 1:
            return number
        numbers = torch.tensor(number)
        with raise_if_rank_died():
            work = distributed.all_reduce(numbers, distributed.ReduceOp.MAX, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=seconds))
        return int(numbers.item())

    def any(self, flag: bool, *, seconds: float = MAX_SECONDS) -> bool:
        """Return whether a flag is set in any process; wait for the others so many seconds."""
        return bool(self.highest(int(flag), seconds=seconds))

    def wait(self, *, seconds: float = MAX_SECONDS) -> None:
        """Wait until all processes have come here, at most so many seconds."""
        self.highest(0, seconds=seconds)

    @contextmanager
    def oom_on_all_ranks(
        self, memory: DeviceMemory, *, seconds: float | None = None
    ) -> Iterator[None]:
        """Do work that all do at the same time; memory that runs out in one fails it in all.

        Nothing in it may wait for other processes. At its end one process waits for the others so
        many seconds; by default twice as many as its own work has taken, and 20.

        Raises:
            OutOfMemoryElsewhere: If memory ran out in another process.
            ProcessLost: If another process has ended, or is far later than this one.
        """
        started = time.monotonic()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if memory.is_out_of_memory(error):
                self.any(True, seconds=seconds or _patience(since=started))
            raise
        if self.any(False, seconds=seconds or _patience(since=started)):
            raise OutOfMemoryElsewhere


ALONE = Processes()


def _patience(*, since: float) -> float:
    return SECONDS_LATE + _TIMES_OWN_WORK * (time.monotonic() - since)


@contextmanager
def raise_if_rank_died() -> Iterator[None]:
    """Raise ``ProcessLost`` where an error says that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            "another process of the run has ended, or no longer answers "
            f"({_PLACE.sub('', str(error)).partition('. ')[0].splitlines()[0]})",
            remedy="see the error of that process; --resume-from-checkpoint auto lets a run go on "
            "from its last checkpoint",
        ) from error
