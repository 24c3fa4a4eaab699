"""A worker without PyTorch. The batch size selects how it fails. Run it with ``python -m``."""

import os
import signal
import sys
import time

from finetune.batch_finder import trials
from finetune.events import Trial

KILLED, ABORTED, ABORTED_FOR_MEMORY, SEGFAULT, HANGS, FAILS, NO_MEMORY, EXITS = range(101, 109)
GROWS, PRINTS_OOM_MESSAGE, HAS_NO_PEAK = range(109, 112)
BUDGET_BYTES = 64 * 2**20
# Environment variable: the folder in which the parent creates a file per measurement of a child.
MEASUREMENTS = "MEMORY_MEASUREMENTS"
# Environment variable that simulates a system where forks are not safe.
NO_FORK = "NO_FORK"

METAL_TEXT = (
    "Error: command buffer exited with error status.\n\tThe Metal Performance Shaders operations "
    "encoded on it may not have completed.\n\tError: \n\t(null)\n\tInsufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)\n"
)


def hold(size_bytes: int) -> bytearray:
    """Allocate memory, write to its pages, and return it after the parent has measured it twice.

    The first measurement may have started before the memory was allocated.
    """
    held = bytearray(size_bytes)
    held[::4096] = b"1" * len(held[::4096])
    if folder := os.environ.get(MEASUREMENTS):
        before = len(os.listdir(folder))
        while len(os.listdir(folder)) < before + 2:
            time.sleep(0.01)
    return held


def print_error(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def kill_this_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def train(size: int) -> Trial:
    if size == KILLED:
        kill_this_process(signal.SIGKILL)
    if size == ABORTED:
        print_error("-[MTLDebugDevice newBuffer]: failed assertion\n")
        kill_this_process(signal.SIGABRT)
    if size == ABORTED_FOR_MEMORY:
        print_error("terminate called after throwing an instance of 'std::bad_alloc'\n")
        kill_this_process(signal.SIGABRT)
    if size == SEGFAULT:
        kill_this_process(signal.SIGSEGV)
    if size == HANGS:
        time.sleep(600)
    if size == FAILS:
        return Trial(0, "failed", reason="ValueError: no such thing")
    if size == NO_MEMORY:
        return Trial(0, "too_big", reason="RuntimeError: can't allocate")
    if size == EXITS:
        sys.exit("the library gave up")
    if size == GROWS:
        hold(3 * BUDGET_BYTES)
    if size == HAS_NO_PEAK:
        hold(30 * 2**20)
    if size == PRINTS_OOM_MESSAGE:
        print_error(METAL_TEXT)
    sys.stdout.write("a library's chatter on standard output\n")
    peak_bytes = None if size == HAS_NO_PEAK else 1000 * size
    return Trial(size, "fits", peak_bytes, examples_per_second=float(os.getpid()))


if __name__ == "__main__":
    if NO_FORK in os.environ:
        trials.can_fork = lambda: False
    receive, reply = trials.connect_to_parent()
    *_, budget_bytes = receive()
    if budget_bytes is None:
        reply(BUDGET_BYTES)
    while True:
        reply(train(receive()))
