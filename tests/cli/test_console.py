import io
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from rich.cells import cell_len

from finetune.cli.console import as_text, shorten, show_scores, show_table, showing
from finetune.events import Advance, Event, Info, Update, Validation, WarningMessage
from finetune.tasks.single import ClassScores, SingleScores

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
EVENTS: list[Event] = [
    Info("reading [bold]things[/] :smile:"),
    WarningMessage("something is [red]odd[/]", remedy="look at it"),
    WarningMessage("something else is odd"),
    Update(
        update=5,
        total_updates=20,
        epoch=0.25,
        loss=1.5,
        learning_rate=3e-5,
        examples_per_second=120.4,
        memory_bytes=3 * 2**29,
        held_bytes=2 * 2**30,
        budget_bytes=6 * 2**30,
        remaining_seconds=42.4,
    ),
    Validation(update=20, epoch=1.0, metrics={"accuracy": 0.5, "loss": 1.25}, is_best=True),
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
        "update 5/20  loss 1.500  lr 3.0e-05  120 examples/s  1.50 GiB  42 s left",
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
    assert "update 5/20" not in shown.getvalue()
    assert COLOUR.search(shown.getvalue())


def test_a_terminal_without_colours_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(monkeypatch, "stderr") as shown:
        show_all()
    assert "5/20" in shown.getvalue()
    assert not COLOUR.search(shown.getvalue())


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("CI", "true")])
def test_a_terminal_without_a_cursor_or_a_reader_has_plain_lines(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, "stderr") as shown:
        monkeypatch.setenv(name, value)
        show_all()
    assert "update 5/20  loss 1.500" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


def test_a_terminal_can_have_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, "stderr") as shown:
        show_all(has_progress=False)
    assert "update 5/20  loss 1.500" in shown.getvalue()


def test_the_moving_line_goes_when_an_error_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_halfway() -> None:
        with showing(quiet=False, no_progress=False) as emit:
            emit(EVENTS[3])
            raise ZeroDivisionError

    with terminal(monkeypatch, "stderr") as shown, pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert shown.getvalue().endswith(("\x1b[?25h", "\x1b[2K"))  # the cursor shows, the line is gone


ROW = ClassScores(precision=0.5, recall=1.0, f1=2 / 3, support=12)


def scores(**per_class: ClassScores) -> SingleScores:
    samples = sum(one.support for one in per_class.values())
    return SingleScores(samples, 1.0, 0.9, 0.8, per_class, confusion_matrix=[])


def test_metrics_are_shown_beside_the_baseline_and_by_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_scores("the test", scores(NUM=ROW, HUM=replace(ROW, support=4)))
    *figures, _, header, line, _ = capsys.readouterr().out.strip().splitlines()
    assert figures == [
        "the test",
        "  accuracy 90.0 % (95 % interval 67.0–97.6 % on 16 rows; largest class 75.0 %)",
        "  macro F1 80.0 %",
    ]
    assert header.split() == [
        *("class", "precision", "recall", "95", "%", "interval", "F1", "rows")
    ]
    assert line.split() == [
        *("NUM", "50.0", "%", "100.0", "%", "75.8–100.0", "%", "66.7", "%", "12")
    ]


def test_a_class_may_look_like_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_scores("[red]x[/]", scores(**{"[bold]": ROW, ":a:": ROW}))
    output = capsys.readouterr().out
    assert "[red]x[/]\n  accuracy 90.0 %" in output
    assert "[bold]" in output
    assert ":a:" in output


def test_a_table_has_the_width_of_a_terminal_and_none_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("word " * 40, "1,000"), ("[/]", "1")]
    show_table(("text", "count"), rows, numbers=("count",))
    header, first, second = capsys.readouterr().out.splitlines()
    assert len(header) == len(first) == len(second) == 200 + 2 + 5
    assert second.startswith("[/] ")
    assert second.endswith("      1")
    with terminal(monkeypatch, "stdout") as shown:
        show_table(("text", "count"), rows, numbers=("count",))
    assert len(shown.getvalue().splitlines()) == 3 + 2


def test_a_terminal_folds_texts_and_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ("workload", "phase", "A, cpu", "A, cuda", "B, cpu", "B, cuda", "B / A")
    row = ("classifier, 512 tokens, batch 366, found on cuda", "training", *["1,576,238"] * 5)
    monkeypatch.setenv("NO_COLOR", "1")
    for width in (80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        with terminal(monkeypatch, "stdout") as shown:
            show_table(titles, [row], numbers=titles[2:])
        widths = {
            len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in shown.getvalue().splitlines()
        }
        assert max(widths) <= max(width, 12 + 8 + 5 * 9 + 6 * 2)
        assert shown.getvalue().count("1,576,238") == 5


def test_wide_joined_and_hostile_characters_do_not_move_the_next_column(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = ["plain", "日本語", "👩🏽‍🚀 🇨🇭 ❤️", "שלום عليكم", "a\x1b[2J\u202eb\nc", "e\u0301"]
    show_table(("class", "rows"), [(text, "12") for text in texts], numbers=("rows",))
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(texts)
    assert len({cell_len(line.removesuffix("12")) for line in lines}) == 1


def test_a_table_without_titles_has_no_header(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(("", ""), [("a", "b")])
    assert capsys.readouterr().out == "a  b\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567, "1,234,567"),
        (1234.5678, "1,235"),
        (5e-5, "5e-05"),
        ({"a": 1000, "b": "c"}, "a: 1,000, b: c"),
        (None, "None"),
    ],
)
def test_values_are_shown_as_people_read_them(value: object, shown: str) -> None:
    assert as_text(value) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n b", "a b"), ("x" * 60, "x" * 60), ("x" * 61, "x" * 59 + "…")],
)
def test_an_example_is_one_short_line(text: str, shown: str) -> None:
    assert shorten(text) == shown
