"""Parquet files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet, types

from finetune.config.schema import DataConfig
from finetune.data.mapped import PIECE_ROWS, collect
from finetune.data.packed import Content
from finetune.data.reader import (
    STREAM_ROWS,
    RawTable,
    Reader,
    Records,
    as_texts,
    is_list_of_labels,
    readable_columns,
)
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info
from finetune.tasks.labels import map_lists


def read(content: Content, options: DataConfig, emit: Emit) -> RawTable:
    """Read columns of texts and numbers; numbers of classes that have names as these names."""
    path = content.path
    emit(Info(f"reading {path}"))
    with _errors_explained(path):
        file = _open(content)
        schema = file.schema_arrow
        names = readable_columns(schema, path=path, emit=emit)
    is_empty = file.metadata.num_rows == 0
    if is_empty or len(set(names)) < len(names):
        complaint = "holds no rows" if is_empty else "has two columns of the same name"
        raise DataUnreadable(f"{path} {complaint}", remedy="export it again")
    kinds = {name: schema.field(name).type for name in names}
    class_names = {
        name: own
        for name, own in _class_names(schema.metadata or {}).items()
        if name in kinds and (types.is_integer(kinds[name]) or is_list_of_labels(kinds[name]))
    }
    batches = _read_batches(file, path=path, rows=PIECE_ROWS, columns=names)
    tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
    with _errors_explained(path):  # a damaged file may have none of its rows
        columns = collect(as_texts(_with_class_names(one, class_names)) for one in tables)
    return RawTable(path, columns, lambda row: f"row {row + 1} of {path}", class_names)


def stream(content: Content, options: DataConfig, emit: Emit) -> Iterator[Records]:
    """Yield the rows of all columns."""
    with _errors_explained(content.path):
        file = _open(content)
    for batch in _read_batches(file, path=content.path, rows=STREAM_ROWS):
        yield batch.to_pylist()


def _open(content: Content) -> parquet.ParquetFile:
    if content.unpacked is None:
        return parquet.ParquetFile(content.path, memory_map=True)
    return parquet.ParquetFile(pyarrow.BufferReader(content.unpacked))


def _read_batches(
    file: parquet.ParquetFile, *, path: Path, rows: int, columns: Sequence[str] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    with _errors_explained(path):
        for batch in file.iter_batches(batch_size=rows, columns=columns):
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
        column = map_lists(column, named) if is_list_of_labels(column.type) else named(column)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _names_of(numbers: pyarrow.ChunkedArray, *, names: Sequence[str]) -> pyarrow.ChunkedArray:
    known = pyarrow.array(range(len(names)), "int64")
    positions = pc.index_in(numbers.cast("int64"), value_set=known)
    return pc.take(pyarrow.array(names, "string"), positions)


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of classes that the library datasets keeps beside the columns."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        kinds = {name: one.get("feature", one) for name, one in features.items()}
        return {
            name: list(map(str, kind["names"]))
            for name, kind in kinds.items()
            if kind.get("_type") == "ClassLabel"
        }
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return {}  # not written by it


READER = Reader((".parquet",), read, stream, first_bytes=b"PAR1")
