"""A child process that exchanges lines of JSON with its parent and never outlives it.

``Child`` is the parent's end, ``connect_to_parent`` the child's. Only the child ends if a device or
a library ends the process.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from finetune.devices.host import keep_freed_memory, reduce_gc_frequency
from finetune.distributed.launch import (
    environment_outside_group,
    import_environment,
    module_command,
)

_MAX_ERROR_BYTES = 10_000
# A process that holds a GPU's memory takes a while to end.
_END_SECONDS = 30
# prctl(2): which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class ChildEnded(Exception):
    """The child has ended, or has closed its standard output."""


class Child:
    """A module, run in a session of its own, since Ctrl-C is for the parent alone."""

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
        self.module = module
        self.process_id = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._errors.closed:
            self.kill()

    def send(self, request: Any) -> None:
        """Write a line to the child; if it has ended, ``receive`` says so."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def receive(self, *, seconds: float) -> Any | None:
        """Return the next reply, None if none is in time; raise ChildEnded if none will come."""
        assert self._process.stdout
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        # A reply is written at once: it does not have to be waited for.
        line = self._process.stdout.readline()
        if not line:
            raise ChildEnded
        # Whatever Python prints as it starts comes before all replies.
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

    def exit_status(self) -> str:
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
        self._errors.seek(max(0, size_bytes - _MAX_ERROR_BYTES))
        text = self._errors.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def describe_end(self) -> str:
        """Return why the child has ended, and the last line of its standard error."""
        *_, last_line = ["it wrote no error", *self.error_lines()]
        return f"the process {self.exit_status()}: {last_line}"


def connect_to_parent() -> "tuple[queue.SimpleQueue[Any], Callable[[Any], None]]":
    """Bind this process to its parent; return the parent's requests, and what writes a reply.

    It is killed with its parent, and before others for memory; it ends with standard input.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Where a sandbox forbids this, the parent's watch and the memory limit remain.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    # As the command does.
    keep_freed_memory()
    reduce_gc_frequency()
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=[requests], daemon=True).start()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print goes to standard error.
    os.dup2(2, 1)

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")

    return requests, reply


def _read_requests(requests: "queue.SimpleQueue[Any]") -> None:
    # Unbuffered: a thread that waits within a buffer breaks the end of the process.
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            requests.put(json.loads(line))
    os._exit(0)
