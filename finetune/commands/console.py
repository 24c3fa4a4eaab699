"""Shows results on standard output.

Rich and NumPy are imported where something is shown, so that ``--help`` stays quick.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from finetune.escaping import escape_controls, escape_line

if TYPE_CHECKING:
    from finetune.tasks.scores import Scores
    from finetune.tasks.tables import Table

SCHEMA_VERSION = 1
LINE_WITHOUT_END = 1_000_000
MAX_EXAMPLE = 60
MIN_TEXT_WIDTH = 12
SPACE_BETWEEN_COLUMNS = 2
# Texts and names of classes may look like rich's markup or like its names of emoji.
LITERAL: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}


def show_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output."""
    versioned = {"schema_version": SCHEMA_VERSION, **value}
    click.echo(escape_controls(json.dumps(versioned, ensure_ascii=False)))


def show_lines(*lines: str) -> None:
    """Print lines on standard output, after an empty one."""
    click.echo("\n".join(["", *map(escape_line, lines)]))


def show_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()
) -> None:
    """Print a table on standard output; empty titles give no header.

    Columns of ``numbers`` are aligned to the right. A terminal folds the other cells to its width;
    nothing else has a width.
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


def show_result_table(table: "Table") -> None:
    """Print a table of results on standard output, with short texts."""
    rows = [[*map(shorten, row)] for row in table.rows]
    show_table(table.columns, rows, numbers=table.columns[table.text_columns :])


def show_facts(facts: Mapping[str, Any]) -> None:
    """Print names and values in two columns on standard output."""
    from finetune.tasks.tables import format_value

    rows = [(name.replace("_", " "), format_value(one)) for name, one in facts.items()]
    show_table(("", ""), rows)


def show_scores(title: str, scores: "Scores") -> None:
    """Print the overall and the per-class metrics of a split on standard output."""
    show_lines(title, "  " + ", ".join(f"{one.metric.title} {one}" for one in scores.values))
    if table := scores.table:
        show_lines()
        show_result_table(table)


def shorten(text: str) -> str:
    """Return a text on one line, of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_EXAMPLE else line[: MAX_EXAMPLE - 1] + "…"


def format_size(size_bytes: int) -> str:
    """Return a size such as ``167.5 MiB`` or, of a small one, ``2.3 KiB``."""
    if size_bytes < 2**20:
        return f"{size_bytes / 2**10:,.1f} KiB"
    return f"{size_bytes / 2**20:,.1f} MiB"
