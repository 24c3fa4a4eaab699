"""Writes the input table with predictions, in the format of the file suffix."""

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from finetune.data.delimited import FileFormat
from finetune.data.read import SourceTable, arrow_of
from finetune.data.stream import Texts
from finetune.errors import DataError, UsageError
from finetune.files import naming, temporary_path
from finetune.ownership import check_output_file
from finetune.tasks.base import Prediction, rename_taken

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
EXCEL_ROWS = 1_048_576
PLAIN = {str, int, float, bool, type(None)}


class PredictionFile:
    """Collects predictions, and writes them next to the columns of the input."""

    def __init__(self, path: Path, *, source: Path | None, overwrite: bool = False) -> None:
        """Raise a UsageError if the file can't be written, or is the source."""
        if path.suffix.lower() not in WRITERS:
            remedy = f"use one of {', '.join(WRITERS)}"
            raise UsageError(f"unsupported extension of {path}", remedy=remedy)
        folder = path.absolute().parent
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            message = f"{path} is a folder, or its folder is missing or read-only"
            raise UsageError(message, remedy="choose a file in an existing, writable folder")
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise UsageError(f"{path} is the input file", remedy="choose another --output")
        check_output_file(path, overwrite=overwrite)
        self.path, self.overwrite = path, overwrite
        self._source: SourceTable | None = None
        self._texts: list[dict[str, str]] = []
        self._results: list[dict[str, Any]] = []

    @property
    def rows(self) -> int:
        """The number of predictions."""
        return len(self._results)

    def reading(self, pieces: Iterable[Texts]) -> Iterator[Texts]:
        """Yield texts, and keep their table."""
        for piece in pieces:
            self._source = piece.source
            yield piece

    def add(self, predictions: Sequence[Prediction]) -> None:
        """Add the predictions of the next rows."""
        is_json = WRITERS[self.path.suffix.lower()] in (_write_json, _write_json_lines)
        for prediction in predictions:
            self._results.append(prediction.result if is_json else _flatten(prediction.result))
            if self._source is None:
                self._texts.append(prediction.texts)

    def write(self) -> None:
        """Write all rows to a temporary file, then rename it."""
        suffix, source = self.path.suffix.lower(), self._source
        source_suffix = "" if source is None else source.path.suffix.lower()
        if source is None:
            frame = pandas.DataFrame(self._texts, dtype=object)
            written = FileFormat("txt", has_header=suffix != ".txt")
        else:
            frame, written = source.frame, source.format
            if WRITERS[suffix] is not WRITERS.get(source_suffix):
                written = FileFormat(written.kind, has_header=written.has_header)
        if suffix in DELIMITERS and suffix != source_suffix:
            written = replace(written, delimiter=DELIMITERS[suffix], quote='"')
        results = pandas.DataFrame(self._results, index=frame.index, dtype=object)
        frame = frame.assign(**rename_taken(dict(results.items()), frame.columns))
        unfinished = temporary_path(self.path)
        unfinished.touch(exist_ok=False)
        try:
            with naming(self.path):
                WRITERS[suffix](unfinished, frame, written)
            check_output_file(self.path, overwrite=self.overwrite)
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)


def _as_list(values: pandas.Series) -> list[Any]:
    column = arrow_of(values)
    return column if isinstance(column, list) else column.to_pylist()


def _as_cells(values: pandas.Series) -> pandas.Series:
    """Return values for the cells of a file: lists and similar values become JSON."""
    return pandas.Series(map(_as_cell, _as_list(values)), index=values.index, dtype=object)


def _as_cell(value: Any) -> Any:
    is_plain = type(value) in PLAIN
    return value if is_plain else json.dumps(value, ensure_ascii=False, default=str).strip('"')


def _write_delimited(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    names = [*written.names, *frame.columns[len(written.names) :]]
    cells = frame.apply(_as_cells)
    # pandas puts no quotes around a carriage return, which readers take for the end of a row.
    has_return = cells.map(lambda cell: isinstance(cell, str) and "\r" in cell).any(axis=None)
    options: dict[str, Any] = {
        "sep": written.delimiter,
        "quotechar": written.quote or '"',
        "lineterminator": written.line_end,
        "header": names if written.has_header else False,
        "index": False,
        "quoting": csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL,
    }
    try:
        cells.to_csv(path, encoding=written.encoding, **options)
    except UnicodeEncodeError:  # a class name has characters that the encoding lacks
        cells.to_csv(path, encoding="utf-8-sig", **options)


def _json_rows(frame: pandas.DataFrame) -> Iterator[str]:
    columns = [_as_list(values) for _, values in frame.items()]
    rows = (dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True))
    return (json.dumps(row, ensure_ascii=False, default=str) for row in rows)


def _write_json_lines(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    with path.open("w", encoding=written.encoding, newline="") as file:
        file.writelines(f"{row}{written.line_end}" for row in _json_rows(frame))


def _write_json(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    text = "[\n" + ",\n".join(_json_rows(frame)) + "\n]\n"
    path.write_text(text, encoding=written.encoding)


def _write_parquet(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    table = pyarrow.table({name: _as_arrow(values) for name, values in frame.items()})
    parquet.write_table(table.replace_schema_metadata(written.metadata), path)


def _as_arrow(values: pandas.Series) -> Any:
    column = arrow_of(values)
    if isinstance(column, list) and all(value is None for value in column):
        return pyarrow.array(column, "string")
    try:
        return pyarrow.array(column) if isinstance(column, list) else column
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array(_as_cells(values).map(str, na_action="ignore"), "string")


def _write_excel(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    try:
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
    except ImportError as error:
        remedy = "pip install openpyxl, or write a .csv file"
        raise UsageError("writing .xlsx needs the package openpyxl", remedy=remedy) from error
    if len(frame) >= EXCEL_ROWS:
        rows = f"an Excel sheet can't have {len(frame):,} rows and a header"
        raise DataError(rows, remedy="write a .csv or .parquet file")
    cells = frame.astype(object).where(frame.notna(), None)
    cells = cells.map(_as_excel).replace(ILLEGAL_CHARACTERS_RE, "", regex=True)
    with path.open("wb") as file, pandas.ExcelWriter(file, engine="openpyxl") as writer:
        cells.to_excel(writer, sheet_name="predictions", header=written.has_header, index=False)
        for cell in chain.from_iterable(writer.sheets["predictions"].iter_rows()):
            if cell.data_type == "f":
                cell.data_type = "s"  # not a formula, even if the text starts with =


def _as_excel(value: Any) -> Any:
    is_date = hasattr(value, "isoformat") and getattr(value, "tzinfo", None) is None
    return value if is_date else _as_cell(value)


Write = Callable[[Path, pandas.DataFrame, FileFormat], None]
WRITERS: dict[str, Write] = {
    **dict.fromkeys(DELIMITERS, _write_delimited),
    **dict.fromkeys((".jsonl", ".ndjson"), _write_json_lines),
    ".json": _write_json,
    ".parquet": _write_parquet,
    ".xlsx": _write_excel,
}


def json_line(prediction: Prediction) -> str:
    """Return a prediction as one line of JSON; dates and similar values become text."""
    return json.dumps(prediction.to_json(), ensure_ascii=False, default=str)


def _flatten(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and texts by column."""
    row: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            row |= {f"probability_{label}": probability for label, probability in value.items()}
        else:
            row[name] = joined(value) if isinstance(value, list) else value
    return row


def joined(values: Sequence[str | float]) -> str:
    """Return labels, or their probabilities, joined by |."""
    return "|".join(value if isinstance(value, str) else f"{value:.3f}" for value in values)
