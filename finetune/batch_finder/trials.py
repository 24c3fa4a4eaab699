"""Try batch sizes in a child process, so that only the child ends if a device or a library fails.

The parent uses ``TrialRunner``, the child runs ``serve``. The first request is a case with its
memory limit and the budget. For the first child the budget is None; its first reply is the budget.
Later requests are batch sizes. A reply is a trial, or the arguments of ``ModelUnsupportedError``.
"""

import ctypes
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
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

# Samples this frequent miss at most 1% of the peak that the kernel records.
_SAMPLE_SECONDS = 0.02
# The state of the machine changes more slowly, and takes longer to read.
_HOST_SAMPLE_SECONDS = 0.25
# Child processes to keep ready: most searches need three or four within a few seconds.
_SPARES = 2
_MAX_ERROR_BYTES = 10_000
# A process that holds a GPU's memory takes a while to end.
_END_SECONDS = 30
# prctl(2): which signal a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


class _StoppedError(Exception):
    """A trial ended without a measurement."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Child:
    """A module, run in its own session, so that Ctrl-C only reaches the parent.

    Under torchrun it inherits the variables of its parent's rank, and so uses the same GPU.
    """

    def __init__(self, module: str) -> None:
        # In append mode, reading does not move the place that the child writes to.
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self.connection, childs_end = Pipe()
        with childs_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(childs_end.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[childs_end.fileno()],
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            )
        self.process_id = self._process.pid

    def send(self, request: object) -> None:
        """Send an object to the child, unless it has ended."""
        with suppress(BrokenPipeError):
            self.connection.send(request)

    def kill(self) -> None:
        """Kill the child and the processes that it started."""
        # For a child that ended and was not reaped yet, macOS reports "Operation not permitted".
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._errors.close()

    def ending(self) -> str:
        """Wait a while for the end of the child; return it, such as ``was killed by SIGSEGV``."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        status = self._process.returncode
        if status is None or status >= 0:
            return f"ended with exit code {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def error_lines(self) -> list[str]:
        """Return the last lines that the child has printed."""
        size_bytes = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size_bytes - _MAX_ERROR_BYTES))
        text = self._errors.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()]


class TrialRunner:
    """Tries batch sizes in a child process, and in a new child after each failure.

    Use it from one thread, because Linux ends a child when the thread that started it ends.
    ``timeout_seconds`` limits each trial and the start of its process.
    """

    def __init__(
        self,
        case: Case,
        device: "Device",
        *,
        limit_bytes: int | None,
        timeout_seconds: float,
        module: str = "finetune.batch_finder.trials",
    ) -> None:
        self.case, self.device, self.module = case, device, module
        self.limit_bytes, self.timeout_seconds = limit_bytes, timeout_seconds
        self._budget_bytes: int | None = None
        self._child: Child | None = None
        self._spares: list[Child] = []
        self._has_trained = False
        # The highest sample of the memory of the child in this trial.
        self._peak_bytes = 0

    def __enter__(self) -> "TrialRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_child()
        while self._spares:
            self._spares.pop().kill()

    def budget_bytes(self) -> int:
        """Return the memory that each trial may hold, which the first child measures."""
        if self._budget_bytes is None:
            try:
                self._budget_bytes = int(self._await_reply(self._start_child()))
            except _StoppedError as stop:
                raise FinetuneError(
                    f"the process of the batch finder can't start: {stop.reason}",
                    remedy="run finetune doctor, or raise --time-limit",
                ) from None
        return self._budget_bytes

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        """Train at a batch size; ``new_process`` asks for a child that has not trained before."""
        started = time.perf_counter()
        self.budget_bytes()
        if new_process and self._has_trained:
            self._end_child()
        child = self._child or self._start_child()
        self._has_trained = True
        child.send(batch_size)
        try:
            trial: Trial = self._await_reply(child)
            if trial.status == "fits":
                self._check_budget(trial.peak_bytes or self._peak_bytes)
                if line := self._find_oom_message(child):
                    raise _StoppedError("too_big", line)
        except _StoppedError as stop:
            trial = Trial(batch_size, stop.status, reason=stop.reason)
        if trial.status != "fits":
            self._end_child()
        trial = replace(
            trial,
            batch_size=batch_size,
            part=self.case.part,
            peak_bytes=trial.peak_bytes or self._peak_bytes or None,
            seconds=time.perf_counter() - started,
        )
        emit(trial)
        return trial

    def _start_child(self) -> Child:
        child = self._spares.pop(0) if self._spares else Child(self.module)
        self._child, self._has_trained = child, False
        # Importing PyTorch can take ten seconds, so the next children start now. On a device that
        # shares the memory of the machine they would take memory from the child that trains.
        while len(self._spares) < _SPARES and not self.device.memory.is_shared:
            self._spares.append(Child(self.module))
        child.send((self.case, self.limit_bytes, self._budget_bytes))
        return child

    def _end_child(self) -> None:
        if self._child:
            self._child.kill()
            self._child = None

    def _await_reply(self, child: Child) -> Any:
        """Return the child's next reply; raise _StoppedError if it ends or exceeds a limit."""
        self._peak_bytes = 0
        swapped_bytes = psutil.swap_memory().used
        started = host_sampled = time.perf_counter()
        while True:
            try:
                has_reply = child.connection.poll(_SAMPLE_SECONDS)
                reply = child.connection.recv() if has_reply else None
            except (EOFError, OSError):
                raise self._explain_end(child) from None
            if isinstance(reply, dict):
                raise ModelUnsupportedError(**reply)
            if reply is not None:
                return reply
            if self.device.memory.is_shared:
                reserved_bytes = process_bytes(child.process_id)
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

    def _explain_end(self, child: Child) -> _StoppedError:
        ending = f"the process {child.ending()}"
        if line := self._find_oom_message(child):
            return _StoppedError("too_big", f"{ending}: {line}")
        if ending.endswith("SIGKILL"):
            reason = f"{ending}, which the system does when memory runs out"
            return _StoppedError("too_big", reason)
        *_, last_line = ["it wrote no error", *child.error_lines()]
        return _StoppedError("failed", f"{ending}: {last_line}")

    def _find_oom_message(self, child: Child) -> str | None:
        texts = self.device.memory.out_of_memory_texts
        return next(
            (line for line in child.error_lines() if any(text in line for text in texts)), None
        )


def connect_to_parent() -> tuple[Callable[[], Any], Callable[[object], None]]:
    """Connect to the parent; return a function that waits for a request, and one that replies.

    The process ends with its parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # If a sandbox forbids this, the watching parent and the memory limit remain.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    # The command does the same.
    keep_freed_memory()
    reduce_gc_frequency()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read_requests() -> None:
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os._exit(0)

    threading.Thread(target=read_requests, daemon=True).start()
    return requests.get, connection.send


def serve() -> None:
    """Serve the parent until it closes the connection."""
    receive, reply = connect_to_parent()
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
