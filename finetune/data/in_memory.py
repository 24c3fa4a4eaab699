"""Converts tables of pandas, polars, datasets, scikit-learn or plain Python to Arrow."""

import hashlib
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import parquet, types

from finetune.config.schema import DataConfig
from finetune.data.columns import LABEL_NAMES, TEXT_NAMES, plain_name
from finetune.data.read import FileFormat, SourceTable, as_text, frame_of, plain
from finetune.data.stream import Texts, not_unicode, texts_of
from finetune.errors import ConfigurationError, DataUnreadableError, UsageError
from finetune.files import write_bytes_atomically

TAKEN = (
    'give a DataFrame, a Dataset, {"text": texts, "label": labels}, (texts, labels), or a list of '
    "dicts or of (text, label) tuples"
)


def is_table(value: object) -> bool:
    """Return whether a value may be a table in memory, because it is not a file name."""
    return value is not None and not isinstance(value, str | bytes | os.PathLike | int | float)


def as_arrow(table: Any) -> pyarrow.Table:
    """Return a table of any library, or rows or columns of plain Python, as Arrow."""
    try:
        arrow = _as_columns(table)
    except UnicodeEncodeError as error:
        raise not_unicode(error.object, error) from error
    except (pyarrow.ArrowException, TypeError, AttributeError, ValueError, KeyError) as error:
        message = f"data of the type {type(table).__name__} can't be read as a table: {error}"
        raise ConfigurationError(message, remedy=TAKEN) from error
    twice = [name for name, count in Counter(arrow.column_names).items() if count > 1]
    if twice:
        message = f"two columns of the table are called {twice[0]!r}"
        raise DataUnreadableError(message, remedy="rename one of them, or leave it out")
    columns = dict(zip(arrow.column_names, map(plain, arrow.columns), strict=True))
    return pyarrow.table(columns).replace_schema_metadata(arrow.schema.metadata)


def _as_columns(table: Any) -> pyarrow.Table:
    if hasattr(table, "iloc"):  # of pandas
        frame = table.to_frame() if hasattr(table, "to_frame") else table
        names = [name if isinstance(name, str) else as_text(name) or str(name) for name in frame]
        return _table(names, [frame.iloc[:, number] for number in range(len(names))])
    if hasattr(table, "with_format") and hasattr(table, "features"):  # of the library datasets
        is_lazy = not hasattr(table, "__len__")
        arrow = _from_rows(list(table)) if is_lazy else table.with_format("arrow")[:]
        if table.features:  # names of classes
            arrow = arrow.cast(table.features.arrow_schema) if is_lazy else arrow
            arrow = arrow.replace_schema_metadata(table.features.arrow_schema.metadata)
        return arrow
    if hasattr(table, "collect") and hasattr(table, "lazy"):  # of polars
        table = table.collect()
    if hasattr(table, "__arrow_c_stream__") or hasattr(table, "__arrow_c_array__"):
        return pyarrow.table(table)
    if isinstance(table, Mapping):
        return _from_mapping(table)
    if getattr(getattr(table, "dtype", None), "names", None):  # of numpy
        return _table(table.dtype.names, [table[name] for name in table.dtype.names])
    if isinstance(table, tuple) and len(table) == 2 and not all(map(_is_row, table)):
        return _table(("text", "label"), table)
    return _from_rows(list(table))


def _is_row(value: Any) -> bool:
    return isinstance(value, tuple) and 2 <= len(value) <= 3


def _from_mapping(table: Mapping[Any, Any]) -> pyarrow.Table:
    """Read columns by name, the texts of each label, or a Bunch of scikit-learn."""
    if {"data", "target"} <= table.keys():
        names: Any = table.get("target_names")
        target = table["target"]
        is_numbered = names is not None and len(names) > 1
        labels = [names[number] for number in target] if is_numbered else target
        return _table(("text", "label"), (table["data"], labels))
    if all(isinstance(value, str | None) for value in table.values()):
        return _from_rows([table])
    values = [value if isinstance(value, str) else _listed(value) for value in table.values()]
    has_names = any(plain_name(str(name)) in TEXT_NAMES + LABEL_NAMES for name in table)
    has_texts = all(isinstance(text, str) for column in values for text in column[:100])
    recurs = any(len({*map(str, column)}) <= len(column) / 2 for column in values)
    if has_texts and not (has_names or recurs) and not any(isinstance(v, str) for v in values):
        return _from_rows(
            [
                (text, str(label))
                for label, texts in zip(table, values, strict=True)
                for text in texts
            ]
        )
    return _table([str(name) for name in table], [*table.values()])


def _from_rows(rows: Sequence[Any]) -> pyarrow.Table:
    """Read rows that are dicts, named tuples, or tuples of texts and a label."""
    rows = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]
    if all(isinstance(row, Mapping) for row in rows):  # or there is none
        names = list(dict.fromkeys(name for row in rows for name in row))
        return _table(list(map(str, names)), [[row.get(name) for row in rows] for name in names])
    sizes = {
        -1 if isinstance(row, str) or not hasattr(row, "__len__") else len(row) for row in rows
    }
    if sizes not in ({2}, {3}):
        raise TypeError(f"its rows are like {rows[0]!r:.60}, without text and label")
    columns = [*zip(*rows, strict=True)]
    if sizes == {3}:
        return _table(("text", "text_pair", "label"), columns)
    recurs = [len({*map(str, column)}) <= len(rows) / 2 for column in columns]
    return _table(("label", "text") if recurs == [True, False] else ("text", "label"), columns)


def _table(names: Sequence[str], columns: Iterable[Any]) -> pyarrow.Table:
    return pyarrow.Table.from_arrays([*map(_array, columns)], names=[*names])


def _listed(values: Any) -> Any:
    """Return values that can be counted and sliced; a matrix of 0 and 1 as lists of its columns."""
    if isinstance(values, str):
        raise TypeError(f"{values!r:.60} is a text, and no list of texts")
    to_numpy = getattr(values, "toarray", None) or getattr(values, "numpy", None)
    values = to_numpy() if to_numpy else values  # of scipy and PyTorch
    shape = getattr(values, "shape", ())
    if len(shape) == 2 and set(map(int, {*values.ravel().tolist()})) <= {0, 1}:
        return [[str(number) for number, is_one in enumerate(row) if is_one] for row in values]
    is_array = hasattr(values, "__array__") or hasattr(values, "__arrow_c_stream__")
    return values if is_array and len(shape) < 2 else list(values)


def _array(values: Any, *, mixes: bool = True) -> Any:
    """Return values as Arrow; values of several types become text."""
    values = _listed(values)
    try:
        if hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc"):
            return pyarrow.chunked_array(values)
        return pyarrow.array(values, from_pandas=True)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
        if not mixes:
            raise
        values = [
            sorted(value) if isinstance(value, set | frozenset) else value for value in values
        ]
        return pyarrow.array(map(as_text, values), "string")


def write_table(table: Any, folder: Path) -> Path:
    """Write a table to a folder as a Parquet file, named after the digest of its content."""
    content, arrow = pyarrow.BufferOutputStream(), as_arrow(table)
    if not arrow.num_rows:
        raise DataUnreadableError("the table has no rows", remedy="add one row per text")
    parquet.write_table(arrow, content)
    written = content.getvalue().to_pybytes()
    path = folder / f"table-{hashlib.sha256(written).hexdigest()[:8]}.parquet"
    write_bytes_atomically(path, written)
    return path


def read_texts(texts: Any, options: DataConfig, *, reads_pairs: bool) -> Texts:
    """Return a text, or all of a list, a column or a table."""
    if isinstance(texts, str) or (isinstance(texts, tuple) and len(texts) == 2 and reads_pairs):
        return texts_of_list([texts])
    is_rows = isinstance(texts, list) and isinstance(next(iter(texts), None), Mapping)
    names = ("columns", "column_names", "read_all")
    is_frame = isinstance(texts, Mapping) or any(hasattr(texts, name) for name in names)
    has_fields = getattr(getattr(texts, "dtype", None), "names", None)
    if not (is_rows or is_frame or has_fields):
        return texts_of_list(texts)
    table = as_arrow(texts)
    if not table.num_rows:
        return Texts([], [] if reads_pairs else None)
    source = SourceTable(Path("the table"), frame_of(table), FileFormat("parquet"), str)
    return texts_of(source, options, reads_pairs=reads_pairs)


def texts_of_list(texts: Any) -> Texts:
    """Return a list, Series or other column of texts, or of pairs as tuples."""
    try:
        values = plain(pyarrow.chunked_array([_array(texts, mixes=False)]))
        kind, texts = values.type, values
        if types.is_null(kind) or types.is_string(kind):
            return Texts(values.cast("string"))
        is_pair = types.is_list(kind) and types.is_string(kind.value_type)
        if is_pair and pc.all(pc.equal(pc.list_value_length(values), 2)).as_py():
            return Texts(*(pc.list_element(values, number) for number in (0, 1)))
    except UnicodeEncodeError as error:
        raise not_unicode(error.object, error) from error
    except (pyarrow.ArrowException, TypeError):
        pass
    kind = f"{reprlib.repr(texts)}, of the type {type(texts).__name__}"
    remedy = "give a text, a list of texts or of pairs as tuples, or a table"
    raise UsageError(f"{kind}, is not a list of texts", remedy=remedy)
