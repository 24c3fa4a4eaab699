"""Writes predictions to a file, batch by batch: CSV, JSON lines or Parquet."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import csv, parquet

from finetune.errors import UsageError
from finetune.files import naming, temporary_path
from finetune.ownership import check_output_file
from finetune.tasks.base import Prediction

Write = Callable[[Sequence[Prediction]], None]


def check_output(path: Path, *, source: Path | None, overwrite: bool = False) -> None:
    """Raise a UsageError unless predictions can be written to a file other than the source."""
    if path.suffix.lower() not in WRITERS:
        raise UsageError(
            f"unsupported extension of {path}", remedy=f"use one of {', '.join(WRITERS)}"
        )
    folder = path.absolute().parent
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{path} can't be written: it is a folder, or its folder is missing or read-only",
            remedy="name a file in a folder that exists and that you may write to",
        )
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is the file that is read", remedy="name another --output")
    check_output_file(path, overwrite=overwrite)


@contextmanager
def prediction_file(path: Path, *, overwrite: bool = False) -> Iterator[Write]:
    """Yield a function that adds predictions; the file gets its name when all are written.

    Until then, and after an error, they are in the same folder, under a name of their own.
    """
    unfinished = temporary_path(path)
    unfinished.touch(exist_ok=False)
    with naming(path), WRITERS[path.suffix.lower()](unfinished) as write:
        yield write
    check_output_file(path, overwrite=overwrite)
    os.replace(unfinished, path)


@contextmanager
def _json_lines(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda predictions: file.writelines(f"{json_line(row)}\n" for row in predictions)


@contextmanager
def _table(writer_type: Any, path: Path) -> Iterator[Write]:
    schema: Any = None
    writer: Any = None
    with ExitStack() as stack:

        def write(predictions: Sequence[Prediction]) -> None:
            nonlocal schema, writer
            rows = [*map(_flatten, predictions)]
            names = dict.fromkeys(name for row in rows for name in row)
            if schema is None:
                are_floats = [isinstance(rows[0].get(name), float) for name in names]
                types = ("float64" if is_float else "string" for is_float in are_floats)
                schema = pyarrow.schema([*zip(names, types, strict=True)])
                writer = stack.enter_context(writer_type(path, schema))
            if new := names.keys() - {*schema.names}:
                raise UsageError(
                    f"columns that the first rows lack: {', '.join(sorted(new))}; the predictions"
                    f" before them are in {path}",
                    remedy="write --output FILE.jsonl, where each row has its own columns",
                )
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))

        yield write


WRITERS: dict[str, Callable[[Path], AbstractContextManager[Write]]] = {
    ".csv": partial(_table, csv.CSVWriter),
    ".jsonl": _json_lines,
    ".parquet": partial(_table, parquet.ParquetWriter),
}


def json_line(prediction: Prediction) -> str:
    """Return a prediction as one line of JSON; dates and the like as text."""
    return json.dumps(prediction.to_json(), ensure_ascii=False, default=str)


def _flatten(prediction: Prediction) -> dict[str, Any]:
    """Return numbers and texts by column."""
    row: dict[str, Any] = dict(prediction.texts)
    for name, value in prediction.result.items():
        if isinstance(value, Mapping):
            row |= {f"probability_{label}": one for label, one in value.items()}
        else:
            row[name] = joined(value) if isinstance(value, list) else value
    others = prediction.columns_beside(row)
    return row | {name: _as_text(value) for name, value in others.items()}


def joined(values: Sequence[str | float]) -> str:
    """Return labels, or their probabilities, with a bar between them."""
    return "|".join(one if isinstance(one, str) else f"{one:.3f}" for one in values)


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str).strip('"')
