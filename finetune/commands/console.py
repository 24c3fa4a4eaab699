"""Prints results on standard output and events on standard error.

Events are printed as lines, with a progress bar on terminals and in notebooks. Rich is imported
only when something is shown, to keep ``--help`` fast.
"""

import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

import click

from finetune import events
from finetune.distributed import read_launch
from finetune.files import SCHEMA_VERSION, escape_controls, escape_line
from finetune.tasks.tables import Table, duration, format_rate, format_value

if TYPE_CHECKING:
    from rich.console import Console

    from finetune.tasks.scores import Scores

LINE_WITHOUT_END = 1_000_000
MAX_EXAMPLE = 60
MIN_TEXT_WIDTH = 12
SPACE_BETWEEN_COLUMNS = 2
# Texts and class names can contain what Rich would read as markup or emoji codes.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
LIBRARIES = "loading libraries"
# Shorter stages get no line.
MIN_STAGE_SECONDS = 0.1
# A run prints about ten validations. Without a progress bar it also prints losses if validations
# are rare or nothing was printed for a while.
VALIDATION_LINES = 10
STEP_LINES = 7
MAX_SILENCE_SECONDS = 600.0


def show_json(value: Any) -> None:
    """Print a mapping or a dataclass as one JSON object on standard output."""
    if not isinstance(value, Mapping):
        value = value.to_json() if hasattr(value, "to_json") else asdict(value)
    versioned = {"schema_version": SCHEMA_VERSION, **value}
    click.echo(escape_controls(json.dumps(versioned, ensure_ascii=False, default=asdict)))


def show_lines(*lines: str) -> None:
    """Print an empty line, then these lines, on standard output."""
    click.echo("\n".join(["", *map(escape_line, lines)]))


def show_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    marked: Sequence[Collection[str]] = (),
) -> None:
    """Print a table on standard output, without a header if all titles are empty.

    The columns in ``numbers`` are aligned to the right. On a terminal, other cells are wrapped to
    its width; elsewhere they are not wrapped. ``marked`` contains, for each row, the lowercase
    words to highlight in its last cell.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from finetune.tasks.explanation import split_at_words

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    cells = [list(map(escape_line, row)) for row in (titles, *rows)]
    min_width = SPACE_BETWEEN_COLUMNS * (len(titles) - 1)
    for title, column in zip(titles, zip(*cells, strict=True), strict=True):
        is_number, width = title in numbers, max(map(cell_len, column))
        min_width += width if is_number else min(width, MIN_TEXT_WIDTH)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(column[0], justify=justify, no_wrap=is_number, overflow="fold")
    for number, row in enumerate(cells[1:]):
        last: str | Text = row[-1]
        if marked:
            pieces = split_at_words(row[-1], marked[number])
            last = Text.assemble(*((piece, "bold reverse" * is_word) for piece, is_word in pieces))
        table.add_row(*row[:-1], last)
    terminal = Console()
    width = max(terminal.width, min_width) if terminal.is_terminal else LINE_WITHOUT_END
    Console(width=width, **LITERAL).print(table)


def show_paragraph(text: str) -> None:
    """Print an empty line, then a text in short lines, on standard output."""
    show_lines(*click.wrap_text(text).splitlines())


def show_result_table(table: "Table", *, title: str = "") -> None:
    """Print a result table with its title and note on standard output, with shortened texts."""
    if title:
        show_lines(title, "")
    rows = [[*map(shorten, row)] for row in table.rows]
    show_table(table.columns, rows, numbers=table.columns[table.text_columns :])
    if table.note:
        show_paragraph(table.note)


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns on standard output."""
    rows = [(name.replace("_", " "), format_value(value)) for name, value in facts.items()]
    show_table(("", ""), rows)


def show_scores(title: str, scores: "Scores") -> None:
    """Print the overall and the per-class metrics of a split on standard output."""
    values = ", ".join(f"{value.metric.title} {value}" for value in scores.values)
    show_lines(title, f"  {values}")
    if table := scores.table:
        show_lines()
        show_result_table(table)


def shorten(text: str) -> str:
    """Shorten a text to one line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_EXAMPLE else line[: MAX_EXAMPLE - 1] + "…"


def format_size(size_bytes: int) -> str:
    """Format a size, such as ``167.5 MiB``, or ``2.3 KiB`` for small sizes."""
    is_small = size_bytes < 2**20
    return f"{size_bytes / 2**10:,.1f} KiB" if is_small else f"{size_bytes / 2**20:,.1f} MiB"


@contextmanager
def showing(*, quiet: bool, no_progress: bool) -> Iterator[events.Emit]:
    """Yield an ``Emit`` that shows events on the main rank, or only warnings if quiet."""
    if read_launch().rank:
        yield events.ignore
        return
    from rich.console import Console

    file = cast(TextIO, _UnfailingStream(sys.stderr)) if sys.stderr else None
    console = Console(file=file, stderr=True, soft_wrap=True, **LITERAL)
    has_bar = not (quiet or no_progress) and _can_draw(console)
    view = View(console, has_bar=has_bar, quiet=quiet)
    try:  # not `with`: Ctrl-C while it starts would leave the cursor hidden
        if has_bar:
            view.bar.start()
        yield view.show
    finally:
        if has_bar:
            view.bar.stop()


def is_watched() -> bool:
    """Return whether output goes to a notebook or a terminal."""
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


def _can_draw(console: "Console") -> bool:
    """Return whether a line can be redrawn: on a terminal with a cursor, or in a widget."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    is_terminal = bool(sys.stderr and sys.stderr.isatty())
    return is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


class _UnfailingStream:
    """A stream that ignores write errors, so a command outlives its reader and a full disk."""

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


class View:
    """Prints events as lines. With a bar, the current stage is drawn below the lines."""

    def __init__(self, console: "Console", *, has_bar: bool, quiet: bool = False) -> None:
        from rich import progress

        self._has_bar, self._is_quiet = has_bar, quiet
        self._printed = time.monotonic()
        self.bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[report]}"),
            progress.TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=4,
            transient=True,
            # Rich prints the output of user code above the bar, unless it is redirected.
            redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
        )
        self._begin(LIBRARIES)

    def _begin(self, stage: str) -> None:
        self._total_steps = self._printed_step = self._printed_validation = 0
        for task in self.bar.task_ids:
            self.bar.remove_task(task)
        self.bar.add_task(stage, total=None, visible=bool(stage), report="")

    def show(self, event: events.Event) -> None:
        """Print an event or show it in the bar."""
        if self._is_quiet and not isinstance(event, events.WarningMessage):
            return
        if self.bar.tasks[0].description == LIBRARIES:
            self._begin("")
        match event:
            case events.Info():
                self._print(event.message)
            case events.WarningMessage():
                remedy = f" ({event.remedy})" if event.remedy else ""
                self._print(f"warning: {event.message}{remedy}", style="yellow")
            case events.Stage(name=name, seconds=None):
                self._begin(name)
            case events.Stage(name=name, seconds=float(seconds)):
                self._begin("")
                if seconds >= MIN_STAGE_SECONDS:
                    self._print(f"{name}: {duration(seconds)}")
            case events.Advance():
                self._move_bar(event.done, event.total)
                if not self._has_bar:
                    self._print(f"  {event.done:,}/{event.total:,} examples")
            case events.Step():
                self._show_step(event)
            case events.Validation():
                if self._is_due(event.step - self._printed_validation, VALIDATION_LINES):
                    self._printed_step = self._printed_validation = event.step
                    metrics = ", ".join(
                        f"{name} {value:.4f}" if abs(value) >= 0.1 else f"{name} {value:.4g}"
                        for name, value in event.metrics.items()
                    )
                    best = "  (best so far)" if event.is_best else ""
                    self._print(f"epoch {event.epoch:.2f}: validation {metrics}{best}")
            case events.Trial():
                memory = event.peak_bytes and f"{event.peak_bytes / 2**30:.2f} GiB"
                speed = event.examples_per_second and format_rate(event.examples_per_second)
                status = f"  batch {event.batch_size:,}: {event.status.replace('_', ' ')}"
                parts = (status, memory, speed, f"{event.seconds:.0f} s", event.reason)
                self._print(", ".join(str(part) for part in parts if part))

    def _show_step(self, event: events.Step) -> None:
        self._total_steps = event.total_steps
        loss, speed = f"loss {event.loss:.3f}", format_rate(event.examples_per_second)
        memory = f"{event.memory_bytes / 2**30:.2f} GiB"
        self._move_bar(event.step, event.total_steps, f"  {loss}  {speed}  {memory}")
        if not self._has_bar and self._is_due(event.step - self._printed_step, STEP_LINES):
            self._printed_step = event.step
            self._print(
                f"step {event.step}/{event.total_steps}  {loss}  lr {event.learning_rate:.1e}  "
                f"{speed}  {memory}  {duration(event.remaining_seconds)} left"
            )

    def _move_bar(self, done: int, total: int, report: str = "") -> None:
        [task] = self.bar.tasks
        if done < task.completed:  # a new split starts from zero
            self.bar.reset(task.id, total=total)
        report = f"{done:,}/{total:,}{report}"
        self.bar.update(task.id, completed=done, total=total, report=report, visible=True)

    def _is_due(self, steps: int, lines: int) -> bool:
        is_silent = time.monotonic() - self._printed > MAX_SILENCE_SECONDS
        return is_silent or steps * lines >= self._total_steps

    def _print(self, line: str, *, style: str = "") -> None:
        from rich.text import Text

        self._printed = time.monotonic()
        self.bar.console.print(Text(escape_line(line), style=style))
