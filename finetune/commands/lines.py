"""Shows events as lines, of many steps and validations some."""

import time

from rich.console import Console
from rich.text import Text

from finetune.commands.running import Running, line_of
from finetune.escaping import escape_line
from finetune.events import (
    Event,
    StageFinished,
    StageStarted,
    Step,
    Validation,
    WarningMessage,
)

# A stage that takes less is not worth a line.
SHORTEST_STAGE_SECONDS = 0.1
# Of many validations about ten, and reports of the loss where there are fewer than seven, or where
# nothing was printed for some time.
VALIDATION_LINES = 10
UPDATE_LINES = 7
MAX_SILENCE_SECONDS = 600.0


class Lines:
    """Shows events as lines; of many steps and validations, some.

    Args:
        console: Prints them.
        is_quiet: Whether only warnings are shown.
    """

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console, self._is_quiet = console, is_quiet
        self._running = Running("")
        self._step_shown = self._validation_shown = 0
        self._shown = time.monotonic()

    def show(self, event: Event) -> None:
        """Print an event, if it is due."""
        if self._is_quiet and not isinstance(event, WarningMessage):
            return
        match event:
            case StageStarted():
                self._running = Running(event.name)
                self._step_shown = self._validation_shown = 0
            case StageFinished():
                self._finish(event)
            case Step() if not self._is_update_due(event):
                pass
            case Validation() if not self._is_validation_due(event):
                pass
            case _:
                self._console.print(styled(event))

    def _finish(self, event: StageFinished) -> None:
        if event.seconds >= SHORTEST_STAGE_SECONDS:
            words = filter(None, [line_of(event), self._running.outcome()])
            self._console.print(Text(", ".join(words)))

    def _is_update_due(self, event: Step) -> bool:
        self._running.note_step(event)
        passed_steps = event.step - self._step_shown
        is_due = passed_steps * UPDATE_LINES > event.total_steps
        if is_due or time.monotonic() - self._shown > MAX_SILENCE_SECONDS:
            self._step_shown, self._shown = event.step, time.monotonic()
            return True
        return False

    def _is_validation_due(self, event: Validation) -> bool:
        self._running.note_validation(event)
        passed_steps = event.step - self._validation_shown
        if passed_steps * VALIDATION_LINES < self._running.count.total:
            return False
        self._step_shown = self._validation_shown = event.step
        self._shown = time.monotonic()
        return True


def styled(event: Event, *, style: str = "") -> Text:
    """Return an event in words, a warning in yellow, the others in a style."""
    is_warning = isinstance(event, WarningMessage)
    return Text(escape_line(line_of(event)), style="yellow" if is_warning else style)
