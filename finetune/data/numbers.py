"""Columns of numbers as files of values between delimiters spell them become plain ones."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune.events import Emit, Info
from finetune.tasks.labels import MISSING, NUMBER

# Columns of texts are seen by a few values to hold no numbers.
SAMPLE_ROWS = 100
WITH_COMMA = r"[+-]?[0-9]+(,[0-9]+)?"


def plain_numbers(
    columns: pyarrow.Table, *, allows_comma: bool, path: Path, emit: Emit
) -> pyarrow.Table:
    """Return a table whose columns of numbers have decimal points, and an empty text if missing.

    Args:
        columns: Of strings.
        allows_comma: Whether a comma between digits is a decimal one.
        path: The file that they are from.
        emit: Receives what was found.
    """
    pattern = f"{WITH_COMMA}|{NUMBER}" if allows_comma else NUMBER
    for position, name in enumerate(columns.column_names):
        column = columns[position]
        if not (_holds_numbers(column[:SAMPLE_ROWS], pattern) and _holds_numbers(column, pattern)):
            continue
        plain = pc.replace_substring(_without_missing(column), ",", ".")
        if not plain.equals(column):
            columns = columns.set_column(position, name, plain)
            emit(Info(f"numbers of {name!r} in {path}: {', '.join(_changes(column))}"))
    return columns


def _holds_numbers(column: pyarrow.ChunkedArray, pattern: str) -> bool:
    filled = _without_missing(column)
    filled = filled.filter(pc.not_equal(filled, ""))
    is_number = pc.match_substring_regex(filled, rf"^\s*({pattern})\s*$")
    return len(filled) > 0 and pc.all(is_number).as_py()


def _without_missing(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    return pc.if_else(_is_missing(column), "", column)


def _is_missing(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(column))
    return pc.is_in(folded, value_set=pyarrow.array(MISSING, "string"))


def _changes(column: pyarrow.ChunkedArray) -> Iterator[str]:
    """Yield what the numbers of a column are taken for."""
    if pc.any(pc.match_substring(column, ",")).as_py():
        yield "a comma is decimal; --task multi reads several labels"
    if words := column.filter(_is_missing(column)).unique().to_pylist():
        yield f"{', '.join(map(repr, words))} taken for missing"
