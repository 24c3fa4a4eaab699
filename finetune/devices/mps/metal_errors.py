"""Reads what Metal writes of work that it dropped, of which PyTorch says nothing.

PyTorch goes on with whatever is in place of the results (pytorch#193571, open in 2.13). Metal's
message goes to the standard error of the process, past Python.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

# By what reports from Macs have between the parentheses (flutter#127151, flutter#155538,
# llama.cpp#22214, pytorch#125442), the words of the last for whatever else has its name.
_REASONS = {
    "ErrorImpactingInteractivity": "the display had to wait for it (Impacting Interactivity)",
    "ErrorOutOfMemory": "memory did not suffice (Insufficient Memory)",
    "ErrorTimeout": "it took too long (GPU Timeout)",
    "ErrorHang": "it did not end (GPU Hang)",
    "ErrorPageFault": "it read memory that is not there (GPU Address Fault)",
    "ErrorInnocentVictim": "the GPU failed at other work (Innocent Victim)",
    "ErrorSubmissionsIgnored": "it had failed too often (Submissions Ignored)",
    # By older systems, for want of memory or since the display had to wait (mlx#3267).
    "0000000e:Internal Error": "of an internal error",
    "kIOGPUCommandBufferCallbackError": "of an error that it does not explain",
}
# Sent through standard error to learn that what came before has been read; nobody else writes it.
_MARK = b"\0"
_FORWARD = """
import os, sys
from contextlib import suppress
mark, copy = b"\\0", int(sys.argv[1])
while piece := os.read(0, 65536):
    for end, text in (1, piece.replace(mark, b"")), (copy, piece):
        with suppress(OSError):
            os.write(end, text)
"""
_MAX_SECONDS = 5.0


def why_dropped(lines: Iterable[str]) -> str | None:
    """Return why Metal has dropped work, by what it wrote on standard error; None if it did not."""
    for line in lines:
        if reason := next((words for text, words in _REASONS.items() if text in line), None):
            return f"Metal dropped work, since {reason}"
    return None


class MetalErrors:
    """Standard error, read on its way to where it goes. A context.

    It goes through another process, so that what Metal writes right before it aborts this one is
    shown too.
    """

    def __init__(self) -> None:
        self._reason: str | None = None
        self._has_settled = threading.Event()

    def __enter__(self) -> "MetalErrors":
        self._stderr = os.dup(2)
        (unread, written), (copy, copied) = os.pipe(), os.pipe()
        self._forwarder = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _FORWARD, str(copied)],
            stdin=unread,
            stdout=self._stderr,
            pass_fds=[copied],
            # Ctrl-C is for this process alone.
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=[copy], daemon=True).start()
        os.dup2(written, 2)
        for end in (unread, written, copied):
            os.close(end)
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.settle()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        # A process that was started meanwhile may write to it still.
        with suppress(subprocess.TimeoutExpired):
            self._forwarder.wait(_MAX_SECONDS)

    def take(self) -> str | None:
        """Return why work was dropped since this was last called, or None."""
        reason, self._reason = self._reason, None
        return reason

    def settle(self) -> None:
        """Wait until what was written so far has been read."""
        self._has_settled.clear()
        os.write(2, _MARK)
        self._has_settled.wait(_MAX_SECONDS)

    def _read(self, copy: int) -> None:
        line = b""
        while piece := os.read(copy, 65536):
            *lines, line = (line + piece.replace(_MARK, b"\n")).split(b"\n")
            texts = [one.decode(errors="replace") for one in lines]
            self._reason = self._reason or why_dropped(texts)
            if _MARK in piece:
                self._has_settled.set()
        os.close(copy)
