import io
import re
from typing import Any

import pytest
from rich.console import Console

from finetune.commands.console import LITERAL, View, showing
from finetune.events import Advance, Event, Info, Stage, Step, Validation, WarningMessage

COLOR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


def step(number: int, *, total: int = 14_000) -> Step:
    return Step(number, total, number / total, 1.5, 3e-5, 12_310.4, 3 * 2**29, 2**31, 2**36, 42.4)


EVENTS: list[Event] = [
    Advance(done=640, total=1280),
    Info("reading [bold]things[/] :smile:"),
    WarningMessage("something is [red]odd[/]", remedy="look at it"),
    WarningMessage("something else is odd"),
    step(5, total=20),
    Validation(step=20, epoch=1.0, metrics={"accuracy": 0.5, "mse": 1.4e-6}, is_best=True),
]


def show_all(*, is_quiet: bool = False) -> None:
    with showing(quiet=is_quiet, no_progress=False) as emit:
        for event in EVENTS:
            emit(event)


def test_events_are_plain_lines_on_stderr_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR")
    show_all()
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "  640/1,280 examples",
        "reading [bold]things[/] :smile:",
        "warning: something is [red]odd[/] (look at it)",
        "warning: something else is odd",
        "step 5/20  loss 1.500  lr 3.0e-05  12,310 examples/s  1.50 GiB  42 s left",
        "epoch 1.00: validation accuracy 0.5000, mse 1.4e-06  (best so far)",
    ]


def test_quiet_shows_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    show_all(is_quiet=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["warning"] * 2


def test_terminal_shows_a_progress_bar_and_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR")
    lines, shown = view(has_bar=True, force_terminal=True)
    with lines.bar:
        for event in EVENTS:
            lines.show(event)
    assert "5/20" in shown.getvalue()
    assert "loss 1.500" in shown.getvalue()
    assert "step 5/20" not in shown.getvalue()
    assert COLOR.search(shown.getvalue())


def view(*, has_bar: bool = False, **options: Any) -> tuple[View, io.StringIO]:
    console = Console(file=(shown := io.StringIO()), width=200, **LITERAL, **options)
    return View(console, has_bar=has_bar), shown


@pytest.mark.parametrize(("epochs", "steps_per_epoch", "max_lines"), [(100, 23, 10), (6, 50, 16)])
def test_pipe_gets_few_lines_for_any_number_of_epochs(
    epochs: int, steps_per_epoch: int, max_lines: int
) -> None:
    total = epochs * steps_per_epoch
    lines, shown = view()
    lines.show(Stage("train"))
    for number in range(1, total + 1):
        epoch, rest = divmod(number, steps_per_epoch)
        if number % 10 == 0 or rest == 0:
            lines.show(step(number, total=total))
        if rest == 0:
            lines.show(Validation(number, epoch, {"accuracy": 0.5}, is_best=epoch == 2))
    lines.show(Stage("train", 72.0))
    *progress, last = shown.getvalue().splitlines()
    assert min(epochs, 10) <= len(progress) <= max_lines
    assert progress[-1].startswith(f"epoch {epochs}.00: validation accuracy 0.5000")
    assert last == "train: 1 min 12 s"
