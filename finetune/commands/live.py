"""Shows events live: finished stages as lines, the running one in two that change."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from finetune.commands.lines import SHORTEST_STAGE_SECONDS, styled
from finetune.commands.running import Count, Running, clock
from finetune.events import (
    Advance,
    Emit,
    Event,
    Info,
    Probe,
    StageFinished,
    StageStarted,
    Step,
    Validation,
    WarningMessage,
)
from finetune.training.interruption import stop_on_signal

LIBRARIES = "libraries"
REFRESHES_A_SECOND = 4
# A pause between two stages that takes less is not worth a spinner.
SHORTEST_PAUSE_SECONDS = 1.0
MAX_BAR = 40
WIDTH_BESIDE_BAR = 50


@contextmanager
def live_on_terminal(console: Console) -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events on a terminal with a cursor."""
    view = LiveView(console)
    try:
        with _deferring_signals():
            view.start(refresh=True)
        yield view.show
    finally:
        with _deferring_signals():
            view.stop()


@contextmanager
def _deferring_signals() -> Iterator[None]:
    """Let a signal wait for the end: in the middle it would leave a frame and a hidden cursor."""
    with stop_on_signal() as request:
        yield
    if request.number is not None:
        signal.raise_signal(request.number)


class LiveView(Live):
    """Shows finished stages as a line each, and the running one in two lines that change.

    Args:
        console: Prints what stays; the view itself is what changes.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            self,
            console=console,
            refresh_per_second=REFRESHES_A_SECOND,
            transient=True,
            # What a user's own module prints belongs above the view, but not if it goes elsewhere.
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
        )
        is_ascii = console.options.ascii_only
        self._mark = "*" if is_ascii else "✓"
        self._spinner = Spinner("line" if is_ascii else "dots")
        self._running = Running(LIBRARIES)

    def show(self, event: Event) -> None:
        """Print an event, or keep it for the next refresh."""
        # A refresh in another thread at the same time would erase lines that are to stay.
        with self._lock:
            self._show(event)

    def _show(self, event: Event) -> None:
        if self._running.name == LIBRARIES:
            self._finish(StageFinished(LIBRARIES, self._running.seconds()))
        match event:
            case StageStarted():
                self._running = Running(event.name)
            case StageFinished():
                self._finish(event)
            case Advance():
                self._running.note_advance(event)
            case Step():
                self._running.note_step(event)
            case Validation():
                self._running.note_validation(event)
            case WarningMessage():  # the terminal folds it, so that a command in it can be copied
                self.console.print(styled(event))
            case Info() | Probe():
                self.console.print(styled(event, style="dim"), soft_wrap=False)

    def __rich__(self) -> RenderableType:
        """Return the running stage: its progress, and in training what was reported last."""
        running = self._running
        is_pause = not running.name and not running.count.total
        if is_pause and running.seconds() < SHORTEST_PAUSE_SECONDS:
            return ""
        name = f"loading {LIBRARIES}" if running.name == LIBRARIES else running.name
        self._spinner.update(text=Text(name, style="bold"))
        time_taken: list[RenderableType] = [Text(clock(running.seconds()), style="dim")]
        cells = [self._spinner, *(self._bar(running.count) or time_taken)]
        line = Table.grid(*[Column(no_wrap=True) for _ in cells], padding=(0, 2, 0, 0))
        line.add_row(*cells)
        if running.step is None:
            return line
        return Group(line, Text(f"  {running.report()}", no_wrap=True, overflow="ellipsis"))

    def _bar(self, count: Count) -> list[RenderableType]:
        if not count.total:
            return []
        width = max(5, min(MAX_BAR, self.console.width - WIDTH_BESIDE_BAR))
        left_seconds = count.left_seconds()
        left = "" if left_seconds is None else f"{clock(left_seconds)} left"
        return [
            ProgressBar(count.total, count.done, width=width, complete_style="cyan"),
            Text(f"{count.done:,}/{count.total:,}"),
            Text(left, style="dim"),
        ]

    def _finish(self, event: StageFinished) -> None:
        """Print a line for what is finished; nothing runs now."""
        outcome, self._running = self._running.outcome(), Running("")
        if event.seconds >= SHORTEST_STAGE_SECONDS:
            what = f" {event.name:10} {clock(event.seconds):>7}  {outcome}".rstrip()
            self.console.print(Text.assemble((self._mark, "green"), what))
