"""Shows events on standard error and results on standard output.

Rich is imported where something is shown, so that ``--help`` stays quick.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from finetune.escaping import escape_controls, escape_line
from finetune.events import Emit

if TYPE_CHECKING:
    from finetune.tasks.base import Scores

LINE_WITHOUT_END = 1_000_000
LONGEST_EXAMPLE = 60
# Texts and names of classes may look like rich's markup or like its names of emoji.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


@contextmanager
def showing(*, quiet: bool, no_progress: bool) -> Iterator[Emit]:
    """Yield an ``Emit`` that shows events, live on a terminal; if quiet, warnings alone."""
    from finetune.cli.progress import open_view

    with open_view(is_quiet=quiet, is_live=not no_progress) as emit:
        yield emit


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
