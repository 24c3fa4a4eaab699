"""Parquet files."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import pyarrow
from datasets import ClassLabel, Features
from pyarrow import parquet

from finetune.config.schema import DataConfig
from finetune.data.mapped import PIECE_ROWS, collect
from finetune.data.packed import Content
from finetune.data.reader import STREAM_ROWS, Columns, Reader, Row, as_texts, readable_columns
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info
from finetune.tasks.labels import map_values


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the rows of all columns."""
    with _errors_explained(content.path):
        file = _open(content)
    batches = _read_batches(file, path=content.path, rows=STREAM_ROWS)
    yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def columns(content: Content, options: DataConfig, emit: Emit) -> Columns:
    """Read columns of texts and numbers; numbers of classes that have names as these names."""
    path = content.path
    emit(Info(f"reading {path}"))
    with _errors_explained(path):
        file = _open(content)
        schema = file.schema_arrow
    if file.metadata.num_rows == 0 or len(set(schema.names)) < len(schema.names):
        raise DataUnreadable(
            f"{path} holds no rows, or two columns of the same name", remedy="export it again"
        )
    names = readable_columns(schema, path=path, emit=emit)
    batches = _read_batches(file, path=path, rows=PIECE_ROWS, columns=names)
    table = collect(as_texts(pyarrow.Table.from_batches([batch])) for batch in batches)
    class_names = {
        name: own for name, own in _class_names(schema).items() if name in table.column_names
    }
    for name, own in class_names.items():
        named = map_values(table[name], partial(_name_classes, names=own))
        table = table.set_column(table.column_names.index(name), name, named)
    return table, class_names


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


def _class_names(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """Return the names of classes that the library datasets keeps beside the columns."""
    try:
        features = Features.from_arrow_schema(schema)
    except Exception:  # metadata that it has not written
        return {}
    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def _name_classes(value: str, *, names: Sequence[str]) -> str:
    """Return the name of a class for its number, or the names in a list of numbers."""
    if value.startswith("["):
        named = [_name_classes(one, names=names) for one in json.loads(value)]
        return json.dumps(named, ensure_ascii=False)
    if not re.fullmatch(r"-?\d+", value):
        return value
    return names[int(value)] if 0 <= int(value) < len(names) else ""


READER = Reader((".parquet",), rows, columns, unit="row", first_bytes=b"PAR1")
