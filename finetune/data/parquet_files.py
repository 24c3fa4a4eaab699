"""Parquet files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from datasets import ClassLabel, Features
from pyarrow import parquet, types

from finetune.config.schema import DataConfig
from finetune.data.mapped import PIECE_ROWS, collect
from finetune.data.packed import Content
from finetune.data.reader import STREAM_ROWS, Columns, Reader, Row, as_text, report_left_out
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info
from finetune.tasks.labels import map_lists, map_values


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the rows of all columns."""
    batches = _read_batches(content, rows=STREAM_ROWS)
    return enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def columns(content: Content, options: DataConfig, emit: Emit) -> Columns:
    """Read columns of texts and numbers; numbers of classes that have names as these names."""
    path = content.path
    emit(Info(f"reading {path}"))
    with _errors_explained(path):
        file = _open(content)
        schema = file.schema_arrow
    names = [one.name for one in schema if _is_plain(one.type) or _is_list_of_labels(one.type)]
    report_left_out([name for name in schema.names if name not in names], path=path, emit=emit)
    is_empty = file.metadata.num_rows == 0
    if is_empty or len(set(names)) < len(names):
        complaint = "holds no rows" if is_empty else "has two columns of the same name"
        raise DataUnreadable(f"{path} {complaint}", remedy="export it again")
    kinds = {name: schema.field(name).type for name in names}
    class_names = {
        name: own
        for name, own in _class_names(schema).items()
        if name in kinds and (types.is_integer(kinds[name]) or _is_list_of_labels(kinds[name]))
    }
    batches = _read_batches(content, rows=PIECE_ROWS, columns=names)
    tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
    with _errors_explained(path):  # a damaged file may have none of its rows
        table = collect(_as_texts(_with_class_names(one, class_names)) for one in tables)
    return table, class_names


def _open(content: Content) -> parquet.ParquetFile:
    if content.unpacked is None:
        return parquet.ParquetFile(content.path, memory_map=True)
    return parquet.ParquetFile(pyarrow.BufferReader(content.unpacked))


def _read_batches(
    content: Content, *, rows: int, columns: Sequence[str] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    with _errors_explained(content.path):
        for batch in _open(content).iter_batches(batch_size=rows, columns=columns):
            batch.validate(full=True)  # texts may be other bytes than UTF-8
            yield batch


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataUnreadable(
            f"{path} is not Parquet: {str(error).splitlines()[0]}", remedy="export it again"
        ) from error


def _with_class_names(
    table: pyarrow.Table, class_names: Mapping[str, Sequence[str]]
) -> pyarrow.Table:
    for name, own in class_names.items():
        column, named = table[name], partial(_names_of, names=own)
        column = map_lists(column, named) if _is_list_of_labels(column.type) else named(column)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _names_of(numbers: pyarrow.ChunkedArray, *, names: Sequence[str]) -> pyarrow.ChunkedArray:
    known = pyarrow.array(range(len(names)), "int64")
    positions = pc.index_in(numbers.cast("int64"), value_set=known)
    return pc.take(pyarrow.array(names, "string"), positions)


def _class_names(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """Return the names of classes that the library datasets keeps beside the columns."""
    try:
        features = Features.from_arrow_schema(schema)
    except Exception:  # metadata that it has not written
        return {}
    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def _as_texts(table: pyarrow.Table) -> pyarrow.Table:
    """Return columns of texts, numbers and truth values as text; lists as JSON."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if _is_list_of_labels(column.type):
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


def _is_list_of_labels(kind: pyarrow.DataType) -> bool:
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


READER = Reader((".parquet",), rows, columns, unit="row", first_bytes=b"PAR1")
