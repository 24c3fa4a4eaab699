"""Shows events on standard error: a live view on a terminal, elsewhere lines."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from finetune.cli.console import LITERAL
from finetune.cli.running import Count, Running, clock, line_of
from finetune.escaping import escape_line
from finetune.events import (
    Advance,
    Emit,
    Event,
    Info,
    Probe,
    StageFinished,
    StageStarted,
    Update,
    Validation,
    WarningMessage,
)

LIBRARIES = "libraries"
REFRESHES_A_SECOND = 4
# A stage that takes less is not worth a line, nor a pause between two stages a spinner.
SHORTEST_STAGE_SECONDS = 0.1
SHORTEST_PAUSE_SECONDS = 1.0
LONGEST_BAR = 40
WIDTH_BESIDE_BAR = 50
# Elsewhere than on a terminal: of many validations about ten, and reports of the loss where there
# are fewer than seven, or where nothing was printed for some time.
VALIDATION_LINES = 10
UPDATE_LINES = 7
LONGEST_SILENCE_SECONDS = 600.0


@contextmanager
def open_view(*, is_quiet: bool, is_live: bool) -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events, live if a terminal can; if quiet, warnings alone."""
    file = cast(TextIO, _Standing(sys.stderr)) if sys.stderr else None
    console = Console(file=file, stderr=True, soft_wrap=True, **LITERAL)
    if is_quiet or not is_live:
        yield Lines(console, is_quiet=is_quiet).show
    elif console.is_jupyter:
        from finetune.cli.notebook import NotebookLive, make_recorder

        view = LiveView(recorder := make_recorder())
        with NotebookLive(view, recorder):
            yield view.show
    elif not _can_be_live(console):
        yield Lines(console, is_quiet=False).show
    else:
        with _live_on_terminal(view := LiveView(console), console):
            yield view.show


@contextmanager
def _live_on_terminal(view: "LiveView", console: Console) -> Iterator[None]:
    live = Live(
        view,
        console=console,
        refresh_per_second=REFRESHES_A_SECOND,
        transient=True,
        # What a user's own module prints belongs above the view, but not if it goes elsewhere.
        redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
    )
    try:
        with live:
            yield
    finally:  # a signal may have come while it started or stopped
        console.show_cursor()


def _can_be_live(console: Console) -> bool:
    """Return whether there is a terminal with a cursor; FORCE_COLOR asks for colours alone."""
    is_terminal = bool(sys.stderr and sys.stderr.isatty())
    return is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


class _Standing:
    """A stream for progress: the work goes on where its reader is gone or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class LiveView:
    """Shows finished stages as a line each, and the running one in two lines that change.

    Args:
        console: Prints what stays; the view itself is what changes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        is_ascii = console.options.ascii_only
        self._mark = "*" if is_ascii else "✓"
        self._spinner = Spinner("line" if is_ascii else "dots")
        self._running = Running(LIBRARIES)

    def show(self, event: Event) -> None:
        """Print an event, or keep it for the next refresh."""
        if self._running.name == LIBRARIES:
            self._finish(StageFinished(LIBRARIES, self._running.seconds()))
        match event:
            case StageStarted():
                self._running = Running(event.name)
            case StageFinished():
                self._finish(event)
            case Advance():
                self._running.note_advance(event)
            case Update():
                self._running.note_update(event)
            case Validation():
                self._running.note_validation(event)
            case WarningMessage():  # the terminal folds it, so that a command in it can be copied
                self._console.print(_styled(event))
            case Info() | Probe():
                self._console.print(_styled(event, style="dim"), soft_wrap=False)

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
        if running.update is None:
            return line
        return Group(line, Text(f"  {running.report()}", no_wrap=True, overflow="ellipsis"))

    def _bar(self, count: Count) -> list[RenderableType]:
        if not count.total:
            return []
        width = max(5, min(LONGEST_BAR, self._console.width - WIDTH_BESIDE_BAR))
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
            self._console.print(Text.assemble((self._mark, "green"), what))


class Lines:
    """Shows events as lines; of many updates and validations, some.

    Args:
        console: Prints them.
        is_quiet: Whether only warnings are shown.
    """

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console, self._is_quiet = console, is_quiet
        self._running = Running("")
        self._update_shown = self._validation_shown = 0
        self._shown = time.monotonic()

    def show(self, event: Event) -> None:
        """Print an event, if it is due."""
        if self._is_quiet and not isinstance(event, WarningMessage):
            return
        match event:
            case StageStarted():
                self._running = Running(event.name)
                self._update_shown = self._validation_shown = 0
            case StageFinished():
                self._finish(event)
            case Update() if not self._is_update_due(event):
                pass
            case Validation() if not self._is_validation_due(event):
                pass
            case _:
                self._console.print(_styled(event))

    def _finish(self, event: StageFinished) -> None:
        if event.seconds >= SHORTEST_STAGE_SECONDS:
            words = filter(None, [line_of(event), self._running.outcome()])
            self._console.print(Text(", ".join(words)))

    def _is_update_due(self, event: Update) -> bool:
        self._running.note_update(event)
        passed_updates = event.update - self._update_shown
        is_due = passed_updates * UPDATE_LINES > event.total_updates
        if is_due or time.monotonic() - self._shown > LONGEST_SILENCE_SECONDS:
            self._update_shown, self._shown = event.update, time.monotonic()
            return True
        return False

    def _is_validation_due(self, event: Validation) -> bool:
        self._running.note_validation(event)
        passed_updates = event.update - self._validation_shown
        if passed_updates * VALIDATION_LINES < self._running.count.total:
            return False
        self._update_shown = self._validation_shown = event.update
        self._shown = time.monotonic()
        return True


def _styled(event: Event, *, style: str = "") -> Text:
    is_warning = isinstance(event, WarningMessage)
    return Text(escape_line(line_of(event)), style="yellow" if is_warning else style)
