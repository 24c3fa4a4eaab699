"""Writes the input table with predictions, in the format of the file suffix."""

import csv
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow
from pyarrow import parquet

from finetune.data.stream import Texts
from finetune.errors import DataError, UsageError
from finetune.files import naming, temporary_path
from finetune.ownership import check_output_file
from finetune.tasks.base import Prediction, rename_taken

if TYPE_CHECKING:
    from finetune.data.read import FileFormat, SourceTable
DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
EXCEL_ROWS = 1_048_576
PLAIN = {str, int, float, bool, type(None)}


class PredictionFile:
    """Collects predictions, and writes them next to the columns of the input."""

    def __init__(self, path: Path, *, source: Path | None, overwrite: bool = False) -> None:
        """Raise a UsageError if the file can't be written, or is the source."""
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
        self.path, self.overwrite, self.rows = path, overwrite, 0
        self._source: SourceTable | None = None
        # Columns: the texts, unless they come from a table, and the predictions.
        self._texts = defaultdict[str, list[Any]](list)
        self._results = defaultdict[str, list[Any]](list)

    def reading(self, pieces: Iterable[Texts]) -> Iterator[Texts]:
        """Yield texts, and keep their table."""
        for piece in pieces:
            self._source = piece.source
            yield piece

    def add(self, predictions: Sequence[Prediction]) -> None:
        """Add the predictions of the next rows."""
        self.rows += len(predictions)
        is_json = WRITERS[self.path.suffix.lower()] in IN_JSON
        for prediction in predictions:
            result = prediction.result if is_json else _flatten(prediction.result)
            for name, value in result.items():
                self._results[name].append(value)
            if self._source is None:
                for name, text in prediction.texts.items():
                    self._texts[name].append(text)

    def write(self) -> None:
        """Write all rows; the file gets its name when it is whole."""
        from finetune.data.read import FileFormat, arrow_of

        suffix, source = self.path.suffix.lower(), self._source
        columns = dict[str, Any](self._texts)
        written = FileFormat("txt", has_header=suffix != ".txt")
        if source is not None:
            columns = {name: arrow_of(series) for name, series in source.frame.items()}
            written = source.format
            if WRITERS[suffix] is not WRITERS.get(source.path.suffix.lower()):
                written = FileFormat(written.kind, has_header=written.has_header)
        if suffix in DELIMITERS and (source is None or suffix != source.path.suffix.lower()):
            written = replace(written, delimiter=DELIMITERS[suffix], quote='"')
        columns |= rename_taken(self._results, columns)
        unfinished = temporary_path(self.path)
        unfinished.touch(exist_ok=False)
        try:
            with naming(self.path):
                WRITERS[suffix](unfinished, columns, written)
            check_output_file(self.path, overwrite=self.overwrite)
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)


Columns = Mapping[str, Any]
"""Lists, or columns of Arrow, by name."""


def _as_cells(values: Any) -> list[Any]:
    """Return values for the cells of a file: lists and similar values become JSON."""
    cells = values if isinstance(values, list) else values.to_pylist()
    if {*map(type, cells)} <= PLAIN:
        return cells
    return [cell if type(cell) in PLAIN else _as_text(cell) for cell in cells]


def _as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str).strip('"')


def _write_delimited(path: Path, columns: Columns, written: "FileFormat") -> None:
    cells = [*map(_as_cells, columns.values())]

    def write(encoding: str) -> None:
        with path.open("w", encoding=encoding, newline="") as file:
            # Python puts quotes around a line end in a cell if it ends rows, as \r and \n do here.
            rows = SimpleNamespace(write=lambda row: file.write(row[:-2] + written.line_end))
            writer = csv.writer(rows, delimiter=written.delimiter, quotechar=written.quote or '"')
            if written.has_header:
                writer.writerow([*written.names, *[*columns][len(written.names) :]])
            writer.writerows(zip(*cells, strict=True))

    try:
        write(written.encoding)
    except UnicodeEncodeError:  # a class has other characters than the input
        write("utf-8-sig")


def _json_rows(columns: Columns) -> Iterator[str]:
    values = (
        column if isinstance(column, list) else column.to_pylist() for column in columns.values()
    )
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))
    return (json.dumps(row, ensure_ascii=False, default=str) for row in rows)


def _write_json_lines(path: Path, columns: Columns, written: "FileFormat") -> None:
    with path.open("w", encoding=written.encoding, newline="") as file:
        file.writelines(f"{row}{written.line_end}" for row in _json_rows(columns))


def _write_json(path: Path, columns: Columns, written: "FileFormat") -> None:
    with path.open("w", encoding=written.encoding) as file:
        file.write("[\n" + ",\n".join(_json_rows(columns)) + "\n]\n")


def _write_parquet(path: Path, columns: Columns, written: "FileFormat") -> None:
    table = pyarrow.table({name: _as_arrow(column) for name, column in columns.items()})
    parquet.write_table(table.replace_schema_metadata(written.metadata), path)


def _as_arrow(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    if all(value is None for value in values):
        return pyarrow.array(values, "string")
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array([value and _as_text(value) for value in values], "string")


def _write_excel(path: Path, columns: Columns, written: "FileFormat") -> None:
    try:
        from openpyxl import Workbook
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
    except ImportError as error:
        remedy = "pip install openpyxl, or name a .csv file"
        raise UsageError("writing .xlsx needs the package openpyxl", remedy=remedy) from error
    book = Workbook(write_only=True)
    sheet = book.create_sheet("predictions")

    def cell(value: Any) -> Any:
        if isinstance(value, str):
            written = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("", value))
            written.data_type = "s"  # no formula, even if it begins with =
            return written
        is_plain = type(value) in PLAIN or (isinstance(value, date | time) and not _has_zone(value))
        return value if is_plain else _as_text(value)

    values = [
        column if isinstance(column, list) else column.to_pylist() for column in columns.values()
    ]
    if len(values[0]) >= EXCEL_ROWS:
        rows = f"{len(values[0]):,} rows and their names are more than an Excel sheet holds"
        raise DataError(rows, remedy="name a .csv or .parquet file")
    if written.has_header:
        sheet.append([*map(cell, columns)])
    for row in zip(*values, strict=True):
        sheet.append([*map(cell, row)])
    book.save(path)


def _has_zone(value: Any) -> bool:
    return getattr(value, "tzinfo", None) is not None


WRITERS: dict[str, Callable[[Path, Columns, "FileFormat"], None]] = {
    **dict.fromkeys(DELIMITERS, _write_delimited),
    **dict.fromkeys((".jsonl", ".ndjson"), _write_json_lines),
    ".json": _write_json,
    ".parquet": _write_parquet,
    ".xlsx": _write_excel,
}
IN_JSON = (_write_json, _write_json_lines)


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
    """Return labels, or their probabilities, joined by a bar."""
    return "|".join(value if isinstance(value, str) else f"{value:.3f}" for value in values)
