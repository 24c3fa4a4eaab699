"""Tries batch sizes in a child process, so that a device or library failure ends only the child.

The parent uses ``TrialRunner``, the child runs ``serve``. The first request is a case with its
memory limit and the budget. For the first child the budget is None; its first reply is the budget.
Later requests are batch sizes. A reply is a trial, or the arguments of ``ModelUnsupportedError``.
The child of a server first sends its ID. When it exits, the server sends its exit code.
"""

import ctypes
import importlib
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from finetune.batch_finder.results import Case
from finetune.devices.host import (
    can_fork,
    gibibytes,
    keep_freed_memory,
    process_bytes,
    reduce_gc_frequency,
    why_short,
)
from finetune.errors import FinetuneError, ModelUnsupportedError
from finetune.events import Trial, TrialStatus, emit

if TYPE_CHECKING:
    from finetune.devices.base import Device

# Samples at this rate miss at most 1% of the peak recorded by the kernel.
_SAMPLE_SECONDS = 0.02
# The machine state changes more slowly and takes longer to read.
_HOST_SAMPLE_SECONDS = 0.25
_MAX_ERROR_BYTES = 10_000
# File descriptor for a child's errors.
_ERRORS = 2
# Processes that hold GPU memory take a while to exit.
_END_SECONDS = 30
# prctl(2): the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class _StoppedError(Exception):
    """A trial ended without a measurement."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class TrialServer:
    """A process that forks child processes for trials, one at a time.

    Before the first fork, it imports what they need, which takes seconds. Where forks aren't safe,
    it becomes the child itself, and each further child starts another server.

    It runs in its own session, so that Ctrl-C only reaches the parent. Under torchrun it inherits
    its parent's rank variables, and so uses the same GPU. Use it from one thread, because
    Linux ends it when the thread that started it ends.
    """

    def __init__(self, module: str = "finetune.batch_finder.trials") -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        # The ID of the child, or of the server until the child sends its own.
        self.child_id: int | None = None
        self._exit_code: int | None = None

    def __enter__(self) -> "TrialServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end_child()
        self._end()

    def start_child(self, request: tuple[object, ...]) -> None:
        """Start a child with its first request."""
        if not self._process or self._process.poll() is not None:
            self._end()
            self._process = self._start()
        self.child_id, self._exit_code = self._process.pid, None
        self.send(request)

    def _start(self) -> "subprocess.Popen[bytes]":
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._connection, servers_end = Pipe()
        with servers_end:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(servers_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[servers_end.fileno()],
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )

    def send(self, request: object) -> None:
        """Send an object to the child, unless it has exited."""
        with suppress(BrokenPipeError):
            self._connection.send(request)

    def receive(self, timeout_seconds: float | None) -> Any:
        """Return the child's next reply, or None if none came. Raise EOFError if it has exited."""
        assert self._process
        try:
            reply = self._connection.recv() if self._connection.poll(timeout_seconds) else None
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            reply = self._process.pid, self._process.returncode
        if not isinstance(reply, tuple):
            return reply
        self.child_id, self._exit_code = reply
        if self._exit_code is not None:
            raise EOFError
        return None

    def end_child(self) -> None:
        """Kill the child, if any, and the processes that it started."""
        with suppress(EOFError):
            while self.child_id is not None:
                # For a child that exited and was not reaped yet, macOS reports "Operation not
                # permitted".
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.child_id, signal.SIGKILL)
                if self._exit_code is not None:
                    break
                self.receive(None)
        self.child_id = None

    def ending(self) -> str:
        """Describe how the child ended, such as ``was killed by SIGSEGV``."""
        if self._exit_code is None or self._exit_code >= 0:
            return f"ended with exit code {self._exit_code}"
        return f"was killed by {signal.Signals(-self._exit_code).name}"

    def error_lines(self) -> list[str]:
        """Return the last lines that the child printed."""
        file = self._errors.fileno()
        skipped_bytes = max(0, os.fstat(file).st_size - _MAX_ERROR_BYTES)
        # Unlike a seek, this doesn't move the child's write position.
        text = os.pread(file, _MAX_ERROR_BYTES, skipped_bytes).decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]

    def _end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._connection.close()
            self._errors.close()


class TrialRunner:
    """Tries batch sizes in a child process, and in a new child after each failure.

    ``timeout_seconds`` limits each trial and the start of its process.
    """

    def __init__(
        self,
        case: Case,
        device: "Device",
        server: TrialServer,
        *,
        limit_bytes: int | None,
        timeout_seconds: float,
    ) -> None:
        self.case, self.device, self.server = case, device, server
        self.limit_bytes, self.timeout_seconds = limit_bytes, timeout_seconds
        self._budget_bytes: int | None = None
        self._has_trained = False
        # The highest memory sample of the child in this trial.
        self._peak_bytes = 0

    def __enter__(self) -> "TrialRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.end_child()

    def budget_bytes(self) -> int:
        """Return the memory budget of each trial, which the first child measures."""
        if self._budget_bytes is None:
            try:
                self._start_child()
                self._budget_bytes = int(self._await_reply())
            except _StoppedError as stop:
                raise FinetuneError(
                    f"the batch finder process can't start: {stop.reason}",
                    remedy="run finetune doctor, or raise --time-limit",
                ) from None
        return self._budget_bytes

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        """Train at a batch size. ``new_process`` requests a child that hasn't trained before."""
        started = time.perf_counter()
        self.budget_bytes()
        if new_process and self._has_trained:
            self.server.end_child()
        if self.server.child_id is None:
            self._start_child()
        self._has_trained = True
        self.server.send(batch_size)
        try:
            trial: Trial = self._await_reply()
            if trial.status == "fits":
                self._check_budget(trial.peak_bytes or self._peak_bytes)
                if line := self._find_oom_message():
                    raise _StoppedError("too_big", line)
        except _StoppedError as stop:
            trial = Trial(batch_size, stop.status, reason=stop.reason)
        if trial.status != "fits":
            self.server.end_child()
        trial = replace(
            trial,
            batch_size=batch_size,
            part=self.case.part,
            peak_bytes=trial.peak_bytes or self._peak_bytes or None,
            seconds=time.perf_counter() - started,
        )
        emit(trial)
        return trial

    def _start_child(self) -> None:
        self._has_trained = False
        self.server.start_child((self.case, self.limit_bytes, self._budget_bytes))

    def _await_reply(self) -> Any:
        """Return the child's next reply. Raise _StoppedError if it exits or exceeds a limit."""
        self._peak_bytes = 0
        swapped_bytes = psutil.swap_memory().used
        started = host_sampled = time.perf_counter()
        while True:
            try:
                reply = self.server.receive(_SAMPLE_SECONDS)
            except EOFError:
                raise self._explain_end() from None
            if isinstance(reply, dict):
                raise ModelUnsupportedError(**reply)
            if reply is not None:
                return reply
            if self.device.memory.is_shared and self.server.child_id:
                reserved_bytes = process_bytes(self.server.child_id)
                self._peak_bytes = max(self._peak_bytes, reserved_bytes)
                self._check_budget(reserved_bytes)
            now = time.perf_counter()
            if now - host_sampled >= _HOST_SAMPLE_SECONDS:
                host_sampled = now
                if reason := why_short(swapped_bytes=swapped_bytes):
                    raise _StoppedError("too_big", reason)
            if now - started > self.timeout_seconds:
                reason = f"the trial took longer than {self.timeout_seconds:g} s"
                raise _StoppedError("timed_out", reason)

    def _check_budget(self, reserved_bytes: int) -> None:
        if self._budget_bytes is not None and reserved_bytes > self._budget_bytes:
            raise _StoppedError("too_big", f"it used more than {gibibytes(self._budget_bytes)}")

    def _explain_end(self) -> _StoppedError:
        ending = f"the process {self.server.ending()}"
        if line := self._find_oom_message():
            return _StoppedError("too_big", f"{ending}: {line}")
        if ending.endswith("SIGKILL"):
            reason = f"{ending}, which the system does when memory runs out"
            return _StoppedError("too_big", reason)
        *_, last_line = ["it wrote no error", *self.server.error_lines()]
        return _StoppedError("failed", f"{ending}: {last_line}")

    def _find_oom_message(self) -> str | None:
        texts, lines = self.device.memory.out_of_memory_texts, self.server.error_lines()
        return next((line for line in lines if any(text in line for text in texts)), None)


def connect_to_parent(*needed_modules: str) -> tuple[Callable[[], Any], Callable[[object], None]]:
    """Become a child. Return a function that waits for a request, and one that replies.

    Where forks are safe, this process becomes the server, which imports the modules and ends with
    its parent, and the function returns in each child, which ends with both.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    if platform.system() == "Linux":
        # If a sandbox forbids this, the parent's sampling and the memory limit still apply.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    # The command does the same.
    keep_freed_memory()
    reduce_gc_frequency()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    if can_fork():
        for module in needed_modules:
            importlib.import_module(module)
        requests.put(_fork_child(connection))

    def read_requests() -> None:
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os._exit(0)

    threading.Thread(target=read_requests, daemon=True).start()
    return requests.get, connection.send


def _fork_child(connection: "Connection[Any, Any]") -> object:
    """Fork a child for each first request of the parent; in the child, return the request."""
    while True:
        request = connection.recv()
        if not isinstance(request, tuple):
            continue  # a batch size that the last child did not live to read
        # Forget what the last child has printed.
        os.ftruncate(_ERRORS, 0)
        os.lseek(_ERRORS, 0, os.SEEK_SET)
        with warnings.catch_warnings():
            # NumPy has started threads, but they hold no lock while this process waits.
            warnings.simplefilter("ignore", DeprecationWarning)
            child_id = os.fork()
        if child_id == 0:
            # A group of its own, which the parent can kill.
            os.setpgid(0, 0)
            _end_with_parent()
            connection.send((os.getpid(), None))
            return request
        _, status = os.waitpid(child_id, 0)
        connection.send((child_id, os.waitstatus_to_exitcode(status)))


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends."""
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve() -> None:
    """Serve the parent until it closes the connection."""
    receive, reply = connect_to_parent(
        "finetune.batch_finder.trial_model", "finetune.devices.select"
    )
    # These imports take seconds.
    from finetune.batch_finder.trial_model import build_trial_model, measure
    from finetune.devices.select import select_device

    case, limit_bytes, budget_bytes = receive()
    device = select_device(case.device)
    if budget_bytes is None:
        budget_bytes = device.memory.budget_bytes(limit_bytes)
        reply(budget_bytes)
    try:
        device.memory.set_memory_limit(budget_bytes)
        model = build_trial_model(case, device=device)
        while True:
            reply(measure(model, batch_size=receive(), budget_bytes=budget_bytes))
    except ModelUnsupportedError as error:
        reply({"message": error.message, "remedy": error.remedy})
    # PyTorch, the model or the machine can raise any exception.
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        status: TrialStatus = "too_big" if device.memory.is_out_of_memory(error) else "failed"
        reply(Trial(0, status, reason=reason))


if __name__ == "__main__":
    serve()
