"""Numbers as people write them in CSV become plain ones: decimal commas, words for missing."""

from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune.events import Emit, Info
from finetune.tasks.labels import MISSING, NUMBER

# Enough to see that a column holds texts.
SAMPLE_ROWS = 100
# Fraction of the values of a column of numbers; the others are mistakes, or words for missing.
MIN_NUMBERS = 0.9
LIST = "[0-9],[0-9]+,[0-9]"
WITH_COMMA = r"[+-]?[0-9]+(,[0-9]+)?"


def plain_numbers(
    columns: pyarrow.Table, *, allows_comma: bool, path: Path, emit: Emit
) -> pyarrow.Table:
    """Return a table whose columns of numbers have decimal points, and an empty text if missing.

    Beside a few other values, words for missing ones may be classes, and stay.
    """
    pattern = rf"^\s*({WITH_COMMA}|{NUMBER})\s*$" if allows_comma else rf"^\s*({NUMBER})\s*$"
    for position, name in enumerate(columns.column_names):
        column = columns[position]
        if not (_holds_numbers(column[:SAMPLE_ROWS], pattern) and _holds_numbers(column, pattern)):
            continue
        filled = _without_missing(column)
        is_number = pc.match_substring_regex(filled, pattern)
        if not pc.all(pc.or_(is_number, pc.equal(filled, ""))).as_py():
            if pc.any(pc.match_substring_regex(filled, LIST)).as_py():
                continue
            filled = column
        plain = pc.if_else(is_number, pc.replace_substring(filled, ",", "."), filled)
        if plain.equals(column):
            continue
        columns = columns.set_column(position, name, plain)
        changes = []
        if pc.any(pc.match_substring(column, ",")).as_py():
            changes.append("commas are read as decimal; --task multi reads several labels")
        emptied = column.filter(pc.and_(pc.equal(plain, ""), pc.not_equal(column, "")))
        if len(emptied):
            words = ", ".join(map(repr, emptied.unique().to_pylist()))
            changes.append(f"{words} read as missing")
        emit(Info(f"numbers of {name!r} in {path}: {', '.join(changes)}"))
    return columns


def _holds_numbers(column: pyarrow.ChunkedArray, pattern: str) -> bool:
    filled = _without_missing(column)
    filled = filled.filter(pc.not_equal(filled, ""))
    share = pc.mean(pc.match_substring_regex(filled, pattern)).as_py() if len(filled) else 0.0
    return bool(share >= MIN_NUMBERS)


def _without_missing(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(column))
    is_missing = pc.is_in(folded, value_set=pyarrow.array(MISSING, "string"))
    return pc.if_else(is_missing, "", column)
