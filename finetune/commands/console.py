"""Shows results on standard output.

Rich and NumPy are imported only when something is shown, so that ``--help`` stays fast.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import click

from finetune.files import escape_controls, escape_line
from finetune.tasks.tables import Table, format_value

if TYPE_CHECKING:
    from finetune.tasks.scores import Scores

SCHEMA_VERSION = 1
LINE_WITHOUT_END = 1_000_000
MAX_EXAMPLE = 60
MIN_TEXT_WIDTH = 12
SPACE_BETWEEN_COLUMNS = 2
# Texts and class names can contain what Rich reads as markup or emoji codes.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


def show_json(value: Any) -> None:
    """Print a mapping, or a dataclass, as one JSON object on standard output."""
    if not isinstance(value, Mapping):
        value = value.to_json() if hasattr(value, "to_json") else asdict(value)
    versioned = {"schema_version": SCHEMA_VERSION, **value}
    click.echo(escape_controls(json.dumps(versioned, ensure_ascii=False, default=asdict)))


def show_lines(*lines: str) -> None:
    """Print an empty line and then these lines on standard output."""
    click.echo("\n".join(["", *map(escape_line, lines)]))


def show_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> None:
    """Print a table on standard output, without a header if all titles are empty.

    Columns of ``numbers`` are aligned to the right. On a terminal, other cells are wrapped to its
    width. Elsewhere they are not wrapped.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=any(titles))
    cells = [list(map(escape_line, row)) for row in (titles, *rows)]
    min_width = SPACE_BETWEEN_COLUMNS * (len(titles) - 1)
    for title, column in zip(titles, zip(*cells, strict=True), strict=True):
        is_number, width = title in numbers, max(map(cell_len, column))
        min_width += width if is_number else min(width, MIN_TEXT_WIDTH)
        justify: Literal["left", "right"] = "right" if is_number else "left"
        table.add_column(column[0], justify=justify, no_wrap=is_number, overflow="fold")
    for row in cells[1:]:
        table.add_row(*row)
    terminal = Console()
    width = max(terminal.width, min_width) if terminal.is_terminal else LINE_WITHOUT_END
    Console(width=width, **LITERAL).print(table)


def show_paragraph(text: str) -> None:
    """Print an empty line and then a text in short lines on standard output."""
    show_lines(*click.wrap_text(text).splitlines())


def show_result_table(table: "Table", *, title: str = "") -> None:
    """Print a table of results, and its title and note, on standard output, with short texts."""
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
    """Return a text on one line, of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_EXAMPLE else line[: MAX_EXAMPLE - 1] + "…"


def format_size(size_bytes: int) -> str:
    """Return a size such as ``167.5 MiB``, or ``2.3 KiB`` for small sizes."""
    is_small = size_bytes < 2**20
    return f"{size_bytes / 2**10:,.1f} KiB" if is_small else f"{size_bytes / 2**20:,.1f} MiB"
