"""Columns of numbers as files of values between delimiters write them become plain ones."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune.events import Emit, Info
from finetune.tasks.labels import MISSING, NUMBER

# Columns of texts are seen by a few values to hold no numbers.
SAMPLE_ROWS = 100
# Of the values of a column of numbers; the others are mistakes, or words for what is missing.
MIN_SHARE = 0.9
LIST = "[0-9],[0-9]+,[0-9]"
WITH_COMMA = r"[+-]?[0-9]+(,[0-9]+)?"


def plain_numbers(
    columns: pyarrow.Table, *, allows_comma: bool, path: Path, emit: Emit
) -> pyarrow.Table:
    """Return a table whose columns of numbers have decimal points, and an empty text if missing.

    A column of few other values has decimal points too.

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
        plain = _plain(column, pattern)
        if not plain.equals(column):
            columns = columns.set_column(position, name, plain)
            emit(Info(f"numbers of {name!r} in {path}: {', '.join(_changes(column, plain))}"))
    return columns


def _plain(column: pyarrow.ChunkedArray, pattern: str) -> pyarrow.ChunkedArray:
    filled = _without_missing(column)
    is_number = _is_number(filled, pattern)
    if not pc.all(pc.or_(is_number, pc.equal(filled, ""))).as_py():
        if pc.any(pc.match_substring_regex(filled, LIST)).as_py():
            return column
        filled = column  # beside other words, those for missing may be classes
    return pc.if_else(is_number, pc.replace_substring(filled, ",", "."), filled)


def _holds_numbers(column: pyarrow.ChunkedArray, pattern: str) -> bool:
    filled = _without_missing(column)
    filled = filled.filter(pc.not_equal(filled, ""))
    return len(filled) > 0 and pc.mean(_is_number(filled, pattern)).as_py() >= MIN_SHARE


def _is_number(column: pyarrow.ChunkedArray, pattern: str) -> pyarrow.ChunkedArray:
    return pc.match_substring_regex(column, rf"^\s*({pattern})\s*$")


def _without_missing(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    return pc.if_else(_is_missing(column), "", column)


def _is_missing(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(column))
    return pc.is_in(folded, value_set=pyarrow.array(MISSING, "string"))


def _changes(column: pyarrow.ChunkedArray, plain: pyarrow.ChunkedArray) -> Iterator[str]:
    """Yield what the numbers of a column are taken for."""
    if pc.any(pc.match_substring(column, ",")).as_py():
        yield "a comma is decimal; --task multi reads several labels"
    is_emptied = pc.and_(pc.equal(plain, ""), _is_missing(column))
    if words := column.filter(is_emptied).unique().to_pylist():
        yield f"{', '.join(map(repr, words))} taken for missing"
