"""The functions of the Python API, shown as the commands are."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from finetune.cli.progress import showing
from finetune.events import Emit, ignore


def shown_live(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that shows its events in a notebook and on a terminal.

    It shows nothing with an ``emit`` of the caller's, with ``progress=False``, or where nobody
    watches; with ``progress=True`` it prints lines there.
    """

    @wraps(function)
    def call(
        *arguments: Any, emit: Emit | None = None, progress: bool | None = None, **options: Any
    ) -> Any:
        is_shown = is_watched() if progress is None else progress
        if emit or not is_shown:
            return function(*arguments, emit=emit or ignore, **options)
        with showing(quiet=False, no_progress=False) as show:
            return function(*arguments, emit=show, **options)

    return call


def is_watched() -> bool:
    """Return whether someone sees what is shown: in a notebook or on a terminal."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())
