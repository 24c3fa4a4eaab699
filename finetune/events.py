"""Events of a run, and the context variable with the function that receives them."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

TrialStatus = Literal["fits", "too_big", "timed_out", "failed"]


@dataclass(frozen=True)
class Info:
    """The current activity, or a fact."""

    message: str


class Guess(Info):
    """Guessed columns, with reasons."""


@dataclass(frozen=True)
class Stage:
    """A stage of a run, such as ``load``, started or, with ``seconds``, finished successfully."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True)
class WarningMessage:
    """A problem that doesn't stop the work, and what the user can do about it."""

    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Advance:
    """Progress of the work that the last ``Info`` announced, in rows."""

    done: int
    total: int


@dataclass(frozen=True)
class Trial:
    """A trial of a batch size, with the whole model or a part."""

    batch_size: int
    status: TrialStatus
    peak_bytes: int | None = None
    examples_per_second: float | None = None
    seconds: float = 0.0
    reason: str = ""
    part: str = "whole"


@dataclass(frozen=True)
class Step:
    """The state of training after a step. The loss is the mean since the last report."""

    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    examples_per_second: float
    memory_bytes: int
    reserved_bytes: int
    budget_bytes: int
    remaining_seconds: float


@dataclass(frozen=True)
class Validation:
    """The model was evaluated on the validation split, after a step."""

    step: int
    epoch: float
    metrics: Mapping[str, float]
    is_best: bool


Event = Info | Stage | Advance | Trial | WarningMessage | Step | Validation
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Do nothing with an event."""


_receiver: ContextVar[Emit] = ContextVar("receiver", default=ignore)


def emit(event: Event) -> None:
    """Send an event to the current receiver: a command, a callback or the journal of a run."""
    _receiver.get()(event)


def current_receiver() -> Emit:
    """Return the current receiver of events."""
    return _receiver.get()


@contextmanager
def sent_to(receiver: Emit) -> Iterator[None]:
    """Send all events in the block to a function."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def muted() -> AbstractContextManager[None]:
    """Drop all events in the block."""
    return sent_to(ignore)


class StageClock:
    """Measures the seconds per stage in this process. Time is attributed to the innermost stage."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Restart from zero, in stage ``imports``."""
        self._seconds, self._running = defaultdict[str, float](float), ["imports"]
        self._since = time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far."""
        now = time.perf_counter()
        self._seconds[self._running[-1]] += now - self._since
        self._since = now
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        seconds = self.seconds()
        self._seconds.clear()
        return seconds

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Attribute the time of the block to a stage."""
        self.seconds()
        self._running.append(name)
        try:
            yield
        finally:
            self.seconds()
            self._running.pop()


clock = StageClock()


@contextmanager
def stage(name: str, *, counts_as: str = "") -> Iterator[None]:
    """Emit the start and, unless it fails, the end of a stage."""
    emit(Stage(name))
    started = time.perf_counter()
    with clock(counts_as or name):
        yield
    emit(Stage(name, time.perf_counter() - started))
