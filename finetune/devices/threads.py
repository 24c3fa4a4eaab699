"""How many CPU threads compute, on a machine whose other processes need cores too."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

# Threads wait for one another after every operation: where another process holds a core, all wait
# for the one that shares it. With MiniLM on two busy cores, one thread was 4 times as fast as two.
_BUSY_SHARE = 0.2
_WATCH_SECONDS = 0.2
_ROUNDS = 3
# Fewer threads have to gain so much, as the load may pass.
_GAIN = 1.1
# Whoever sets one of them has chosen.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads that was chosen by a timing.

    Args:
        threads: The fastest, or all.
        seconds: Median time of the work, by number of threads.
        busy_share: Of the machine's CPU time, what other processes took: 0..1.
    """

    threads: int
    seconds: dict[int, float]
    busy_share: float

    def __str__(self) -> str:
        timings = ", ".join(f"{count}: {one * 1e3:.0f} ms" for count, one in self.seconds.items())
        return (
            f"CPU threads: {self.threads}, as other processes take {self.busy_share:.0%} of the "
            f"CPU (a forward by threads: {timings}; OMP_NUM_THREADS sets another number)"
        )


def choose_threads(work: Callable[[], object]) -> ThreadChoice | None:
    """Set the number of threads with which work is fastest, where other processes are busy.

    Return None where all threads are used: on an idle machine, or where the user has set a number.
    """
    most = torch.get_num_threads()
    if most == 1 or any(name in os.environ for name in _VARIABLES):
        return None
    busy_share = psutil.cpu_percent(_WATCH_SECONDS) / 100
    if busy_share < _BUSY_SHARE:
        return None
    counts = [most >> halvings for halvings in range(most.bit_length())]
    timings: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(1 + _ROUNDS):
        for count in counts:
            torch.set_num_threads(count)
            started = time.perf_counter()
            work()
            timings[count].append(time.perf_counter() - started)
    # The first round warms up.
    seconds = {count: statistics.median(measured[1:]) for count, measured in timings.items()}
    fastest = min(counts, key=seconds.__getitem__)
    threads = fastest if seconds[most] > _GAIN * seconds[fastest] else most
    torch.set_num_threads(threads)
    return ThreadChoice(threads, seconds, busy_share)
