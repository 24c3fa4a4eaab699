"""Values of any type become text: a column at a time, or one by one."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import types

from finetune.events import Emit, Info
from finetune.tasks.labels import map_lists, map_values


def as_text(value: Any) -> str:
    """Return a value as text; a whole number has no fraction, whatever its type.

    What is no text or number, such as bytes, is an empty text.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, float("nan"), None, b"x", ["x"])]
    ['3.0', '3', '2.5', 'true', '', '', '', '']
    """
    if value is None or value != value or isinstance(value, bytes | list | dict):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def as_texts(table: pyarrow.Table) -> pyarrow.Table:
    """Return columns of texts, numbers and truth values as text; lists as JSON."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if is_list_of_labels(column.type):
            values = pc.binary_join(map_lists(column, _as_json), ", ")
            column = pc.binary_join_element_wise("[", values, "]", "")
        if types.is_floating(column.type):
            column = column.cast("float64")  # half precision has no unique values
            column = map_values(column, as_text)
        columns[name] = pc.fill_null(column.cast("string"), "")
    return pyarrow.table(columns)


def _as_json(values: pyarrow.Array) -> pyarrow.Array:
    """Return the values of lists as JSON's texts; what is missing is an empty text."""
    texts = pc.fill_null(values.cast("string"), "")
    return map_values(texts, partial(json.dumps, ensure_ascii=False))


def plain_names(schema: pyarrow.Schema, *, path: Path, emit: Emit) -> list[str]:
    """Return the columns of texts, numbers, truth values and labels; the others are reported."""
    names = [one.name for one in schema if _is_plain(one.type) or is_list_of_labels(one.type)]
    report_left_out([name for name in schema.names if name not in names], path=path, emit=emit)
    return names


def report_left_out(names: Sequence[str], *, path: Path, emit: Emit) -> None:
    """Report the columns that can't be texts or labels, if there are any."""
    if names:
        listed = ", ".join(map(repr, names))
        emit(Info(f"columns of {path} left out, neither texts nor numbers: {listed}"))


def is_list_of_labels(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds lists of texts or of whole numbers."""
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    own = kind.value_type
    return _is_plain(own) and not (types.is_floating(own) or types.is_boolean(own))


def _is_plain(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds a text, a number or a truth value in each row."""
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    tests = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null),
    )
    return any(is_of(kind) for is_of in tests)
