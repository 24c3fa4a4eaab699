"""Shows events on standard error and results on standard output.

Rich is imported where something is shown, so that ``--help`` stays quick.
"""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from finetune.escaping import escape_controls, escape_line
from finetune.events import Advance, Emit, Event, Probe, Stage, Update, Validation, WarningMessage

if TYPE_CHECKING:
    from finetune.tasks.base import Scores

LINE_WITHOUT_END = 1_000_000
LONGEST_EXAMPLE = 60
# Texts and names of classes may look like rich's markup or like its names of emoji.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


@contextmanager
def showing(*, quiet: bool, no_progress: bool) -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events: a bar on a terminal, else lines; if quiet, warnings."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    file = cast(TextIO, _Standing(sys.stderr)) if sys.stderr else None
    console = Console(file=file, stderr=True, soft_wrap=True, **LITERAL)
    has_bar = console.is_terminal and not (quiet or no_progress)
    texts = (TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}"))
    columns = (BarColumn(bar_width=8), *texts, TimeRemainingColumn(compact=True))
    bar = Progress(*columns, console=console, disable=not has_bar, transient=True)
    tasks: dict[type[Event], TaskID] = {}
    validated = ""

    def move(kind: type[Event], description: str, *, done: int, total: int) -> None:
        if kind not in tasks:
            tasks[kind] = bar.add_task("", total=total)
        bar.update(tasks[kind], completed=done, description=description)
        if done == total:
            bar.remove_task(tasks.pop(kind))

    def emit(event: Event) -> None:
        nonlocal validated
        match event:
            case WarningMessage():
                console.print(escape_line(_line(event)), style="yellow")
            case Advance() if has_bar:
                move(Advance, "examples", done=event.done, total=event.total)
            case Update() if has_bar:  # short, so that all of it fits into 80 columns
                metrics = f"loss {event.loss:.3f}  {validated}{_speed_and_memory(event)}"
                move(Update, metrics, done=event.update, total=event.total_updates)
            case Validation() if has_bar:  # of 40 epochs of a head; all are in metrics.jsonl
                name, value = next(iter(event.metrics.items()))
                validated = f"{name} {value:.3f}  "
            case _ if not quiet:
                console.print(escape_line(_line(event)))

    with bar:
        yield emit


class _Standing:
    """A stream for progress: the work goes on where its reader is gone or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _line(event: Event) -> str:
    match event:
        case Stage():
            return event.message
        case WarningMessage():
            return f"warning: {event.message}" + (f" ({event.remedy})" if event.remedy else "")
        case Advance():
            return f"  {event.done:,}/{event.total:,} examples"
        case Update():
            return (
                f"update {event.update}/{event.total_updates}  loss {event.loss:.3f}  "
                f"lr {event.learning_rate:.1e}  {_speed_and_memory(event)}  "
                f"{event.remaining_seconds:.0f} s left"
            )
        case Validation():
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            best = "  (best so far)" if event.is_best else ""
            return f"epoch {event.epoch:.2f}: validation {metrics}{best}"
        case Probe():
            parts = [f"  batch {event.batch_size:,}: {event.verdict.replace('_', ' ')}"]
            if event.peak_bytes is not None:
                parts.append(f"{event.peak_bytes / 2**30:.2f} GiB")
            if event.examples_per_second is not None:
                parts.append(f"{event.examples_per_second:,.0f} examples/s")
            return ", ".join([*parts, f"{event.seconds:.0f} s", *filter(None, [event.reason])])


def _speed_and_memory(event: Update) -> str:
    return f"{event.examples_per_second:.0f} examples/s  {event.memory_bytes / 2**30:.2f} GiB"


def show_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    click.echo(escape_controls(json.dumps(value, ensure_ascii=False)))


def show_lines(*lines: str) -> None:
    """Print lines on standard output, after an empty one."""
    click.echo("\n".join(["", *map(escape_line, lines)]))


def show_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    folds: bool = True,
) -> None:
    """Print a table on standard output; empty titles give no header.

    Columns of ``numbers`` are aligned to the right. If it ``folds``, a terminal folds cells to its
    width; nothing else has a width.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    for title in titles:
        name = escape_line(title)
        table.add_column(name, justify="right" if title in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape_line, row))
    has_width = folds and Console().is_terminal
    Console(width=None if has_width else LINE_WITHOUT_END, **LITERAL).print(table)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns on standard output."""
    show_table(("", ""), [(name.replace("_", " "), as_text(one)) for name, one in facts.items()])


def show_scores(title: str, scores: "Scores") -> None:
    """Print the overall and the per-class metrics of a split on standard output."""
    figures = (f"{one.name} {one}" + f" ({one.note})" * bool(one.note) for one in scores.figures)
    show_lines(f"{title}: {', '.join(figures)}", "")
    if table := scores.table:
        show_table(table.columns, table.rows, numbers=table.columns[table.text_columns :])


def shorten(text: str) -> str:
    """Return a text on one line, of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_EXAMPLE else line[: LONGEST_EXAMPLE - 1] + "…"


def mebibytes(size_bytes: int) -> str:
    """Return a size such as ``167.5 MiB``."""
    return f"{size_bytes / 2**20:,.1f} MiB"


def as_text(value: Any) -> str:
    """Return a value as people read it: numbers with separators, mappings as lists."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {as_text(one)}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
