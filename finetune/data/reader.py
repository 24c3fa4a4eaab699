"""What the reader of a format is, and the table that it gives: every value as text."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

from finetune.config.schema import DataConfig
from finetune.data.mapped import collect, filter_rows
from finetune.data.packed import Content
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info, ignore
from finetune.tasks.labels import map_lists, map_values

# How many rows are held as objects of Python at a time.
STREAM_ROWS = 1_024
Row = tuple[int, dict[str, Any]]
"""The number of a row's line, or of the row itself, and its values by column."""
Columns = tuple[pyarrow.Table, Mapping[str, Sequence[str]]]
"""The columns of a file as text, and the names of all classes of those that have them."""


@dataclass(frozen=True)
class Reader:
    """How files of one format are read.

    Args:
        rows: Yields the rows, with their values as they are.
        columns: Reads the columns as text, where they are more than the text of each value.
        unit: What the number of a row counts.
        first_bytes: Decide whatever the suffix.
        start: A pattern of the first line, in lower case, that decides where the suffix is unknown.
    """

    suffixes: Sequence[str]
    rows: Callable[[Content, DataConfig, Emit], Iterator[Row]]
    columns: Callable[[Content, DataConfig, Emit], Columns] | None = None
    unit: str = "line"
    first_bytes: bytes | None = None
    start: bytes | None = None

    def read(self, content: Content, options: DataConfig, emit: Emit) -> "RawTable":
        """Read a file whole."""
        if self.columns:
            columns, class_names = self.columns(content, options, emit)
        else:
            columns = columns_of(self.rows(content, options, emit), path=content.path, emit=emit)
            class_names = {}

        def place(row: int) -> str:
            rows = self.rows(content, options, ignore)
            number, _ = next(islice(rows, row, None))
            return f"{self.unit} {number} of {content.path}"

        return RawTable(content.path, columns, place, np.arange(len(columns)), class_names)


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, every value as text, before it is known what they mean.

    Args:
        place: Says where a row of the file, counted from 0, is: ``line 7 of reviews.csv``.
        numbers: Which rows of the file these are, from 0: [rows].
        class_names: The names of all classes of a column, where the file has them.
    """

    path: Path
    columns: pyarrow.Table
    place: Callable[[int], str]
    numbers: NDArray[np.int64]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows for which a column of truth values has true."""
        mask = is_kept.to_numpy()
        return replace(self, columns=filter_rows(self.columns, mask), numbers=self.numbers[mask])

    def first(self, is_wanted: pyarrow.ChunkedArray) -> str:
        """Say where the first row is for which a column of truth values has true."""
        return self.place(int(self.numbers[pc.index(is_wanted, True).as_py()]))


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
    return replace(tables[0], columns=columns, place=place, numbers=np.arange(len(columns)))


def columns_of(rows: Iterator[Row], *, path: Path, emit: Emit) -> pyarrow.Table:
    """Return the columns of rows as text; those that hold other values too are left out."""
    names: dict[str, None] = {}
    others: set[str] = set()

    def pieces() -> Iterator[pyarrow.Table]:
        while piece := [values for _, values in islice(rows, STREAM_ROWS)]:
            names.update(dict.fromkeys(chain.from_iterable(piece)))
            columns = {}
            for name in names:
                values = [row.get(name) for row in piece]
                is_text = set(map(type, values)) == {str}
                texts = values if is_text else list(map(as_text, values))
                columns[name] = pyarrow.array(texts, "string")
                if columns[name].null_count:
                    others.add(name)
            yield pyarrow.table(columns)

    # A column that the first rows lack begins a new table.
    alike = groupby(pieces(), key=lambda piece: piece.column_names)
    tables = [collect(own) for _, own in alike]
    if not tables:
        raise DataUnreadable(f"{path} has no rows", remedy="add one row per text")
    joined = pyarrow.concat_tables(tables, promote_options="default")
    report_left_out([name for name in names if name in others], path=path, emit=emit)
    return pyarrow.table(
        {
            name: pc.fill_null(column, "") if column.null_count else column
            for name, column in zip(joined.column_names, joined.columns, strict=True)
            if name not in others
        }
    )


def as_texts(table: pyarrow.Table) -> pyarrow.Table:
    """Return readable columns as text, each value as by ``as_text``, missing ones too."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if types.is_list(column.type) or types.is_large_list(column.type):
            values = pc.binary_join(map_lists(column, _as_json), ", ")
            column = pc.binary_join_element_wise("[", values, "]", "")
        elif not (types.is_string(column.type) or types.is_integer(column.type)):
            if types.is_float16(column.type):  # has no unique values
                column = column.cast("float64")
            column = map_values(column, as_text)
        columns[name] = pc.fill_null(column.cast("string"), "")
    return pyarrow.table(columns)


def _as_json(values: pyarrow.Array) -> pyarrow.Array:
    texts = pc.fill_null(values.cast("string"), "")
    return map_values(texts, partial(json.dumps, ensure_ascii=False))


def readable_columns(schema: pyarrow.Schema, *, path: Path, emit: Emit) -> list[str]:
    """Return those that may hold texts or labels, no vectors or pictures; report the others."""
    names = [one.name for one in schema if _is_readable(one.type)]
    report_left_out([name for name in schema.names if name not in names], path=path, emit=emit)
    return names


def _is_readable(kind: pyarrow.DataType) -> bool:
    if types.is_list(kind) or types.is_large_list(kind):
        own = kind.value_type
        return _is_readable(own) and not (types.is_floating(own) or types.is_nested(own))
    return not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def as_text(value: Any) -> str | None:
    """Return a value as text, a list as JSON; None for what is no text or number, such as bytes.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, None, b"x", ["x", 1], {"y": 1})]
    ['3.0', '3', '2.5', 'true', '', None, '["x", "1"]', None]
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str | int | None) for one in value):
        return json.dumps(list(map(as_text, value)), ensure_ascii=False)
    if isinstance(value, bytes | list | dict):
        return None
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def report_left_out(names: Sequence[str], *, path: Path, emit: Emit) -> None:
    """Report the columns that can't be texts or labels, if there are any."""
    if names:
        left_out = f"columns of {path} left out, since they hold neither text nor numbers"
        emit(Info(f"{left_out}: {', '.join(map(repr, names))}"))
