"""Writes the input table with predictions, in the format of the file suffix."""

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from finetune.data.delimited import Delimited, FileFormat
from finetune.data.packed import ZIP
from finetune.data.read import Sheet, SourceTable, arrow_of, list_of
from finetune.data.stream import SAMPLE_ROWS, Texts
from finetune.errors import DataError, UsageError
from finetune.evaluation.workbook import add_columns, escape_characters
from finetune.events import WarningMessage, emit
from finetune.files import naming, temporary_path
from finetune.ownership import check_output_file
from finetune.tasks.base import Prediction, rename_taken
from finetune.tasks.labels import has_decimal_commas

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
EXCEL_ROWS, EXCEL_CHARACTERS, EXCEL_DIGITS = 1_048_576, 32_767, 15
PLAIN = {str, int, float, bool, type(None)}
# The end of a row, and the blank lines below it.
ROW_END = re.compile(r"((?:[\r\n]\s*)?\Z)")


class PredictionFile:
    """Collects predictions, and writes them next to the columns of the input."""

    def __init__(self, path: Path, *, source: Path | None, overwrite: bool = False) -> None:
        """Raise a UsageError if the file can't be written, or is the source."""
        has_macros = source is not None and source.suffix.lower() == ".xlsm"
        suffixes = [suffix for suffix in WRITERS if suffix != ".xlsm" or has_macros]
        if path.suffix.lower() not in suffixes:
            remedy = f"use one of {', '.join(suffixes)}"
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
        self._results.extend(prediction.result for prediction in predictions)
        if self._source is None:
            self._texts.extend(prediction.texts for prediction in predictions)

    def write(self) -> None:
        """Write all rows to a temporary file, then rename it."""
        unfinished = temporary_path(self.path)
        unfinished.touch(exist_ok=False)
        try:
            with naming(self.path):
                self._write(unfinished)
            check_output_file(self.path, overwrite=self.overwrite)
            os.replace(unfinished, self.path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        """Add columns to a copy of the source if it has the same format, or write a new file."""
        suffix, source = self.path.suffix.lower(), self._source
        write, layout = WRITERS[suffix], source and source.layout
        frame = source.frame if source else pandas.DataFrame(self._texts, dtype=object)
        written = source.format if source else FileFormat("txt", has_header=suffix != ".txt")
        rows = self._results
        if write not in (_write_json, _write_json_lines):
            has_commas = suffix in DELIMITERS and written.kind == "csv" and _has_commas(frame)
            show = _with_comma if has_commas else float if write is _write_parquet else rounded
            rows = [_flatten(row, show) for row in rows]
        added = pandas.DataFrame(rows, index=frame.index, dtype=object)
        added = added.set_axis([*rename_taken(dict.fromkeys(added), frame.columns)], axis="columns")
        if isinstance(layout, Delimited) and layout.text.content.suffix == suffix:
            return _write_text(path, _lines_with(layout, added), written)
        if isinstance(layout, Sheet) and write is _write_excel:
            if layout.content.suffix == suffix and layout.content.start(len(ZIP)) == ZIP:
                return add_columns(path, layout, _excel_columns(added), rows=[*added.index])
            lost = f"{self.path} lacks the formats, formulas and other sheets of the input"
            remedy = "to keep them, input and output must both be .xlsx, or both .xlsm"
            emit(WarningMessage(lost, remedy=remedy))
        if source is None or write is not WRITERS.get(source.path.suffix.lower()):
            written = FileFormat(written.kind, has_header=written.has_header)
        if suffix in DELIMITERS:
            written = replace(written, delimiter=DELIMITERS[suffix], quote='"')
        return write(path, frame.join(added), written)


def _with_comma(value: float) -> str:
    return str(rounded(value)).replace(".", ",")


def _has_commas(frame: pandas.DataFrame) -> bool:
    """Return whether the decimals of a column have a comma."""
    columns = ({*values.head(SAMPLE_ROWS)} - {""} for _, values in frame.items())
    return any(map(has_decimal_commas, columns))


def _as_cells(values: pandas.Series) -> pandas.Series:
    """Return values for the cells of a file: lists and similar values become JSON."""
    return pandas.Series(map(_as_cell, list_of(values)), index=values.index, dtype=object)


def _as_cell(value: Any) -> Any:
    is_plain = type(value) in PLAIN
    return value if is_plain else as_json(value).strip('"')


def _write_delimited(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    cells = frame.apply(_as_cells)
    cells = cells.where(cells.notna(), None).itertuples(index=False, name=None)
    rows = chain([frame.columns] * written.has_header, cells)
    _write_text(path, (_as_line(row, written) + written.line_end for row in rows), written)


def _as_line(cells: Iterable[Any], written: FileFormat, *, quotes_all: bool = False) -> str:
    line = io.StringIO()
    writer = csv.writer(
        line,
        delimiter=written.delimiter,
        quotechar=written.quote or '"',
        quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL,
    )
    writer.writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def _lines_with(file: Delimited, added: pandas.DataFrame) -> Iterator[str]:
    """Yield the lines of a file, with more cells at the end of each row."""
    with file.text.open() as opened:
        lines = opened.readlines()
    written, (starts, rows) = file.format, zip(*file.values(), strict=True)
    yield from lines[: starts[0] - 1]
    texts = [
        "".join(lines[start - 1 : end - 1]) for start, end in pairwise([*starts, len(lines) + 1])
    ]
    are_quoted = bool(written.quote) and texts[0].rstrip("\r\n").endswith(written.quote)
    more = chain([added.columns] * written.has_header, added.itertuples(index=False, name=None))
    for text, row, cells in zip(texts, rows, more, strict=True):
        line, end, _ = ROW_END.split(text, maxsplit=1)
        if line.endswith(written.delimiter):  # there may be more blank cells than columns
            line = _as_line(row, written)
        yield f"{line}{written.delimiter}{_as_line(cells, written, quotes_all=are_quoted)}{end}"


def _write_text(path: Path, lines: Iterable[str], written: FileFormat) -> None:
    text = "".join(lines)
    try:
        content = text.encode(written.encoding)
    except UnicodeEncodeError:  # a class name has characters that the encoding lacks
        content = text.encode("utf-8-sig")
    path.write_bytes(content)


def _json_rows(frame: pandas.DataFrame) -> Iterator[str]:
    columns = [list_of(values) for _, values in frame.items()]
    rows = (dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True))
    return map(as_json, rows)


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
    if len(frame) >= EXCEL_ROWS:
        rows = f"an Excel sheet can't have {len(frame):,} rows and a header"
        raise DataError(rows, remedy="write a .csv or .parquet file")
    cells = pandas.DataFrame(_excel_columns(frame), dtype=object)
    try:
        with path.open("wb") as file, pandas.ExcelWriter(file, engine="openpyxl") as writer:
            cells.to_excel(writer, sheet_name="predictions", header=written.has_header, index=False)
            for cell in chain.from_iterable(writer.sheets["predictions"].iter_rows()):
                if isinstance(cell.value, str):
                    cell.data_type = "s"  # not a formula or an error, such as =1 or #N/A
    except ImportError as error:
        remedy = "pip install openpyxl, or write a .csv file"
        raise UsageError("writing .xlsx needs the package openpyxl", remedy=remedy) from error


def _excel_columns(frame: pandas.DataFrame) -> dict[str, list[Any]]:
    """Return the cells of a sheet by column; long texts are cut, with a warning."""
    columns = {
        escape_characters(name): list(map(_as_excel, list_of(values)))
        for name, values in frame.items()
    }
    if count := sum(map(_is_long, chain(*columns.values()))):
        message = f"Excel cells hold {EXCEL_CHARACTERS:,} characters: {count:,} texts are cut"
        emit(WarningMessage(message, remedy="write a .csv or .parquet file to keep them whole"))
    return {
        name: [cell[:EXCEL_CHARACTERS] if _is_long(cell) else cell for cell in cells]
        for name, cells in columns.items()
    }


def _is_long(cell: Any) -> bool:
    return isinstance(cell, str) and len(cell) > EXCEL_CHARACTERS


def _as_excel(value: Any) -> Any:
    is_date = hasattr(value, "isoformat") and getattr(value, "tzinfo", None) is None
    cell = value if is_date else _as_cell(value)
    if isinstance(cell, int) and len(str(abs(cell))) > EXCEL_DIGITS:  # Excel would round it
        cell = str(cell)
    return escape_characters(cell) if isinstance(cell, str) else cell


Write = Callable[[Path, pandas.DataFrame, FileFormat], None]
WRITERS: dict[str, Write] = {
    **dict.fromkeys(DELIMITERS, _write_delimited),
    **dict.fromkeys((".jsonl", ".ndjson"), _write_json_lines),
    ".json": _write_json,
    ".parquet": _write_parquet,
    **dict.fromkeys((".xlsx", ".xlsm"), _write_excel),
}


def as_json(value: Any) -> str:
    """Return JSON on one line: dates and similar values become text, NaN and infinity null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(value, default=str)
        return as_json(json.loads(text, parse_constant=lambda _name: None))


def _flatten(result: Mapping[str, Any], show: Callable[[float], Any]) -> dict[str, Any]:
    """Return texts, and numbers as ``show`` returns them, by column."""
    row: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            row |= _flatten({f"probability_{label}": value[label] for label in value}, show)
        elif isinstance(value, list):
            row[name] = joined(value, show)
        else:
            row[name] = show(value) if isinstance(value, float) else value
    return row


def joined(values: Sequence[Any], show: Callable[[float], Any] = "{:.3f}".format) -> str:
    """Return labels, or their probabilities, joined by |; as JSON if a label has a |."""
    cells = [str(show(value) if isinstance(value, float) else value) for value in values]
    return as_json(cells) if "|" in "".join(cells) else "|".join(cells)


def rounded(value: float) -> float:
    """Return a number with six significant digits; models in fp32 have seven at most."""
    return float(f"{value:.6g}")
