"""How a process joins the others that a launcher, such as torchrun, has started."""

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from uuid import uuid4

import psutil
import torch
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from finetune.distributed.launch import Launch, is_elastic, read_launch
from finetune.distributed.processes import ALONE, MAX_SECONDS, SECONDS_LATE, Processes
from finetune.errors import ProcessLost

# Importing PyTorch from a cold disk takes a host minutes longer than another.
JOINING_SECONDS = 300
# gloo tries to connect for so many times its timeout.
_TIMES_TIMEOUT = 5
_KEEPALIVE_SECONDS = 5
_START = "start"
_THREADS = "OMP_NUM_THREADS"
_LOOK_SECONDS = 1.0


def join_processes() -> Processes:
    """Join the processes that a launcher has started, if there are several.

    The group is gloo's, for values of the host; a device makes one of its own for its tensors.

    Raises:
        ProcessLost: If the others don't join too.
    """
    launch = read_launch()
    if launch.world_size == 1:
        return ALONE
    if not distributed.is_initialized():
        if is_elastic():
            _stop_without_launcher()
        _divide_threads(launch)
        try:
            _make_group(launch)
        except (RuntimeError, ValueError) as error:
            raise ProcessLost(
                f"process {launch.rank} of {launch.world_size} can't join the others: "
                f"{str(error).splitlines()[0]}",
                remedy="see the errors of the others, and whether each host reaches MASTER_ADDR",
            ) from error
        atexit.register(_leave_group)
    return Processes(launch.rank, launch.world_size)


def _stop_without_launcher() -> None:
    """Stop this process, as a signal does that others send, when its launcher has been killed."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _divide_threads(launch: Launch) -> None:
    """Let the processes of this host divide its cores, unless the user or torchrun has done so."""
    if _THREADS in os.environ:
        return
    threads = max(1, torch.get_num_threads() // launch.local_world_size)
    torch.set_num_threads(threads)
    # For child processes; without it Accelerate would warn, and choose a number, at every use.
    os.environ[_THREADS] = str(threads)


def _make_group(launch: Launch) -> None:
    earlier = _connections()
    joining_time = timedelta(seconds=JOINING_SECONDS)
    shared, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=joining_time))
    store = store_of_this_start(shared, launch, seconds=JOINING_SECONDS)
    distributed.init_process_group(
        "gloo", store=store, rank=launch.rank, world_size=launch.world_size,
        timeout=joining_time / _TIMES_TIMEOUT,
    )  # fmt: skip
    _end_when_silent(_connections() - earlier)
    store.set_timeout(timedelta(seconds=MAX_SECONDS))
    _set_pg_timeout(timedelta(seconds=MAX_SECONDS))


def store_of_this_start(store: Store, launch: Launch, *, seconds: float) -> Store:
    """Return a part of a launcher's store that holds nothing of processes that have ended.

    torchrun keeps its store when it starts processes again. By the addresses that the earlier ones
    have left in it, two processes may wait for each other to connect.

    Raises:
        RuntimeError: If another process does not come within so many seconds.
    """
    store.set_timeout(timedelta(seconds=seconds))
    own = uuid4().hex
    if launch.is_main:
        store.set(_START, own)
        for rank in range(1, launch.world_size):
            other = store.get(f"{own}/{rank}").decode()
            store.set(f"{own}/{other}", "")
        return PrefixStore(own, store)
    ends_at = time.monotonic() + seconds
    while True:
        start = store.get(_START).decode()
        store.set(f"{start}/{launch.rank}", own)
        try:
            store.wait([f"{start}/{own}"], timedelta(seconds=1))
        except distributed.DistStoreError:
            # Nobody answers where the start is an earlier one, whose main process has ended.
            if time.monotonic() > ends_at:
                raise
        else:
            return PrefixStore(start, store)


def _end_when_silent(connections: Iterable[int]) -> None:
    """Have Linux end TCP connections, by their descriptors, whose other host no longer answers.

    A process that waits sends nothing, and would not notice that the other host was cut off.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for one in connections:
        with socket.socket(fileno=os.dup(one)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS),
                (socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS),
                (socket.TCP_USER_TIMEOUT, SECONDS_LATE * 1000),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connections() -> set[int]:
    found = psutil.Process().net_connections("tcp")
    return {one.fd for one in found if one.status == psutil.CONN_ESTABLISHED}


def _leave_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
