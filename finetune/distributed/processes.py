"""The processes of a run: how they join, and their collective operations."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

from finetune.devices.base import Device, DeviceMemory, OutOfMemoryElsewhere
from finetune.distributed.launch import read_launch
from finetune.errors import ProcessLost

Value = TypeVar("Value")

# Where all ranks do the same work, one that is so much later than this one counts as lost.
SECONDS_LATE = 20
_TIMES_OWN_WORK = 2
# How long the others wait for what one rank does alone, such as a search or a download.
MAX_SECONDS = 1800
# Importing PyTorch from a cold disk takes one host minutes longer than another.
_JOINING_SECONDS = 300
_LAUNCHER_CHECK_SECONDS = 1.0
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Processes:
    """The processes that train one model, seen from rank ``index`` of ``count``.

    With one process, each method does nothing. The default group, over gloo, carries values of the
    host; ``device_group`` sums tensors on the device, where that needs a group of its own.
    """

    index: int = 0
    count: int = 1
    device_group: distributed.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.index == 0

    def on(self, device: Device) -> "Processes":
        """Return the same processes with the group of a device."""
        return self if self.count == 1 else replace(self, device_group=device.make_group())

    def slice(self, length: int) -> slice:
        """Return this rank's contiguous share of a sequence: one size for all but the last."""
        size = -(-length // self.count)
        return slice(self.index * size, (self.index + 1) * size)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, in place; does not wait for a GPU."""
        if self.count == 1:
            return
        with raise_if_rank_died():
            work = distributed.all_reduce(tensor, group=self.device_group, async_op=True)
            assert work is not None
            # With a timeout the host would wait for a GPU.
            work.wait() if self.device_group else work.wait(timedelta(seconds=SECONDS_LATE))

    def all_reduce_max(self, number: int, *, seconds: float = MAX_SECONDS) -> int:
        """Return the highest value over all ranks; wait at most so many seconds for the others."""
        if self.count == 1:
            return number
        numbers = torch.tensor(number)
        with raise_if_rank_died():
            work = distributed.all_reduce(numbers, distributed.ReduceOp.MAX, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=seconds))
        return int(numbers.item())

    def any(self, flag: bool) -> bool:
        """Return whether a flag is set on any rank."""
        return bool(self.all_reduce_max(int(flag)))

    def barrier(self) -> None:
        """Wait until all ranks have come here."""
        self.all_reduce_max(0)

    def broadcast(self, make: Callable[[], Value]) -> Value:
        """Return what ``make`` returns on the main rank, which alone calls it."""
        if self.count == 1:
            return make()
        values = [make() if self.is_main else None]
        with raise_if_rank_died():
            distributed.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank."""
        if self.count == 1:
            return [value]
        values: list[Value | None] = [None] * self.count
        with raise_if_rank_died():
            distributed.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    @contextmanager
    def oom_on_all_ranks(
        self, memory: DeviceMemory, *, seconds: float | None = None
    ) -> Iterator[None]:
        """Run work that all ranks do at the same time; running out of memory on one fails all.

        It may not wait for other ranks. At its end a rank waits for them, by default for 20 seconds
        and twice the time that its own work took. OutOfMemoryElsewhere says that another failed.
        """
        started = time.monotonic()

        def count_failures(own: int) -> int:
            patience = SECONDS_LATE + _TIMES_OWN_WORK * (time.monotonic() - started)
            return self.all_reduce_max(own, seconds=seconds or patience)

        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if memory.is_out_of_memory(error):
                count_failures(1)
            raise
        if count_failures(0):
            raise OutOfMemoryElsewhere


ALONE = Processes()


@contextmanager
def raise_if_rank_died() -> Iterator[None]:
    """Raise ``ProcessLost`` where an error says that another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            "another process of the run has ended, or no longer answers "
            f"({str(error).splitlines()[0]})",
            remedy="see the error of that process; --resume-from-checkpoint auto continues from "
            "the last checkpoint",
        ) from error


def join_processes() -> Processes:
    """Join the processes that a launcher has started, if there are several.

    ``torchrun --max-restarts`` needs ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: the store that it
    otherwise keeps holds the addresses of the processes before the restart.
    """
    launch = read_launch()
    if launch.world_size == 1:
        return ALONE
    if not distributed.is_initialized():
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun is the parent
            _stop_without_launcher()
        # The cores are divided among the processes of this host, unless the user or torchrun has.
        if _THREADS not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // launch.local_world_size))
            # For child processes; without it Accelerate would warn, and choose a number itself.
            os.environ[_THREADS] = str(torch.get_num_threads())
        try:
            distributed.init_process_group("gloo", timeout=timedelta(seconds=_JOINING_SECONDS))
        except (RuntimeError, ValueError) as error:
            raise ProcessLost(
                f"process {launch.rank} of {launch.world_size} can't join the others: "
                f"{str(error).splitlines()[0]}",
                remedy="see the errors of the others, and whether each host reaches MASTER_ADDR",
            ) from error
        _set_pg_timeout(timedelta(seconds=MAX_SECONDS))
        atexit.register(distributed.destroy_process_group)
    return Processes(launch.rank, launch.world_size)


def _stop_without_launcher() -> None:
    """Stop this process as a signal would, once its launcher has been killed."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LAUNCHER_CHECK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
