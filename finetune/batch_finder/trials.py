"""Try batch sizes in a child process.

The parent uses ``TrialRunner``, the child runs ``serve``. The first request is a case with its
memory limit and the budget. For the first child the budget is None; its first reply is the budget.
Later requests are batch sizes. A reply is a trial, or the arguments of ``ModelUnsupportedError``.
"""

import time
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from finetune.batch_finder.child import Child, ChildEndedError, connect_to_parent
from finetune.batch_finder.results import Case
from finetune.devices.base import Device
from finetune.devices.host import gibibytes, process_bytes, why_short
from finetune.devices.select import select_device
from finetune.errors import FinetuneError, ModelUnsupportedError
from finetune.events import Trial, TrialStatus, emit

# Samples this frequent miss at most 1% of the peak that the kernel records.
_SAMPLE_SECONDS = 0.02
# The state of the machine changes more slowly, and takes longer to read.
_HOST_SAMPLE_SECONDS = 0.25
# Child processes to keep ready: most searches need three or four within a few seconds.
_SPARES = 2


@dataclass
class TrialRunner:
    """Tries batch sizes in a child process, and in a new child after each failure.

    Use it from one thread, because Linux ends a child when the thread that started it ends.
    ``timeout_seconds`` limits each trial and the start of its process.
    """

    case: Case
    device: Device
    limit_bytes: int | None
    timeout_seconds: float
    module: str = "finetune.batch_finder.trials"
    _budget_bytes: int | None = field(init=False, default=None)
    _child: Child | None = field(init=False, default=None)
    _spares: list[Child] = field(init=False, default_factory=list)
    _has_trained: bool = field(init=False, default=False)
    # The highest sample of the memory of the child in this trial.
    _peak_bytes: int = field(init=False, default=0)

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
                self._end_child()
                raise FinetuneError(
                    f"the process of the batch finder can't start: {stop.reason}",
                    remedy="run finetune doctor, or raise --time-limit",
                ) from None
        return self._budget_bytes

    def run(self, batch_size: int, *, new_process: bool = False) -> Trial:
        """Train at a batch size; ``new_process`` asks for a child that has not trained before."""
        if new_process and self._has_trained:
            self._end_child()
        trial = self._try(batch_size)
        emit(trial)
        return trial

    def _try(self, batch_size: int) -> Trial:
        """Train in the child that trained before unless it failed."""
        started = time.perf_counter()
        self.budget_bytes()
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
        return replace(
            trial,
            batch_size=batch_size,
            part=self.case.part,
            peak_bytes=trial.peak_bytes or self._peak_bytes or None,
            seconds=time.perf_counter() - started,
        )

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
                reply = child.receive(seconds=_SAMPLE_SECONDS)
            except ChildEndedError:
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
                raise _StoppedError(
                    "timed_out", f"the trial took longer than {self.timeout_seconds:g} s"
                )

    def _check_budget(self, reserved_bytes: int) -> None:
        if self._budget_bytes is not None and reserved_bytes > self._budget_bytes:
            raise _StoppedError("too_big", f"it used more than {gibibytes(self._budget_bytes)}")

    def _explain_end(self, child: Child) -> "_StoppedError":
        ending = child.exit_status()
        if line := self._find_oom_message(child):
            return _StoppedError("too_big", f"the process {ending}: {line}")
        if ending.endswith("SIGKILL"):
            reason = f"the process {ending}, which the system does when memory runs out"
            return _StoppedError("too_big", reason)
        return _StoppedError("failed", child.describe_end())

    def _find_oom_message(self, child: Child) -> str | None:
        texts = self.device.memory.out_of_memory_texts
        return next(
            (line for line in child.error_lines() if any(text in line for text in texts)), None
        )


class _StoppedError(Exception):
    """A trial ended without a measurement."""

    def __init__(self, status: TrialStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def serve() -> None:
    """Serve the parent until it closes the connection."""
    receive, reply = connect_to_parent()
    # This import takes seconds, and the parent does not need it.
    from finetune.batch_finder.trial_model import build_trial_model, measure

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
