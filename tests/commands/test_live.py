"""The live view, on a console of some width."""

import io
import re
import signal
import threading
from collections.abc import Sequence

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live

from finetune.commands.console import LITERAL
from finetune.commands.live import LiveView, live_on_terminal
from finetune.commands.running import Running
from finetune.events import (
    Advance,
    Event,
    Info,
    StageFinished,
    StageStarted,
    Step,
    Validation,
    WarningMessage,
)

CODE = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


@pytest.fixture(autouse=True)
def _running_stages_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Running, "seconds", lambda running: 0.0)


def step_event(number: int, *, total: int = 14_000) -> Step:
    return Step(
        step=number,
        total_steps=total,
        epoch=number / total,
        loss=1.5,
        learning_rate=3e-5,
        examples_per_second=12_310.4,
        memory_bytes=3 * 2**29,
        held_bytes=2 * 2**30,
        budget_bytes=64 * 2**30,
        remaining_seconds=42.4,
    )


def validation(number: int, *, epoch: float, accuracy: float, is_best: bool) -> Validation:
    return Validation(number, epoch, {"accuracy": accuracy, "loss": 1.25}, is_best)


TRAINING: list[Event] = [
    StageStarted("load"),
    Info("data: 日本語.csv, 👩🏽‍🚀 שלום \x1b[2J"),
    WarningMessage("something is [red]odd[/]", remedy="look at it"),
    StageFinished("load", 2.34),
    StageStarted("precision"),
    StageFinished("precision", 0.01),
    StageStarted("train"),
    step_event(5_000),
    validation(7_000, epoch=40.0, accuracy=0.921, is_best=True),
    validation(14_000, epoch=80.0, accuracy=0.912, is_best=False),
    step_event(13_999),
]
RECORD: list[Event] = [*TRAINING, StageFinished("train", 4_323.0), StageStarted("evaluate")]


def make_terminal(*, width: int = 80, has_colour: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        no_color=not has_colour,
        soft_wrap=True,
        **LITERAL,
    )


def live_view(events: Sequence[Event], *, width: int = 80, has_colour: bool = False) -> list[str]:
    """Return what stands on a terminal after these events, the running stage at the end."""
    console = make_terminal(width=width, has_colour=has_colour)
    view = LiveView(console)
    for event in events:
        view.show(event)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("has_colour", [True, False])
@pytest.mark.parametrize("width", [80, 200])
def test_the_live_view_fits_the_terminal_with_and_without_colours(
    width: int, has_colour: bool
) -> None:
    for number in range(1, len(RECORD)):
        lines = live_view(RECORD[:number], width=width, has_colour=has_colour)
        plain_lines = [CODE.sub("", line) for line in lines]
        assert all(cell_len(line) <= width for line in plain_lines)
        assert not any("\x1b" in line or "…" in line for line in plain_lines)
    assert any(map(COLOUR.search, lines)) is has_colour


def test_a_finished_stage_stays_with_its_time_and_what_came_of_it() -> None:
    lines = [CODE.sub("", line) for line in live_view(RECORD)]
    assert lines[0] == "data: 日本語.csv, 👩🏽‍🚀 שלום \\u001b[2J"
    assert lines[1] == "warning: something is [red]odd[/] (look at it)"
    assert lines[2] == "✓ load         2.3 s"
    assert lines[3] == (
        "✓ train      1:12:03  13,999/14,000 steps, best accuracy 0.9210 at epoch 40"
    )
    assert re.fullmatch(r". evaluate +0.0 s *", lines[4])
    assert len(lines) == 5


def test_a_long_fact_is_folded_between_words_and_a_warning_left_to_the_terminal() -> None:
    words = "word " * 19 + "end"
    fact, rest, warning, _ = live_view([Info(words), WarningMessage(words), StageStarted("load")])
    assert (CODE.sub("", fact).split() + CODE.sub("", rest).split()) == words.split()
    assert CODE.sub("", warning) == f"warning: {words}"


def test_a_running_training_shows_what_was_reported_last_in_two_lines() -> None:
    *_, first, second = (CODE.sub("", line) for line in live_view(TRAINING))
    assert re.fullmatch(r". train  [━╸╺ ]+  13,999/14,000  0.0 s left *", first)
    words = "loss 1.500  accuracy 0.912 (best 0.921)  12,310 examples/s  1.5 of 64.0 GiB"
    assert second.strip() == words


def test_the_count_of_one_split_gives_way_to_that_of_the_next() -> None:
    counted: list[Event] = [Advance(done=7, total=10)]
    assert "7/10" in live_view(counted)[-1]
    counted += [Advance(done=10, total=10), Advance(done=3, total=4)]
    last = live_view(counted)[-1]
    assert "3/4" in last
    assert "/10" not in last


def lines_that_stay(written: str) -> list[str]:
    """Return the lines of a terminal that has erased what it was told to."""
    lines = [""]
    for code, text in re.findall(r"(\x1b\[[0-9?;]*[A-Za-z]|\r|\n)|([^\x1b\r\n]+)", written):
        if code == "\n":
            lines.append("")
        elif code == "\x1b[1A":
            lines.pop()
        elif code == "\x1b[2K":
            lines[-1] = ""
        lines[-1] += text
    return lines


def test_a_line_that_is_printed_while_the_view_is_refreshed_erases_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_refreshed = threading.Event()

    class Written(io.StringIO):
        def write(self, text: str) -> int:
            if threading.current_thread() is not threading.main_thread():
                is_refreshed.set()
            return super().write(text)

    def draw_during_a_refresh(running: Running) -> float:
        if threading.current_thread() is threading.main_thread():
            is_refreshed.clear()
            is_refreshed.wait(timeout=0.5)
        return 0.0

    console = make_terminal()
    console.file = Written()
    with live_on_terminal(console) as emit:
        for event in (StageStarted("train"), step_event(1), Info("one")):
            emit(event)
        monkeypatch.setattr(Running, "seconds", draw_during_a_refresh)
        emit(StageFinished("train", 2.0))
        monkeypatch.undo()
    one, train, *rest = lines_that_stay(console.file.getvalue())
    assert (one, train[:7], any(rest)) == ("one", "✓ train", False)


def test_a_signal_while_the_view_starts_leaves_no_frame_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames = []

    def refresh(view: LiveView) -> None:
        Live.refresh(view)
        frames.append(view)
        if len(frames) == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LiveView, "refresh", refresh, raising=False)
    console = make_terminal()
    with pytest.raises(KeyboardInterrupt), live_on_terminal(console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert frames
    assert not any(lines_that_stay(console.file.getvalue()))
