"""Shows events on standard error: live on a terminal and in a notebook, elsewhere as lines.

Rich is imported where something is shown, so that ``--help`` stays quick.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from finetune.commands.console import LITERAL
from finetune.distributed.launch import read_launch
from finetune.events import Emit, ignore

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def showing(*, quiet: bool, no_progress: bool) -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events, live where that can be; if quiet, warnings alone.

    Of several processes the main one alone shows any.
    """
    if not read_launch().is_main:
        yield ignore
        return
    from rich.console import Console

    from finetune.commands.lines import Lines

    file = cast(TextIO, _UnfailingStream(sys.stderr)) if sys.stderr else None
    console = Console(file=file, stderr=True, soft_wrap=True, **LITERAL)
    if quiet or no_progress:
        yield Lines(console, is_quiet=quiet).show
    elif console.is_jupyter:
        from finetune.commands.notebook import live_in_notebook

        with live_in_notebook() as emit:
            yield emit
    elif _can_be_live(console):
        from finetune.commands.live import live_on_terminal

        with live_on_terminal(console) as emit:
            yield emit
    else:
        yield Lines(console, is_quiet=False).show


def _can_be_live(console: "Console") -> bool:
    """Return whether there is a terminal with a cursor; FORCE_COLOR asks for colours alone."""
    is_terminal = bool(sys.stderr and sys.stderr.isatty())
    return is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


class _UnfailingStream:
    """A stream for progress: the work goes on where its reader is gone or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Still so while the file descriptor leads to the terminal through another process.
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()
