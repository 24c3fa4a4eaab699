"""Shows what goes on, on standard error: a moving line on a terminal, plain lines elsewhere."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from finetune.events import Event, Stage, Tell, Update, Validation, Warning

LINE_WITHOUT_END = 1_000_000
# Texts and names of classes may look like rich's markup or like its names of emoji.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


@contextmanager
def showing(*, is_quiet: bool, has_progress: bool) -> Iterator[Tell]:
    """Yield a ``Tell`` that shows events until the work is done.

    Args:
        is_quiet: Show warnings only.
        has_progress: Draw a moving line where standard error is a terminal.
    """
    console = Console(stderr=True, soft_wrap=True, **LITERAL)
    bar = Progress(
        BarColumn(bar_width=12),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=is_quiet or not has_progress or not console.is_terminal,
        transient=True,
    )
    with bar:
        shown = _Display(console, bar)
        yield shown.tell_warning if is_quiet else shown.tell


class _Display:
    def __init__(self, console: Console, bar: Progress) -> None:
        self._console, self._bar = console, bar
        self._task: Any = None

    def tell(self, event: Event) -> None:
        if isinstance(event, Stage):
            self._print(event.message)
        elif isinstance(event, Validation):
            self._print(_validation_line(event))
        elif isinstance(event, Update):
            self._show_update(event)
        else:
            self.tell_warning(event)

    def tell_warning(self, event: Event) -> None:
        if isinstance(event, Warning):
            remedy = f" ({event.remedy})" if event.remedy else ""
            self._console.print(f"warning: {event.message}{remedy}", style="yellow")

    def _show_update(self, event: Update) -> None:
        if self._bar.disable:
            self._print(
                f"update {event.update}/{event.total_updates}  loss {event.loss:.3f}  "
                f"lr {event.learning_rate:.1e}  {_speed_and_memory(event)}  "
                f"{event.remaining_seconds:.0f} s left"
            )
            return
        if self._task is None:
            self._task = self._bar.add_task("training", total=event.total_updates, figures="")
        # Short, so that all of it fits into 80 columns.
        figures = f"loss {event.loss:.3f}  {_speed_and_memory(event)}"
        self._bar.update(self._task, completed=event.update, figures=figures)

    def _print(self, line: str) -> None:
        self._console.print(line)


def show_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def show_figures(title: str, figures: Mapping[str, Any]) -> None:
    """Print the overall and the per-class figures of a split as tables on standard output."""
    console = Console(**LITERAL)
    console.print(
        f"\n{title}: accuracy {figures['accuracy']:.1%}, macro F1 {figures['macro_f1']:.1%}\n"
    )
    table = Table("class", box=None, pad_edge=False)
    for column in ("precision", "recall", "F1", "rows"):
        table.add_column(column, justify="right")
    for name, row in figures["per_class"].items():
        shares = (f"{row[column]:.1%}" for column in ("precision", "recall", "f1"))
        table.add_row(name, *shares, f"{row['support']:.0f}")
    console.print(table)


def show_answers(answers: Sequence[Mapping[str, Any]]) -> None:
    """Print predicted classes as a table on standard output."""
    table = Table("label", "probability", "text", box=None, pad_edge=False)
    for answer in answers:
        table.add_row(answer["label"], f"{answer['probability']:.3f}", answer["text"])
    # A pipe has no width to fold lines at.
    is_terminal = Console().is_terminal
    Console(width=None if is_terminal else LINE_WITHOUT_END, **LITERAL).print(table)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns on standard output."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key}: {_plain(one)}" for key, one in value.items())
        table.add_row(name.replace("_", " "), _plain(value))
    Console(**LITERAL).print(table)


def show_lines(*lines: str) -> None:
    """Print lines on standard output, after an empty one."""
    click.echo("\n" + "\n".join(lines))


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _speed_and_memory(event: Update) -> str:
    gibibytes = event.memory_bytes / 2**30
    return f"{event.examples_per_second:.0f} examples/s  {gibibytes:.2f} GiB"


def _validation_line(event: Validation) -> str:
    figures = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
    best = "  (best so far)" if event.is_best else ""
    return f"epoch {event.epoch:.2f}: validation {figures}{best}"
