"""Parquet files, piece by piece: columns as text, or rows as they are."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet, types

from finetune.data.mapped import ROWS_A_PIECE, collect
from finetune.data.packed import Content
from finetune.data.values import as_texts, is_list_of_labels, plain_names
from finetune.errors import DataUnreadable
from finetune.events import Emit
from finetune.tasks.labels import map_lists

ClassNames = dict[str, list[str]]


def read_parquet(content: Content, *, emit: Emit) -> tuple[pyarrow.Table, ClassNames]:
    """Return the columns of texts and numbers as text, and the names of classes of some.

    A column of numbers that the library datasets wrote with the names of its classes is read as
    these names; a number without a name, such as -1, as missing.

    Raises:
        DataUnreadable: If the file, or a part of it, does not parse, or it has no rows.
    """
    path = content.path
    with _errors_explained(path):
        file = _open(content)
        schema = file.schema_arrow
        names = plain_names(schema, path=path, emit=emit)
    is_empty = file.metadata.num_rows == 0
    if is_empty or len(set(names)) < len(names):
        complaint = "holds no rows" if is_empty else "has two columns of the same name"
        raise DataUnreadable(f"{path} {complaint}", remedy="write it again")
    kinds = {name: schema.field(name).type for name in names}
    class_names = {
        name: own
        for name, own in _class_names(schema.metadata or {}).items()
        if name in kinds and (types.is_integer(kinds[name]) or is_list_of_labels(kinds[name]))
    }
    batches = _read_batches(file, path=path, rows=ROWS_A_PIECE, columns=names)
    tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
    with _errors_explained(path):  # a damaged file may have none of its rows
        columns = collect(as_texts(_with_class_names(one, class_names)) for one in tables)
    return columns, class_names


def stream_parquet(content: Content, *, rows_a_piece: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as they are read, all columns by name.

    Raises:
        DataUnreadable: If the file, or a part of it, does not parse.
    """
    with _errors_explained(content.path):
        file = _open(content)
    for batch in _read_batches(file, path=content.path, rows=rows_a_piece):
        yield from batch.to_pylist()


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
            f"{path} is not Parquet: {str(error).splitlines()[0]}", remedy="write it again"
        ) from error


def _with_class_names(
    table: pyarrow.Table, class_names: Mapping[str, Sequence[str]]
) -> pyarrow.Table:
    for name, own in class_names.items():
        column, named = table[name], partial(_with_names, names=own)
        has_lists = is_list_of_labels(column.type)
        column = map_lists(column, named) if has_lists else named(column)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _with_names(numbers: pyarrow.ChunkedArray, *, names: Sequence[str]) -> pyarrow.ChunkedArray:
    known = pyarrow.array(range(len(names)), "int64")
    positions = pc.index_in(numbers.cast("int64"), value_set=known)
    return pc.take(pyarrow.array(names, "string"), positions)


def _class_names(metadata: Mapping[bytes, bytes]) -> ClassNames:
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
