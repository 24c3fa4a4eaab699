"""Has a child process train at a batch size, watches it, and survives whatever becomes of it."""

import math
import time
from typing import Any

from finetune.batch_finder.case import Case
from finetune.batch_finder.child import Child, ChildEnded
from finetune.batch_finder.outcomes import Outcome, Verdict
from finetune.batch_finder.worker import MODULE
from finetune.devices.base import Device, gibibytes
from finetune.devices.host_memory import HostWatch, process_bytes
from finetune.errors import ModelUnsupported, ProbeFailed

# Memory sampled this often stays within 1% of the kernel's own record of its peak.
_SAMPLE_SECONDS = 0.02
# The machine as a whole changes slower, and costs more to ask.
_HOST_SAMPLE_SECONDS = 0.25
# Most searches need three fresh children within a few seconds, or one more.
_SPARES = 2
# A child that is killed while it holds this share of its budget has been killed for memory.
_NEARLY_SHARE = 0.9
# What oneDNN says when it gets no memory for the code that it makes, but of other reasons as well.
_VAGUE_TEXT = "could not create a primitive"


class Prober:
    """Tries batch sizes in a child process, and in a new one after each failure.

    A context, at whose end no child is left. It belongs to the thread that made it: Linux ends a
    child with the thread that started it.

    Args:
        limit_bytes: The most memory that the user allows, None for as much as there is.
        timeout_seconds: The most that a probe may take, with the start of its process.
        spares: Children that are started already and have no case; those that are left are ended.
        worker: The module that a child runs.
    """

    def __init__(
        self,
        case: Case,
        *,
        device: Device,
        limit_bytes: int | None,
        timeout_seconds: float,
        spares: list[Child] | None = None,
        worker: str = MODULE,
    ) -> None:
        self._case, self._device, self._worker = case, device, worker
        self._limit_bytes, self._timeout_seconds = limit_bytes, timeout_seconds
        self._budget_bytes: int | None = None
        self._child: Child | None = None
        self._spares = [] if spares is None else spares
        self._has_trained = False

    def __enter__(self) -> "Prober":
        return self

    def __exit__(self, *_: object) -> None:
        self._end_child()
        while self._spares:
            self._spares.pop().kill()

    def budget_bytes(self) -> int:
        """Return the memory that a probe may hold: what the first child finds, for all of them.

        Raises:
            ProbeFailed: If the child fails before it knows.
        """
        if self._budget_bytes is None:
            self._start_child()
            try:
                self._budget_bytes = int(self._watch().await_answer("budget_bytes"))
            except _Stopped as stop:
                self._end_child()
                raise ProbeFailed(
                    f"the batch finder's process can't begin: {stop.reason}",
                    remedy="see what finetune doctor says of the machine",
                ) from None
        return self._budget_bytes

    def probe(self, batch_size: int) -> Outcome:
        """Train at a batch size, in the child that trained before unless it failed.

        Raises:
            ProbeFailed: As ``budget_bytes`` does.
            ModelUnsupported: If the model can't be split into the case's part.
        """
        started = time.perf_counter()
        self.budget_bytes()
        child = self._child or self._start_child()
        self._has_trained = True
        watch = self._watch()
        child.send(batch_size)
        try:
            found = watch.await_answer("measurement")
            found |= {"verdict": "fits", "peak_bytes": found["peak_bytes"] or watch.peak_bytes}
            watch.check_budget(found["peak_bytes"])
            if line := watch.find_oom_message():
                raise _Stopped("too_big", line)
        except _Stopped as stop:
            self._end_child()
            found = {"verdict": stop.verdict, "reason": stop.reason, "examples_per_second": None}
            found |= {"peak_bytes": watch.peak_bytes or None}
        return Outcome(batch_size=batch_size, seconds=time.perf_counter() - started, **found)

    def probe_afresh(self, batch_size: int) -> Outcome:
        """Train at a batch size in a child that has not trained before."""
        if self._has_trained:
            self._end_child()
        return self.probe(batch_size)

    def _watch(self) -> "_Watch":
        assert self._child
        return _Watch(self._child, self._device, self._budget_bytes, self._timeout_seconds)

    def _start_child(self) -> Child:
        child = self._spares.pop(0) if self._spares else Child(self._worker)
        self._child, self._has_trained = child, False
        # The next children start while this one begins, since importing PyTorch can take ten
        # seconds; but only where they take neither memory nor speed from the one that trains.
        while len(self._spares) < _SPARES and not self._device.memory.is_shared:
            self._spares.append(Child(self._worker))
        budgets = {"limit_bytes": self._limit_bytes, "budget_bytes": self._budget_bytes}
        child.send({"case": self._case.to_json(), **budgets})
        return child

    def _end_child(self) -> None:
        if self._child:
            self._child.kill()
            self._child = None


class _Stopped(Exception):
    """A probe has ended without a measurement."""

    def __init__(self, verdict: Verdict, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


class _Watch:
    """Looks at a child and at the machine's memory while the child works.

    Attributes:
        peak_bytes: The most of the machine's memory that the child was seen to hold.
    """

    def __init__(
        self, child: Child, device: Device, budget_bytes: int | None, timeout_seconds: float
    ) -> None:
        self.peak_bytes = 0
        self._child, self._device, self._budget_bytes = child, device, budget_bytes
        self._timeout_seconds = timeout_seconds
        self._host = HostWatch()
        self._started = self._host_sampled = time.perf_counter()

    def await_answer(self, name: str) -> Any:
        """Return the child's answer of a name; raise _Stopped if the child had to be given up."""
        while True:
            try:
                answer = self._child.receive(seconds=_SAMPLE_SECONDS) or {}
            except ChildEnded:
                raise self._judge_end() from None
            if name in answer:
                return answer[name]
            if "unsupported" in answer:
                raise ModelUnsupported(answer["unsupported"], remedy=answer["remedy"])
            if reason := answer.get("failure"):
                has_no_room = _VAGUE_TEXT in reason and self._was_nearly_full()
                is_out_of_memory = answer["is_out_of_memory"] or has_no_room
                raise _Stopped("too_big" if is_out_of_memory else "failed", reason)
            if "ready" in answer:
                self.peak_bytes = 0
            self._check_machine()

    def check_budget(self, held_bytes: int) -> None:
        """Give the child up if it holds, or held, more than it may."""
        if self._budget_bytes is not None and held_bytes > self._budget_bytes:
            raise _Stopped("too_big", f"it held more than {gibibytes(self._budget_bytes)}")

    def _judge_end(self) -> _Stopped:
        ending = f"the process {self._child.ending()}"
        if line := self.find_oom_message():
            return _Stopped("too_big", f"{ending}: {line}")
        if ending.endswith("SIGKILL") and (self._was_nearly_full() or self._host.has_killed()):
            return _Stopped("too_big", f"{ending}, which the system does when memory runs out")
        lines = self._child.error_lines() or ["it wrote no error"]
        return _Stopped("failed", f"{ending}: {lines[-1]}")

    def _check_machine(self) -> None:
        if self._device.memory.is_shared:
            held_bytes = process_bytes(self._child.process_id)
            self.peak_bytes = max(self.peak_bytes, held_bytes)
            self.check_budget(held_bytes)
        now = time.perf_counter()
        if now - self._host_sampled >= _HOST_SAMPLE_SECONDS:
            self._host_sampled = now
            if why_short := self._host.why_short():
                raise _Stopped("too_big", why_short)
        if now - self._started > self._timeout_seconds:
            raise _Stopped("timed_out", f"not done after {self._timeout_seconds:g} s")

    def _was_nearly_full(self) -> bool:
        return self.peak_bytes > _NEARLY_SHARE * (self._budget_bytes or math.inf)

    def find_oom_message(self) -> str | None:
        """Return what the child printed of memory that ran out, if anything."""
        lines, texts = self._child.error_lines(), self._device.memory.out_of_memory_texts
        return next((line for line in lines if any(text in line for text in texts)), None)
