"""Serves one model on one port with several processes."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from subprocess import PIPE, Popen

from finetune.errors import FinetuneError
from finetune.training.interruption import STOP_SIGNALS


def run_workers(
    command: Sequence[str], listener: socket.socket, total: int, *, on_ready: Callable[[], None]
) -> None:
    """Start a finetune command several times on one socket, until a signal stops all.

    The command gets ``--worker NUMBER DESCRIPTOR``, and prints a line when it is ready. If it
    doesn't become ready, this process exits with its code. If a worker exits later, the others
    finish accepted requests, and ``FinetuneError`` is raised. A service manager can then restart
    all of them.
    """
    workers, signals, fd = list[Popen[bytes]](), list[int](), listener.fileno()

    def stop(number: int, _: object) -> None:
        sent = number if signals else signal.SIGTERM  # a second Ctrl-C stops at once
        signals.append(number)
        for worker in workers:
            worker.send_signal(sent)

    def start(number: int) -> None:
        words = [sys.executable, "-m", "finetune", *command, "--worker", str(number), str(fd)]
        # In its own process group, a worker doesn't get Ctrl-C from the terminal.
        workers.append(Popen(words, stdin=PIPE, stdout=PIPE, pass_fds=[fd], process_group=0))

    def is_ready(worker: Popen[bytes]) -> bool:
        return bool(worker.stdout and worker.stdout.readline())

    for each in STOP_SIGNALS:
        signal.signal(each, stop)
    # Several processes that each use all cores are slower than a single one.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // total)))
    start(1)
    if are_ready := is_ready(workers[0]):  # the first one alone, so that an error is printed once
        for number in range(2, total + 1):
            start(number)
        are_ready = all(map(is_ready, workers[1:]))
    if are_ready and not signals:
        on_ready()
    while not signals and all(worker.poll() is None for worker in workers):
        time.sleep(0.1)
    ended = [
        f"worker {n} ended with code {w.poll()}"
        for n, w in enumerate(workers, 1)
        if w.poll() is not None
    ]
    for worker in workers:
        worker.terminate()
    codes = [worker.wait() for worker in workers]
    if signals:
        return
    if not are_ready:
        sys.exit(max(codes))
    remedy = "see its error; -9 can mean that memory ran out, so start fewer --workers"
    raise FinetuneError(ended[0], remedy=remedy)


def stop_with_parent() -> None:
    """Stop this worker when its parent process ends for any reason."""

    def wait() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
