"""The processes that train one model together: their ranks and their collective operations.

``torchrun`` and ``accelerate launch`` start them. Without a launcher there is one process, each
function returns at once, and nothing here imports PyTorch.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from finetune.errors import ProcessLostError, UsageError

if TYPE_CHECKING:
    import torch

    from finetune.devices.base import Device, DeviceMemory

Value = TypeVar("Value")

# All ranks do the same work: a rank that is this much later than another one counts as lost.
SECONDS_LATE = 20
# How long the others wait for what one rank does alone, such as a search or a download.
MAX_SECONDS = 1800
# Importing PyTorch from a cold disk can take one host minutes longer than another.
_JOINING_SECONDS = 300
_LAUNCHER_CHECK_SECONDS = 1.0
# Without one of these variables, processes can't find each other.
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
_has_joined = False
# Sums tensors of a GPU; None for the default group, which carries values of the host.
_device_group: "torch.distributed.ProcessGroup | None" = None


def read_launch() -> Launch:
    """Return what the launcher set; one process if a variable of a launch is missing."""
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
        raise UsageError(f"these are not the ranks of a launch: {values}", remedy=remedy)
    return launch


def describe_ignored_variables() -> str | None:
    """Return a warning if some variables of a launch are set, and others are missing."""
    present = [name for name in _NEEDED_VARIABLES if os.environ.get(name)]
    missing = [name for name in _NEEDED_VARIABLES if name not in present]
    if not (present and missing):
        return None
    return f"{', '.join(present)} ignored: a launcher also sets {', '.join(missing)}"


@contextmanager
def joined() -> Iterator[None]:
    """Work together with the other processes that a launcher started, if there are any."""
    launch = read_launch()
    if launch.world_size > 1 and not _has_joined:
        _join(launch)
    with _working_as(launch):
        yield


def _join(launch: Launch) -> None:
    global _has_joined
    import torch
    from accelerate import PartialState
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if not torch.distributed.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent
            _stop_without_launcher()
        # The cores are divided among the processes of this host, unless the user or torchrun did.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // launch.local_world_size))
            # For child processes. Without it Accelerate warns and chooses a number itself.
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        try:
            PartialState(cpu=True, backend="gloo", timeout=timedelta(seconds=_JOINING_SECONDS))
        except (RuntimeError, ValueError) as error:
            raise ProcessLostError(
                f"process {launch.rank} of {launch.world_size} can't join the others: "
                f"{str(error).splitlines()[0]}",
                remedy="see the errors of the others, and whether each host reaches MASTER_ADDR",
            ) from error
        _set_pg_timeout(timedelta(seconds=MAX_SECONDS))
        atexit.register(torch.distributed.destroy_process_group)
    _has_joined = True


@contextmanager
def _working_as(launch: Launch) -> Iterator[None]:
    global _current
    before, _current = _current, launch
    try:
        yield
    finally:
        _current = before


def rank() -> int:
    """Return the number of this process."""
    return _current.rank


def world_size() -> int:
    """Return how many processes train together."""
    return _current.world_size


def is_main() -> bool:
    """Return whether this process is the one that writes and prints."""
    return _current.rank == 0


def alone() -> AbstractContextManager[None]:
    """Let this process work as if it were the only one: the others don't do the same."""
    return _working_as(Launch())


def use_device(device: "Device") -> None:
    """Let ``all_reduce_sum`` reduce tensors on a device. All ranks call it."""
    global _device_group
    if world_size() > 1:
        _device_group = device.make_group()


def share(length: int) -> slice:
    """Return this rank's contiguous part of a sequence: one size for all but the last."""
    size = -(-length // world_size())
    return slice(rank() * size, (rank() + 1) * size)


def all_reduce_sum(tensor: "torch.Tensor") -> None:
    """Replace a tensor by its sum over all ranks, in place. It does not wait for a GPU."""
    if world_size() == 1:
        return
    import torch

    with _raise_if_rank_died():
        # Accelerate's ``reduce`` copies the tensor and waits.
        work = torch.distributed.all_reduce(tensor, group=_device_group, async_op=True)
        assert work is not None
        # With a timeout the host would wait for a GPU.
        work.wait() if _device_group else work.wait(timedelta(seconds=SECONDS_LATE))


def all_reduce_max(number: int, *, seconds: float = MAX_SECONDS) -> int:
    """Return the highest value over all ranks; ``seconds`` limits the wait for them."""
    if world_size() == 1:
        return number
    import torch

    numbers = torch.tensor(number)
    with _raise_if_rank_died():
        work = torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=seconds))
    return int(numbers.item())


def any_rank(flag: bool) -> bool:
    """Return whether a flag is set on any rank."""
    return bool(all_reduce_max(int(flag)))


def barrier() -> None:
    """Wait until all ranks are here."""
    all_reduce_max(0)


def broadcast(make: Callable[[], Value]) -> Value:
    """Return what ``make`` returns on the main rank. Only the main rank calls it."""
    if world_size() == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    values: list[Value | None] = [None]
    if is_main():
        with alone():
            values = [make()]
    with _raise_if_rank_died():
        broadcast_object_list(values)
    return values[0]  # type: ignore[return-value]


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, by rank."""
    if world_size() == 1:
        return [value]
    from accelerate.utils import gather_object

    with _raise_if_rank_died():
        values: list[Value] = gather_object([value])
    return values


@contextmanager
def oom_on_all_ranks(memory: "DeviceMemory", *, seconds: float | None = None) -> Iterator[None]:
    """Run work that all ranks do at the same time. If one runs out of memory, all fail.

    The work may not wait for other ranks. At its end a rank waits for them, by default for 20
    seconds and twice the time that its work took. If another rank failed, it raises
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


@contextmanager
def _raise_if_rank_died() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessLostError(
            "another process of the run has ended, or no longer answers "
            f"({str(error).splitlines()[0]})",
            remedy="see the error of that process; --resume-from-checkpoint auto continues from "
            "the last checkpoint",
        ) from error


def _stop_without_launcher() -> None:
    """Stop this process as a signal would, once its launcher was killed."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
