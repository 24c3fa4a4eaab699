"""Shows a live view in the output of a notebook's cell, without widgets.

Rich's own view of notebooks needs ipywidgets, which many installations of Jupyter lack.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from rich.console import Console

from finetune.commands.console import LITERAL
from finetune.commands.live import LiveView
from finetune.events import Emit

COLUMNS = 100
PAGE = '<pre style="white-space: pre-wrap; margin: 0">{code}</pre>'


@contextmanager
def live_in_notebook() -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events in the output of the cell."""
    with NotebookView() as view:
        yield view.show


def make_recorder() -> Console:
    """Return a console whose text becomes HTML."""
    return Console(
        file=io.StringIO(),
        record=True,
        force_jupyter=False,
        force_terminal=False,  # Jupyter sets FORCE_COLOR, and HTML has no cursor
        width=COLUMNS,
        soft_wrap=True,
        **LITERAL,
    )


class NotebookView(LiveView):
    """Replaces the output of the cell with the lines so far and the running stage."""

    def __init__(self) -> None:
        super().__init__(make_recorder())
        self._frame = make_recorder()
        display = import_module("IPython.display").display
        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def refresh(self) -> None:
        """Draw what stands there now; at the end the lines alone."""
        with self._lock:
            pages = [_html(self.console, clear=False)]
            if self._started:
                self._frame.print(self.renderable)
                pages.append(_html(self._frame, clear=True))
            self._output.update({"text/html": "".join(pages)}, raw=True)


def _html(console: Console, *, clear: bool) -> str:
    return console.export_html(clear=clear, inline_styles=True, code_format=PAGE)
