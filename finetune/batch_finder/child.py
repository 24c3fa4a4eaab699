"""A child process that reads and writes lines of JSON and never outlives its parent.

``Child`` is the parent's end; the functions are the child's.
"""

import contextlib
import ctypes
import json
import os
import platform
import queue
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.devices.host import keep_freed_memory, reduce_gc_frequency
from finetune.distributed.launch import (
    environment_outside_group,
    import_environment,
    module_command,
)

# What is read of the end of standard error.
_TAIL_BYTES = 10_000
# A process that holds a GPU's memory takes a while to end.
_END_SECONDS = 30
# prctl(2): which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class ChildEnded(Exception):
    """The child has ended, or has closed its standard output."""


class Child:
    """A module, run with the parent's ``sys.path`` in a process and a session of its own.

    In a session of its own, since Ctrl-C is for the parent alone.
    """

    def __init__(self, module: str) -> None:
        # In append mode, reading does not move the place that the child writes to.
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            module_command(module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env=environment_outside_group() | import_environment(),
        )
        self._received = b""

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, value: Any) -> None:
        """Write a line to the child; if it has ended, ``receive`` says so."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")

    def receive(self, *, seconds: float) -> Any | None:
        """Return the child's next answer, or None if none comes within some seconds.

        Raises:
            ChildEnded: If there will be none.
        """
        assert self._process.stdout
        output = self._process.stdout.fileno()
        if b"\n" not in self._received and select.select([output], [], [], seconds)[0]:
            piece = os.read(output, 65536)
            if not piece:
                raise ChildEnded
            self._received += piece
        if b"\n" not in self._received:
            return None
        line, _, self._received = self._received.partition(b"\n")
        # Whatever Python prints as it starts comes before all answers.
        with contextlib.suppress(ValueError):
            return json.loads(line)
        return None

    def kill(self) -> None:
        """End the child at once, and whatever it has started."""
        # Of a child that has ended and is not yet reaped, macOS says "Operation not permitted".
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ending(self) -> str:
        """Wait a while for the child's end; return its cause, such as ``was killed by SIGSEGV``."""
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its standard output and did not end"
        if status >= 0:
            return f"ended with exit code {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def error_lines(self) -> list[str]:
        """Return the last lines that the child has written on standard error."""
        size_bytes = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size_bytes - _TAIL_BYTES))
        text = self._errors.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]


@contextlib.contextmanager
def starting(module: str) -> Iterator[list[Child]]:
    """Yield a list with a child that starts meanwhile; end it unless it was taken from there."""
    children = [Child(module)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()


def begin_child() -> "tuple[queue.SimpleQueue[Any], Callable[[Any], None]]":
    """Bind this process to its parent; return the parent's lines, and what writes one to it."""
    end_with_parent()
    # As the command does.
    keep_freed_memory()
    reduce_gc_frequency()
    return read_orders(), open_answers()


def end_with_parent() -> None:
    """Let the kernel kill this process with its parent, and before others for memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Where a sandbox forbids this, the parent's watch and the cap remain.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def read_orders() -> "queue.SimpleQueue[Any]":
    """Return the lines of standard input as they come; end the process at once when it ends."""
    orders: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        # Unbuffered: a thread that waits within a buffer breaks the end of the process.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                orders.put(json.loads(line))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return orders


def open_answers() -> Callable[[Any], None]:
    """Return what writes a line to the parent; all that others print goes to standard error."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        stream.write(json.dumps(value) + "\n")

    return answer
