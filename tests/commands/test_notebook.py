import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.commands.notebook import NotebookView
from finetune.events import Info, StageFinished, StageStarted


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stands in the output of the cell, from one refresh to the next."""
    shown: list[str] = []

    def update(data: dict[str, str], *, raw: bool) -> None:
        shown.append(data["text/html"])

    def display(data: dict[str, str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(update=update)

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter does
    return shown


def test_a_notebook_shows_the_running_stage_and_at_the_end_the_lines_alone(
    pages: list[str],
) -> None:
    with NotebookView() as view:
        view.show(StageFinished("load", 2.34))
        view.show(StageStarted("evaluate"))
        view.show(Info("<b>bold</b>"))
        view.refresh()
    running, end = pages[-2:]
    assert "evaluate" in running
    assert "evaluate" not in end
    for page in (running, end):
        assert "\x1b" not in page
        assert "&lt;b&gt;bold&lt;/b&gt;" in page
        assert "✓ load         2.3 s" in re.sub("<[^>]*>", "", page)
