"""What the reader of a format is, and the table that it gives: every value as text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow import types

from finetune.config.schema import DataConfig
from finetune.data.mapped import filter_rows
from finetune.data.packed import Content
from finetune.events import Emit, Info
from finetune.tasks.labels import map_lists, map_values

# In a piece of a stream.
STREAM_ROWS = 1_024
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, every value as text, before it is known what they mean.

    Args:
        place: Says where a row, counted from 0, is: ``line 7 of reviews.csv``.
        class_names: The names of all classes of a column, where the file has them.
    """

    path: Path
    columns: pyarrow.Table
    place: Callable[[int], str]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows for which a column of truth values has true."""
        mask = is_kept.to_numpy()
        rows, columns = np.flatnonzero(mask), filter_rows(self.columns, mask)
        return replace(self, columns=columns, place=lambda row: self.place(int(rows[row])))


def join_tables(tables: Sequence[RawTable]) -> RawTable:
    """Return the rows of several files as one table, with the columns that all of them have."""
    if len(tables) == 1:
        return tables[0]
    names = [set(table.columns.column_names) for table in tables]
    shared = [name for name in tables[0].columns.column_names if all(name in own for own in names)]
    starts = np.cumsum([0, *(len(table.columns) for table in tables)])

    def place(row: int) -> str:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return tables[number].place(row - int(starts[number]))

    columns = pyarrow.concat_tables(table.columns.select(shared) for table in tables)
    return replace(tables[0], columns=columns, place=place)


@dataclass(frozen=True)
class Reader:
    """How files of one format are read: as a whole, every value as text, or in pieces, as it is.

    ``first_bytes`` decide whatever the suffix, ``first_characters`` where the suffix is unknown.
    """

    suffixes: Sequence[str]
    read: "Callable[[Content, DataConfig, Emit], RawTable]"
    stream: "Callable[[Content, DataConfig, Emit], Iterator[Records]]"
    first_bytes: bytes | None = None
    first_characters: bytes | None = None


def records_of(table: pyarrow.Table) -> Iterator[Records]:
    """Yield the rows of a table in the pieces of a stream."""
    return (batch.to_pylist() for batch in table.to_batches(STREAM_ROWS))


def as_text(value: Any) -> str:
    """Return a value as text; what is no text or number, such as bytes, is an empty text.

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
    texts = pc.fill_null(values.cast("string"), "")
    return map_values(texts, partial(json.dumps, ensure_ascii=False))


def readable_columns(schema: pyarrow.Schema, *, path: Path, emit: Emit) -> list[str]:
    """Return the columns of texts, numbers, truth values and labels; the others are reported."""
    names = [one.name for one in schema if _is_plain(one.type) or is_list_of_labels(one.type)]
    report_left_out([name for name in schema.names if name not in names], path=path, emit=emit)
    return names


def report_left_out(names: Sequence[str], *, path: Path, emit: Emit) -> None:
    """Report the columns that can't be texts or labels, if there are any."""
    if names:
        left_out = f"columns of {path} left out, since they hold neither text nor numbers"
        emit(Info(f"{left_out}: {', '.join(map(repr, names))}"))


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
