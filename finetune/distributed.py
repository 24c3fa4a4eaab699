"""Ranks and collective operations of the processes that train one model together.

``torchrun`` and ``accelerate launch`` start them. Without a launcher there is one process. Each
function then returns at once, without importing PyTorch.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from finetune.errors import UsageError, explained

if TYPE_CHECKING:
    import torch

    from finetune.devices.base import Device, DeviceMemory

Value = TypeVar("Value")

# All ranks do the same work. A rank that is this late is treated as lost.
SECONDS_LATE = 20
# How long ranks wait for work by a single rank, such as a download, and for others to join.
MAX_SECONDS = 1800
# Processes can't find each other unless all of these variables are set.
_NEEDED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Launch:
    """The rank of this process among all processes, and among the processes of this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


_current = Launch()
# The group that sums tensors on a GPU. None is the default group, for values on the CPU.
_device_group: "torch.distributed.ProcessGroup | None" = None


def read_launch() -> Launch:
    """Read the launch from the environment. It is a single process if a variable is missing."""
    if not all(map(os.environ.get, _NEEDED_VARIABLES)):
        return Launch()
    ranks = {name: value for name in RANK_VARIABLES if (value := os.environ.get(name))}
    try:
        launch = Launch(**{name.lower(): int(value) for name, value in ranks.items()})
        is_valid = 0 <= launch.local_rank <= launch.rank < launch.world_size
    except ValueError:
        is_valid = False
    if not is_valid:
        values = " ".join(f"{name}={value}" for name, value in ranks.items())
        remedy = "unset these variables, or start processes with torchrun"
        raise UsageError(f"invalid RANK/WORLD_SIZE environment: {values}", remedy=remedy)
    return launch


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes of the launcher, if any."""
    launch = read_launch()
    if launch.world_size > 1:
        _join(launch)
    with _working_as(launch):
        yield


def _join(launch: Launch) -> None:
    import torch
    from accelerate import PartialState

    if torch.distributed.is_initialized():
        return
    # Divide the cores among the processes on this host, unless the user or torchrun did.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // launch.local_world_size))
        # For child processes. Without it, Accelerate warns and chooses a number.
        os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    with explained("joining processes", rank=launch.rank, world_size=launch.world_size):
        PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=MAX_SECONDS))
    atexit.register(torch.distributed.destroy_process_group)


@contextmanager
def _working_as(launch: Launch) -> Iterator[None]:
    global _current
    before, _current = _current, launch
    try:
        yield
    finally:
        _current = before


def rank() -> int:
    """Return the rank of this process."""
    return _current.rank


def world_size() -> int:
    """Return the number of processes that train together."""
    return _current.world_size


def is_main() -> bool:
    """Return whether this is the main process, which writes files and prints."""
    return _current.rank == 0


def alone() -> AbstractContextManager[None]:
    """Disable collective operations, because only this rank does the work."""
    return _working_as(Launch())


def use_device(device: "Device") -> None:
    """Make ``all_reduce_sum`` reduce tensors on a device. All ranks call it."""
    global _device_group
    if world_size() > 1:
        _device_group = device.make_group()


def share(length: int) -> slice:
    """Return this rank's contiguous part of a sequence. Only the last parts can be shorter."""
    size = -(-length // world_size())
    return slice(rank() * size, (rank() + 1) * size)


def all_reduce_sum(tensor: "torch.Tensor") -> None:
    """Replace a tensor by its sum over all ranks, in place, without waiting for a GPU."""
    if world_size() == 1:
        return
    import torch

    with explained("joined processes"):
        # Accelerate's ``reduce`` copies the tensor and waits.
        work = torch.distributed.all_reduce(tensor, group=_device_group, async_op=True)
        assert work is not None
        # With a timeout, the host would wait for the GPU.
        work.wait() if _device_group else work.wait(timedelta(seconds=SECONDS_LATE))


def all_reduce_max(number: int, *, seconds: float = MAX_SECONDS) -> int:
    """Return the maximum over all ranks. Wait at most ``seconds`` for them."""
    if world_size() == 1:
        return number
    import torch

    numbers = torch.tensor(number)
    with explained("joined processes"):
        work = torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
    return int(numbers)


def any_rank(flag: bool) -> bool:
    """Return whether a flag is set on any rank."""
    return bool(all_reduce_max(int(flag)))


def barrier() -> None:
    """Wait for all ranks."""
    all_reduce_max(0)


def broadcast(make: Callable[[], Value]) -> Value:
    """Call ``make`` on the main rank, and return its result on all ranks."""
    if world_size() == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    values: list[Value | None] = [None]
    if is_main():
        with alone():
            values = [make()]
    with explained("joined processes"):
        broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order."""
    if world_size() == 1:
        return [value]
    from accelerate.utils import gather_object

    with explained("joined processes"):
        values: list[Value] = gather_object([value])
    return values


@contextmanager
def oom_on_all_ranks(memory: "DeviceMemory", *, seconds: float | None = None) -> Iterator[None]:
    """Run work that all ranks do at the same time. If one runs out of memory, all ranks fail.

    The work must not wait for other ranks. Each rank then waits for the others, by default for 20
    seconds plus twice the time of its own work. If another rank ran out of memory, raise
    OutOfMemoryElsewhereError.
    """
    started = time.monotonic()

    def count_failures(failures: int) -> int:
        patience = SECONDS_LATE + 2 * (time.monotonic() - started)
        return all_reduce_max(failures, seconds=seconds or patience)

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if memory.is_out_of_memory(error):
            count_failures(1)
        raise
    if count_failures(0):
        from finetune.devices.base import OutOfMemoryElsewhereError

        raise OutOfMemoryElsewhereError
