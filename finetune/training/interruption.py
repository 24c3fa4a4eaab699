"""Handles signals that end a run after the current step is finished and saved."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

# From Ctrl-C, from a job scheduler before it kills the process, and from a closing terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Active requests, innermost last.
_requests: list["StopRequest"] = []


class Stopped(KeyboardInterrupt):
    """Raised when a signal ends the work. The message reports the progress."""

    def __init__(self, number: int, message: str = "stopped") -> None:
        super().__init__(message)
        self.number = number


def signal_of(interruption: BaseException) -> int:
    """Return the signal that ended the work. It is SIGINT for ``KeyboardInterrupt``."""
    return interruption.number if isinstance(interruption, Stopped) else signal.SIGINT


@dataclass(eq=False)
class StopRequest:
    """The number of the signal that arrived, if any."""

    number: int | None = None


@contextmanager
def stop_on_signal(*, at_once: bool = False, apart_seconds: float = 0.0) -> Iterator[StopRequest]:
    """Yield a request that the first signal sets. A second signal raises ``Stopped``.

    Copies of the first signal are ignored. With ``at_once``, the first signal also raises. The
    request keeps its number, because a library may turn the exception into an ``ImportError``.
    """
    # If an exception was ignored, such as in a destructor, use the signal of the outer request.
    request = StopRequest(_requests[-1].number if _requests else None)
    first_at = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        spec = getattr(sys.modules.get("torch"), "__spec__", None)
        if at_once and getattr(spec, "_initializing", False):
            # While torch is imported, an exception can pass through C++, which aborts the process.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        is_first = request.number is None
        if is_first:
            request.number, first_at = number, time.monotonic()
        if at_once or (not is_first and time.monotonic() - first_at >= apart_seconds):
            raise Stopped(number)

    # Python handles signals only in the main thread.
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS if is_main}
    # nohup and shells start programs with some signals ignored.
    handled = [number for number, before in previous.items() if before != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, handle)
    _requests.append(request)
    try:
        yield request
    finally:
        _requests.remove(request)
        for number in handled:
            signal.signal(number, previous[number])
