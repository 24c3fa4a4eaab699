"""Tables in memory, of pandas, datasets, Arrow or plain Python: written as Parquet files."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from finetune.errors import ConfigurationInvalid
from finetune.files import write_bytes_atomically
from finetune.ownership import check_output_file


def is_table(value: object) -> bool:
    """Return whether a value is a table in memory, or a list that may be one."""
    is_known = hasattr(value, "columns") or hasattr(value, "column_names")
    return is_known or isinstance(value, Mapping | list)


def as_arrow(table: Any) -> pyarrow.Table:
    """Return a table, a mapping of columns, or a list of rows, as Arrow."""
    try:
        if isinstance(table, list):
            return pyarrow.Table.from_pylist(table)
        if hasattr(table, "with_format"):  # of the library datasets, which names classes beside it
            arrow = table.with_format("arrow")[:]
            return arrow.replace_schema_metadata(table.features.arrow_schema.metadata)
        if hasattr(table, "iloc"):
            return pyarrow.Table.from_pandas(table, preserve_index=False)
        return pyarrow.table(dict(table) if isinstance(table, Mapping) else table)
    except (pyarrow.ArrowException, TypeError, AttributeError) as error:
        raise ConfigurationInvalid(
            f"a {type(table).__name__} can't be read as a table: {error}",
            remedy='give a DataFrame, a Dataset, {"text": texts, "label": labels}, or a list of '
            "dicts with these keys",
        ) from error


def write_table(table: Any, folder: Path) -> Path:
    """Write a table as a file whose name has the digest of its content, and return its path.

    A file of that name with other content is not ours: ``UsageError``.
    """
    content = pyarrow.BufferOutputStream()
    parquet.write_table(as_arrow(table), content)
    written = content.getvalue().to_pybytes()
    path = folder / f"table-{hashlib.sha256(written).hexdigest()[:8]}.parquet"
    if not (path.is_file() and path.read_bytes() == written):
        check_output_file(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, written)
    return path
