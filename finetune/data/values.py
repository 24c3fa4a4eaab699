"""Converts frame columns to Arrow, Python objects and text."""

import json
import re
from typing import Any

import pandas
import pyarrow
import pyarrow.compute as pc
from pyarrow import types

from finetune.tasks.labels import map_values


def frame_of(table: pyarrow.Table) -> pandas.DataFrame:
    """Convert a table to a frame with Arrow types, without copying values."""
    return table.to_pandas(types_mapper=pandas.ArrowDtype)


def arrow_of(values: pandas.Series) -> Any:
    """Convert an Arrow-typed column to Arrow, and an object column to a list."""
    if isinstance(values.dtype, pandas.ArrowDtype):
        return pyarrow.chunked_array(values.array.__arrow_array__())
    return [None if value is pandas.NA else value for value in values.tolist()]


def list_of(values: pandas.Series) -> list[Any]:
    """Convert a column to Python objects, with missing values as None."""
    column = arrow_of(values)
    return column if isinstance(column, list) else column.to_pylist()


def as_texts(values: pandas.Series) -> pyarrow.ChunkedArray | None:
    """Convert a column to text. Return None if it contains anything but texts and numbers."""
    column = arrow_of(values)
    if not isinstance(column, list):
        if not is_read(column.type) or "struct<" in str(column.type):
            return None
        column = plain(column)
        column = column.to_pylist() if types.is_nested(column.type) else column
    if isinstance(column, list) and {*map(type, column)} <= {str, type(None)}:
        column = pyarrow.chunked_array([pyarrow.array(column, "string")])
    if isinstance(column, list):
        texts = pyarrow.array(map(as_text, column), "string")
        return None if texts.null_count else pyarrow.chunked_array([texts])
    if not (types.is_string(column.type) or types.is_integer(column.type)):
        column = map_values(column, as_text)
    return pc.fill_null(column.cast("string"), "")


def plain(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Convert a column to types that all Arrow functions support."""
    column = stored(column)
    kind = column.type
    if types.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if types.is_float16(kind):
        return column.cast("float64")
    if (is_view := types.is_string_view(kind)) or types.is_large_string(kind):
        # Before version 24, pyarrow can't count the bytes of views.
        size_bytes = column.get_total_buffer_size() if is_view else column.nbytes
        return column.cast("string" if size_bytes < 2**31 else "large_string")
    is_list = types.is_nested(kind) and hasattr(kind, "value_type")
    if is_list and not types.is_list(kind):  # Arrow's own cast returns wrong values
        return pyarrow.chunked_array([column.to_pylist()], pyarrow.list_(kind.value_type))
    return column


def stored(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Convert an Arrow extension type, which pandas may not support, to its storage type."""
    is_extended = isinstance(column.type, pyarrow.BaseExtensionType)
    return column.cast(column.type.storage_type) if is_extended else column


def is_read(kind: pyarrow.DataType) -> bool:
    """Return whether a type can contain texts, labels or objects, unlike vectors or bytes."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_nested(kind) and "struct<" not in str(kind):
        inner = getattr(kind, "value_type", None)
        is_vector = inner is None or types.is_floating(inner) or types.is_nested(inner)
        return not is_vector and is_read(inner)
    return re.search(r"binary(_view)?\b(?!:)", str(kind)) is None


def as_text(value: Any) -> str | None:
    """Convert a value to text, a list to JSON. Return None for other values, such as bytes.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, None, b"x", ["x", 1], {"y": 1})]
    ['3.0', '3', '2.5', 'true', '', None, '["x", "1"]', None]
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | None) for item in value):
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


def content_of(value: Any) -> str:
    """Describe a column with neither texts nor numbers, from one of its values."""
    if isinstance(value, list):
        return f"lists of {content_of(value[0]) if value else 'nothing'}"
    if isinstance(value, dict):
        return f"objects with {', '.join(map(str, value)) or 'nothing'}"
    return {str: "texts", int: "numbers", float: "numbers"}.get(type(value), "bytes")
