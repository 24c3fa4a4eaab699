"""Ctrl-C between updates: the update in hand is finished, and progress is saved."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield whether the first Ctrl-C or termination has come, which does not raise; a second does.

    Outside the main thread, where Python handles no signals, none ever comes.
    """
    requested = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
