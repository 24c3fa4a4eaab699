"""A child process that exchanges Python objects with its parent and never outlives it.

If a device or a library ends the process, only the child ends. The parent uses ``Child``, the child
``connect_to_parent``.
"""

import contextlib
import ctypes
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from finetune.devices.host import keep_freed_memory, reduce_gc_frequency
from finetune.distributed import RANK_VARIABLES, read_launch

# Prefixes of the other variables that torchrun sets.
_GROUP_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_")
_MAX_ERROR_BYTES = 10_000
# A process that holds a GPU's memory takes a while to end.
_END_SECONDS = 30
# prctl(2): which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class ChildEndedError(Exception):
    """The child ended, or closed its connection."""


class Child:
    """A module, run in its own session, so that Ctrl-C only reaches the parent."""

    def __init__(self, module: str) -> None:
        # In append mode, reading does not move the place that the child writes to.
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._connection, childs_end = Pipe()
        with childs_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(childs_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[childs_end.fileno()],
                start_new_session=True,
                env=_environment(),
            )
        self.module = module
        self.process_id = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._errors.closed:
            self.kill()

    def send(self, request: object) -> None:
        """Send an object to the child; if the child ended, ``receive`` raises the error."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(request)

    def receive(self, *, seconds: float | None = None) -> Any:
        """Return the next reply, None if it is late; raise ChildEndedError if none can come."""
        try:
            return self._connection.recv() if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            raise ChildEndedError from None

    def kill(self) -> None:
        """Kill the child and the processes that it started."""
        # For a child that ended and was not reaped yet, macOS reports "Operation not permitted".
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._errors.close()

    def exit_status(self) -> str:
        """Wait a while for the child's end; return its cause, such as ``was killed by SIGSEGV``."""
        try:
            status = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection and did not end"
        if status >= 0:
            return f"ended with exit code {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def error_lines(self) -> list[str]:
        """Return the last lines that the child has printed."""
        size_bytes = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size_bytes - _MAX_ERROR_BYTES))
        text = self._errors.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def describe_end(self) -> str:
        """Return why the child ended, and the last line that it printed."""
        *_, last_line = ["it wrote no error", *self.error_lines()]
        return f"the process {self.exit_status()}: {last_line}"


def _environment() -> dict[str, str]:
    """Return environment variables for a child on the same GPU, without launcher variables."""
    launch = read_launch()
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    if launch.world_size == 1:
        return variables
    outside = {
        name: value
        for name, value in variables.items()
        if name not in RANK_VARIABLES and not name.startswith(_GROUP_PREFIXES)
    }
    visible = outside.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else list(map(str, range(launch.local_world_size)))
    return outside | {"CUDA_VISIBLE_DEVICES": gpus[launch.local_rank % len(gpus)]}


def connect_to_parent() -> tuple[Callable[[], Any], Callable[[object], None]]:
    """Connect to the parent; return a function that waits for a request, and one that replies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If a sandbox forbids this, the watching parent and the memory limit remain.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    # The command does the same.
    keep_freed_memory()
    reduce_gc_frequency()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_requests() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os._exit(0)

    threading.Thread(target=read_requests, daemon=True).start()
    return requests.get, connection.send
