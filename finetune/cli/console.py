"""Shows what goes on, on standard error: a moving line on a terminal, plain lines elsewhere."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from finetune.events import Advance, Emit, Event, Probe, Stage, Update, Validation, WarningMessage

LINE_WITHOUT_END = 1_000_000
# Texts and names of classes may look like rich's markup or like its names of emoji.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


@contextmanager
def showing(*, is_quiet: bool, has_progress: bool) -> Iterator[Emit]:
    """Yield a ``Emit`` that shows events until the work is done.

    Args:
        is_quiet: Show warnings only.
        has_progress: Draw a moving line where standard error is a terminal.
    """
    console = Console(stderr=True, soft_wrap=True, **LITERAL)
    bar = Progress(
        BarColumn(bar_width=12),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[metrics]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=is_quiet or not has_progress or not console.is_terminal,
        transient=True,
    )
    with bar:
        shown = _Display(console, bar)
        yield shown.show_warning if is_quiet else shown.emit


class _Display:
    def __init__(self, console: Console, bar: Progress) -> None:
        self._console, self._bar = console, bar
        self._task: Any = None
        self._advance: Any = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Stage):
            self._print(event.message)
        elif isinstance(event, Validation):
            self._print(_validation_line(event))
        elif isinstance(event, Update):
            self._show_update(event)
        elif isinstance(event, Advance):
            self._show_advance(event)
        elif isinstance(event, Probe):
            self._print(_probe_line(event))
        else:
            self.show_warning(event)

    def show_warning(self, event: Event) -> None:
        if isinstance(event, WarningMessage):
            remedy = f" ({event.remedy})" if event.remedy else ""
            self._console.print(f"warning: {event.message}{remedy}", style="yellow")

    def _show_advance(self, event: Advance) -> None:
        if self._bar.disable:
            self._print(f"  {event.done:,}/{event.total:,} rows")
            return
        if self._advance is None:
            self._advance = self._bar.add_task("rows", total=event.total, metrics="rows")
        self._bar.update(self._advance, completed=event.done)
        if event.done == event.total:
            self._bar.remove_task(self._advance)
            self._advance = None

    def _show_update(self, event: Update) -> None:
        if self._bar.disable:
            self._print(
                f"update {event.update}/{event.total_updates}  loss {event.loss:.3f}  "
                f"lr {event.learning_rate:.1e}  {_speed_and_memory(event)}  "
                f"{event.remaining_seconds:.0f} s left"
            )
            return
        if self._task is None:
            self._task = self._bar.add_task("training", total=event.total_updates, metrics="")
        # Short, so that all of it fits into 80 columns.
        metrics = f"loss {event.loss:.3f}  {_speed_and_memory(event)}"
        self._bar.update(self._task, completed=event.update, metrics=metrics)

    def _print(self, line: str) -> None:
        self._console.print(line)


def show_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def show_metrics(title: str, metrics: Mapping[str, Any]) -> None:
    """Print the overall and the per-class figures of a split as tables on standard output."""
    console = Console(**LITERAL)
    console.print(
        f"\n{title}: accuracy {metrics['accuracy']:.1%}, macro F1 {metrics['macro_f1']:.1%}\n"
    )
    table = Table("class", box=None, pad_edge=False)
    for column in ("precision", "recall", "F1", "rows"):
        table.add_column(column, justify="right")
    for name, row in metrics["per_class"].items():
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


def show_kept(entries: Sequence[Any], *, folder: Path) -> None:
    """Print the entries of a feature store as a table on standard output, and their sum."""
    if entries:
        table = Table("last used", "size", "rows", "of", "model", "mode", box=None, pad_edge=False)
        for entry in entries:
            used_at = datetime.fromtimestamp(entry.used_at).strftime("%Y-%m-%d %H:%M")
            rows, data, split, model, mode = (
                _plain(entry.facts.get(name, "?"))
                for name in ("rows", "data", "split", "model", "mode")
            )
            size = size_in_words(entry.size_bytes)
            table.add_row(used_at, size, rows, f"{data}, {split}", model, mode)
        Console(**LITERAL).print(table)
    total_bytes = sum(entry.size_bytes for entry in entries)
    show_lines(f"{size_in_words(total_bytes)} in {folder}")


def size_in_words(size_bytes: int) -> str:
    """Return a size such as ``167.5 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB"


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


def _probe_line(event: Probe) -> str:
    parts = [f"  batch {event.batch_size:,}: {event.verdict.replace('_', ' ')}"]
    if event.peak_bytes is not None:
        parts.append(f"{event.peak_bytes / 2**30:.2f} GiB")
    if event.examples_per_second is not None:
        parts.append(f"{event.examples_per_second:,.0f} examples/s")
    return ", ".join([*parts, f"{event.seconds:.0f} s", *filter(None, [event.reason])])


def _validation_line(event: Validation) -> str:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
    best = "  (best so far)" if event.is_best else ""
    return f"epoch {event.epoch:.2f}: validation {metrics}{best}"
