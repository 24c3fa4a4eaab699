import io
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from finetune.commands.progress import showing
from finetune.events import Advance, Event, Info, Step, Validation, WarningMessage

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
EVENTS: list[Event] = [
    Info("reading [bold]things[/] :smile:"),
    WarningMessage("something is [red]odd[/]", remedy="look at it"),
    WarningMessage("something else is odd"),
    Step(
        step=5,
        total_steps=20,
        epoch=0.25,
        loss=1.5,
        learning_rate=3e-5,
        examples_per_second=120.4,
        memory_bytes=3 * 2**29,
        held_bytes=2 * 2**30,
        budget_bytes=6 * 2**30,
        remaining_seconds=42.4,
    ),
    Validation(step=20, epoch=1.0, metrics={"accuracy": 0.5, "loss": 1.25}, is_best=True),
]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, stream: str) -> Iterator[io.StringIO]:
    """Make a standard stream a terminal, and yield what was written to it, in the end."""
    shown = io.StringIO()
    reading, writing = os.openpty()

    def read() -> None:
        while True:
            try:
                shown.write(os.read(reading, 4096).decode())
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with open(writing, "w", encoding="utf-8") as file:
        monkeypatch.setattr(f"sys.{stream}", file)
        monkeypatch.setenv("TERM", "xterm-256color")
        yield shown
    reader.join()
    os.close(reading)


def show_all(*, is_quiet: bool = False, has_progress: bool = True) -> None:
    with showing(quiet=is_quiet, no_progress=not has_progress) as emit:
        for event in EVENTS:
            emit(event)


def test_elsewhere_than_on_a_terminal_events_are_plain_lines_on_standard_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    show_all()
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "reading [bold]things[/] :smile:",
        "warning: something is [red]odd[/] (look at it)",
        "warning: something else is odd",
        "step 5/20  loss 1.500  lr 3.0e-05  120 examples/s  1.50 GiB  42 s left",
        "epoch 1.00: validation accuracy 0.5000, loss 1.2500  (best so far)",
    ]


def test_rows_are_counted_in_lines_elsewhere_than_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with showing(quiet=False, no_progress=False) as emit:
        emit(Advance(done=640, total=1280))
        emit(Advance(done=1280, total=1280))
    assert capsys.readouterr().err == "  640/1,280 examples\n  1,280/1,280 examples\n"


def test_quiet_counts_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(quiet=True, no_progress=False) as emit:
        emit(Advance(done=640, total=1280))
    assert capsys.readouterr().err == ""


def test_a_long_line_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    with showing(quiet=False, no_progress=False) as emit:
        emit(Info("word " * 100))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_quiet_shows_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    show_all(is_quiet=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("warning: ") for line in lines)


def test_a_terminal_shows_a_moving_line_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    with terminal(monkeypatch, "stderr") as shown:
        show_all()
    assert "5/20" in shown.getvalue()
    assert "loss 1.500" in shown.getvalue()
    assert "step 5/20" not in shown.getvalue()
    assert COLOUR.search(shown.getvalue())


def test_a_terminal_without_colours_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(monkeypatch, "stderr") as shown:
        show_all()
    assert "5/20" in shown.getvalue()
    assert not COLOUR.search(shown.getvalue())


def test_a_view_stays_live_where_its_terminal_is_reached_through_a_pipe_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        terminal(monkeypatch, "stderr"),
        open(os.dup(sys.stderr.fileno()), "wb") as kept,
        showing(quiet=False, no_progress=False) as emit,
    ):
        unread, written = os.pipe()
        os.dup2(written, sys.stderr.fileno())
        emit(EVENTS[0])
        os.dup2(kept.fileno(), sys.stderr.fileno())
        os.close(written)
    with open(unread) as lines:
        assert "\x1b[2K" in lines.read()


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_a_terminal_without_a_cursor_or_a_reader_has_plain_lines(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, "stderr") as shown:
        monkeypatch.setenv(name, value)
        show_all()
    assert "step 5/20  loss 1.500" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


def test_a_terminal_can_have_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stderr") as shown:
        show_all(has_progress=False)
    assert "step 5/20  loss 1.500" in shown.getvalue()


def test_the_moving_line_goes_when_an_error_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_halfway() -> None:
        with showing(quiet=False, no_progress=False) as emit:
            emit(EVENTS[3])
            raise ZeroDivisionError

    with terminal(monkeypatch, "stderr") as shown, pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert shown.getvalue().endswith(("\x1b[?25h", "\x1b[2K"))  # the cursor shows, the line is gone
