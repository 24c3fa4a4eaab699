"""The stage of the work that runs, and events in words; free of rich."""

import time
from dataclasses import dataclass, field

from finetune.events import (
    Advance,
    Event,
    Info,
    Probe,
    StageFinished,
    StageStarted,
    Step,
    Validation,
    WarningMessage,
)


@dataclass
class Count:
    """How far a count has come, and how long the rest takes at the same pace.

    Args:
        first: Where it began.
        total: Where it ends; 0 if nothing has been counted yet.
    """

    first: int = 0
    done: int = 0
    total: int = 0
    started: float = field(default_factory=time.monotonic)
    moved: float = 0.0

    def move(self, done: int, total: int) -> None:
        """Note how far it has come."""
        self.done, self.total, self.moved = done, total, time.monotonic()

    def left_seconds(self) -> float | None:
        """Return the time that is left, None if nothing has been done since it began."""
        if self.done <= self.first:
            return None
        seconds = (self.moved - self.started) / (self.done - self.first)
        return max(0.0, seconds * (self.total - self.done) - (time.monotonic() - self.moved))


@dataclass
class Running:
    """The stage that runs, and what was last reported of it."""

    name: str
    started: float = field(default_factory=time.monotonic)
    count: Count = field(default_factory=Count)
    step: Step | None = None
    validation: Validation | None = None
    best: Validation | None = None

    def seconds(self) -> float:
        """Return how long it has run."""
        return time.monotonic() - self.started

    def note_advance(self, event: Advance) -> None:
        """Count the rows of a split; the next split is another count."""
        self.count.move(event.done, event.total)
        if event.done == event.total:
            self.count = Count()

    def note_step(self, event: Step) -> None:
        """Count the steps from the first that is reported: a run may be resumed."""
        if self.step is None:
            self.count = Count(first=event.step)
        self.step = event
        self.count.move(event.step, event.total_steps)

    def note_validation(self, event: Validation) -> None:
        """Keep it, and whether it is the best."""
        self.validation = event
        self.best = event if event.is_best else self.best

    def report(self) -> str:
        """Return what the last step and the last validation have found, in 77 columns."""
        if (step := self.step) is None:
            return ""
        parts = [f"loss {step.loss:.3f}"]
        if self.validation and self.best:
            name, value = _first_metric(self.validation)
            parts.append(f"{name} {value:.3f} (best {_first_metric(self.best)[1]:.3f})")
        memory, budget = (size / 2**30 for size in (step.memory_bytes, step.budget_bytes))
        parts.append(f"{step.examples_per_second:,.0f} examples/s")
        return "  ".join([*parts, f"{memory:.1f} of {budget:.1f} GiB"])

    def outcome(self) -> str:
        """Return what a training has come to; of other stages nothing."""
        words = []
        if step := self.step:
            words.append(f"{step.step:,}/{step.total_steps:,} steps")
        if best := self.best:
            name, value = _first_metric(best)
            words.append(f"best {name} {value:.4f} at epoch {best.epoch:.3g}")
        return ", ".join(words)


def line_of(event: Event) -> str:
    """Return an event in words."""
    match event:
        case Info():
            return event.message
        case StageStarted():
            return event.name
        case StageFinished():
            return f"{event.name}: {clock(event.seconds)}"
        case WarningMessage():
            return f"warning: {event.message}" + (f" ({event.remedy})" if event.remedy else "")
        case Advance():
            return f"  {event.done:,}/{event.total:,} examples"
        case Step():
            return (
                f"step {event.step}/{event.total_steps}  loss {event.loss:.3f}  "
                f"lr {event.learning_rate:.1e}  {event.examples_per_second:.0f} examples/s  "
                f"{event.memory_bytes / 2**30:.2f} GiB  {event.remaining_seconds:.0f} s left"
            )
        case Validation():
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return f"epoch {event.epoch:.2f}: validation {metrics}{best}"
        case Probe():
            parts = [f"  batch {event.batch_size:,}: {event.verdict.replace('_', ' ')}"]
            if event.peak_bytes is not None:
                parts.append(f"{event.peak_bytes / 2**30:.2f} GiB")
            if event.examples_per_second is not None:
                parts.append(f"{event.examples_per_second:,.0f} examples/s")
            return ", ".join([*parts, f"{event.seconds:.0f} s", *filter(None, [event.reason])])


def clock(seconds: float) -> str:
    """Return a time such as ``9.5 s``, ``42 s``, ``12:03`` or ``1:02:03``."""
    if round(seconds) < 60:
        return f"{seconds:.{1 if seconds < 9.95 else 0}f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{rest_minutes:02}:{rest_seconds:02}"
    return f"{minutes}:{rest_seconds:02}"


def _first_metric(event: Validation) -> tuple[str, float]:
    """Return the first metric of a validation, which is the first of its task."""
    return next(iter(event.metrics.items()))
