"""Converts in-memory tables (pandas, polars, datasets, scikit-learn, plain Python) to Arrow."""

import hashlib
import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet, types

from finetune.config.schema import DataConfig, flag_of
from finetune.data.columns import TEXT
from finetune.data.delimited import FileFormat, are_known_names
from finetune.data.read import SourceTable
from finetune.data.stream import Texts, not_unicode, read_texts, texts_of_table
from finetune.data.values import as_text, frame_of, plain
from finetune.errors import ConfigurationError, DataUnreadableError, FinetuneError, UsageError
from finetune.files import replacing_file

TAKEN = (
    'pass a DataFrame, a Dataset, {"text": texts, "label": labels}, (texts, labels), or a list of '
    "dicts or of (text, label) tuples"
)


def is_table(value: object) -> bool:
    """Return whether a value can be an in-memory table, because it is not a file name."""
    return value is not None and not isinstance(value, str | bytes | os.PathLike | int | float)


def as_arrow(table: Any) -> pyarrow.Table:
    """Convert a table of any library, or rows or columns in plain Python, to Arrow."""
    try:
        arrow = _as_arrow(table)
    except UnicodeEncodeError as error:
        raise not_unicode(error.object, error) from error
    except (pyarrow.ArrowException, TypeError, AttributeError, ValueError, KeyError) as error:
        message = f"data of type {type(table).__name__} can't be read as a table: {error}"
        raise ConfigurationError(message, remedy=TAKEN) from error
    twice = [name for name, count in Counter(arrow.column_names).items() if count > 1]
    if twice:
        message = f"duplicate column name in the table: {twice[0]!r}"
        raise DataUnreadableError(message, remedy="rename or remove one of them")
    columns = dict(zip(arrow.column_names, map(_storable, arrow.columns), strict=True))
    return pyarrow.table(columns).replace_schema_metadata(arrow.schema.metadata)


def _storable(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Convert a column to types that Parquet supports. Objects without keys become JSON."""
    return _as_texts(column.to_pylist()) if "struct<>" in str(column.type) else plain(column)


def _as_texts(values: Iterable[Any]) -> pyarrow.ChunkedArray:
    """Convert values of mixed types to texts. Nested values become JSON."""
    values = [sorted(value) if isinstance(value, set | frozenset) else value for value in values]
    texts = [
        json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list | dict)
        else as_text(value)
        for value in values
    ]
    return pyarrow.chunked_array([texts], "string")


def _as_arrow(table: Any) -> pyarrow.Table:
    if hasattr(table, "with_format") and hasattr(table, "features"):  # datasets.Dataset
        is_lazy = not hasattr(table, "__len__")
        arrow = _as_arrow(list(table)) if is_lazy else table.with_format("arrow")[:]
        if table.features:  # class names
            arrow = arrow.cast(table.features.arrow_schema) if is_lazy else arrow
            arrow = arrow.replace_schema_metadata(table.features.arrow_schema.metadata)
        return arrow
    if hasattr(table, "collect") and hasattr(table, "lazy"):  # a polars frame
        table = table.collect()
    if not hasattr(table, "iloc"):
        if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
            return pyarrow.table(table)
        table = _frame_of(table)
    frame = table.to_frame() if hasattr(table, "to_frame") else table
    names = [name if isinstance(name, str) else as_text(name) or str(name) for name in frame]
    columns = [_array(frame.iloc[:, number]) for number in range(len(names))]
    return pyarrow.Table.from_arrays(columns, names=names)


def _frame_of(table: Any) -> pandas.DataFrame:
    """Convert rows or columns of plain Python, numpy or scikit-learn to an object frame."""
    if isinstance(table, Mapping):
        return _frame_of_mapping(table)
    are_rows = isinstance(table, tuple) and all(
        isinstance(row, tuple) and len(row) in (2, 3) for row in table
    )
    if isinstance(table, tuple) and len(table) == 2 and not are_rows:
        table = dict(zip(("text", "label"), map(_listed, table), strict=True))
        return pandas.DataFrame(table, dtype=object)
    rows = table if hasattr(table, "dtype") else list(table)
    frame = pandas.DataFrame(rows, dtype=object)
    if not isinstance(frame.columns, pandas.RangeIndex) or not len(rows):
        return frame
    names = {2: ["text", "label"], 3: ["text", "text_pair", "label"]}.get(len(frame.columns))
    if names is None:
        raise TypeError(f"its rows, such as {rows[0]!r:.60}, are not a text and a label")
    if [_recurs(frame[column]) for column in frame] == [True, False]:
        names = ["label", "text"]
    return frame.set_axis(names, axis="columns")


def _recurs(values: Any) -> bool:
    """Return whether values are probably classes, because few are distinct."""
    return len({*map(str, values)}) <= len(values) / 2


def _frame_of_mapping(table: Mapping[Any, Any]) -> pandas.DataFrame:
    """Read columns by name, texts by label, a single row, or a scikit-learn Bunch."""
    if {"data", "target"} <= table.keys():
        names, target = table.get("target_names"), _listed(table["target"])
        if names is not None and len(names) > 1:
            target = [
                [names[int(number)] for number in label]
                if isinstance(label, list)
                else names[label]
                for label in target
            ]
        table = {"text": table["data"], "label": target}
    elif all(isinstance(value, str | None) for value in table.values()):
        return pandas.DataFrame([table], dtype=object)
    columns = {str(name): _listed(values) for name, values in table.items()}
    has_texts = all(isinstance(text, str) for values in columns.values() for text in values[:100])
    if has_texts and not any(map(_recurs, columns.values())) and not are_known_names(columns):
        rows = [(text, label) for label, texts in columns.items() for text in texts]
        return pandas.DataFrame(rows, columns=["text", "label"], dtype=object)
    return pandas.DataFrame(columns, dtype=object)


def _listed(values: Any) -> Any:
    """Convert values to a sequence. An indicator matrix becomes lists of column numbers."""
    if isinstance(values, str):
        raise TypeError(f"{values!r:.60} is a text, not a list of texts")
    values = values.detach().cpu() if hasattr(values, "detach") else values
    to_numpy = getattr(values, "toarray", None) or getattr(values, "numpy", None)
    values = to_numpy() if to_numpy else values  # scipy and PyTorch
    shape: tuple[int, ...] = getattr(values, "shape", ())
    if len(shape) < 2:
        return values if hasattr(values, "__array__") else list(values)
    matrix, names = np.asarray(values), getattr(values, "columns", range(shape[1]))
    if shape[1:] == (1,):
        return matrix.ravel()
    if len(shape) == 2 and np.isin(matrix, (0, 1)).all():
        return [
            [str(name) for name, mark in zip(names, row, strict=True) if mark] for row in matrix
        ]
    if matrix.dtype.kind in "OU":
        return matrix.tolist()
    raise TypeError(
        f"an array of shape {shape} should contain only 0 and 1 for each class; pass one class"
        " per row, such as array.argmax(axis=1)"
    )


def _array(values: Any, *, mixes: bool = True) -> Any:
    """Convert values to Arrow. Mixed types become text."""
    if hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc"):
        return pyarrow.chunked_array(values)
    try:
        return pyarrow.array(values, from_pandas=True)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
        if not mixes:
            raise
    return _as_texts(values)


def write_table(table: Any, folder: Path) -> Path:
    """Write a table to a folder as a Parquet file named after its content digest."""
    content, arrow = pyarrow.BufferOutputStream(), as_arrow(table)
    if not arrow.num_rows:
        raise DataUnreadableError("the table has no rows", remedy="add one row per text")
    parquet.write_table(arrow, content)
    written = content.getvalue()
    path = folder / f"table-{hashlib.sha256(written).hexdigest()[:8]}.parquet"
    with replacing_file(path) as partial:
        partial.write_bytes(written)
    return path


def read_any_texts(texts: Any, options: DataConfig, *, reads_pairs: bool) -> Iterable[Texts]:
    """Return a single text, or all texts of a list, a column, a table or the file at a ``Path``."""
    try:
        if isinstance(texts, os.PathLike):
            return read_texts(Path(texts), options, as_lines=False, reads_pairs=reads_pairs)
        return [_texts_in(texts, options, reads_pairs=reads_pairs)]
    except FinetuneError as error:
        if flag_of(TEXT) in error.remedy:
            error.remedy = "pass only the texts, such as table['text'], or pairs of them as tuples"
        raise


def _texts_in(texts: Any, options: DataConfig, *, reads_pairs: bool) -> Texts:
    if isinstance(texts, str) or (isinstance(texts, tuple) and len(texts) == 2 and reads_pairs):
        texts = [texts]
    is_rows = isinstance(texts, list) and isinstance(next(iter(texts), None), Mapping)
    names = ("columns", "column_names", "read_all")
    is_frame = isinstance(texts, Mapping) or any(hasattr(texts, name) for name in names)
    has_fields = getattr(getattr(texts, "dtype", None), "names", None)
    if not (is_rows or is_frame or has_fields):
        return _texts_of_list(texts, reads_pairs=reads_pairs)
    table = as_arrow(texts)
    if not table.num_rows:
        return Texts([], [] if reads_pairs else None)
    source = SourceTable(Path("the table"), frame_of(table), FileFormat(), "row")
    return texts_of_table(source, options, reads_pairs=reads_pairs)


def _texts_of_list(texts: Any, *, reads_pairs: bool) -> Texts:
    """Convert a list, Series or other column of texts, or of pairs as tuples."""
    try:
        values = plain(pyarrow.chunked_array([_array(_listed(texts), mixes=False)]))
        kind, count = values.type, 2 if reads_pairs else 1
        if types.is_null(kind) or (types.is_string(kind) and not reads_pairs):
            return Texts(*[values.cast("string")] * count)
        are_lists = types.is_list(kind) and types.is_string(kind.value_type)
        if are_lists and pc.all(pc.equal(pc.list_value_length(values), count)).as_py():
            return Texts(*(pc.list_element(values, number) for number in range(count)))
    except UnicodeEncodeError as error:
        raise not_unicode(error.object, error) from error
    except (pyarrow.ArrowException, TypeError):
        pass
    wanted = "pairs of texts as tuples" if reads_pairs else "single texts"
    raise UsageError(
        f"{reprlib.repr(texts)}, of type {type(texts).__name__}, is not a list of texts",
        remedy=f"pass a list of {wanted} for this model, or a table",
    )
