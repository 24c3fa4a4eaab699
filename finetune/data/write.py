"""Writes tables: delimited text, JSON, Parquet and workbooks."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pandas
import pyarrow
from pyarrow import parquet

from finetune.data.delimited import FileFormat
from finetune.data.values import arrow_of, list_of
from finetune.errors import DataError, UsageError
from finetune.events import WarningMessage, emit

EXCEL_ROWS, EXCEL_CHARACTERS, EXCEL_DIGITS = 1_048_576, 32_767, 15
PLAIN = {str, int, float, bool, type(None)}
# Characters that XML forbids, carriage returns, and text that looks like an escaped character.
ESCAPED = re.compile("[\0-\x08\x0b-\x1f\ud800-\udfff\ufffe\uffff]|_(?=x[0-9A-Fa-f]{4}_)")


def _as_cells(values: pandas.Series) -> pandas.Series:
    """Convert values for the cells of a file: lists and similar values become JSON."""
    return pandas.Series(map(_as_cell, list_of(values)), index=values.index, dtype=object)


def _as_cell(value: Any) -> Any:
    is_plain = type(value) in PLAIN
    return value if is_plain else as_json(value).strip('"')


def write_delimited(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    """Write a header, if the format has one, and one row per line."""
    cells = frame.apply(_as_cells)
    cells = cells.where(cells.notna(), None).itertuples(index=False, name=None)
    rows = chain([frame.columns] * written.has_header, cells)
    write_text(path, (as_line(row, written) + written.line_end for row in rows), written)


def as_line(cells: Iterable[Any], written: FileFormat, *, quotes_all: bool = False) -> str:
    """Format a row as delimited text, without a line ending."""
    line = io.StringIO()
    writer = csv.writer(
        line,
        delimiter=written.delimiter,
        quotechar=written.quote or '"',
        quoting=csv.QUOTE_ALL if quotes_all else csv.QUOTE_MINIMAL,
    )
    writer.writerow(cells)
    return line.getvalue().removesuffix("\r\n")


def write_text(path: Path, lines: Iterable[str], written: FileFormat) -> None:
    """Write lines in the encoding of the format, or in UTF-8 if it can't encode a character."""
    text = "".join(lines)
    try:
        content = text.encode(written.encoding)
    except UnicodeEncodeError:  # the encoding lacks characters of a class name
        content = text.encode("utf-8-sig")
    path.write_bytes(content)


def _json_rows(frame: pandas.DataFrame) -> Iterator[str]:
    columns = [list_of(values) for _, values in frame.items()]
    rows = (dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True))
    return map(as_json, rows)


def write_json_lines(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    """Write one object per line."""
    write_text(path, (f"{row}{written.line_end}" for row in _json_rows(frame)), written)


def write_json(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    """Write a list of objects."""
    text = "[\n" + ",\n".join(_json_rows(frame)) + "\n]\n"
    path.write_text(text, encoding=written.encoding)


def write_parquet(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    """Write the columns with their types. Mixed types become text."""
    table = pyarrow.table({name: _as_arrow(values) for name, values in frame.items()})
    content = pyarrow.BufferOutputStream()  # Arrow prints a traceback if a disk is full
    parquet.write_table(table.replace_schema_metadata(written.metadata), content)
    path.write_bytes(content.getvalue())


def _as_arrow(values: pandas.Series) -> Any:
    column = arrow_of(values)
    if isinstance(column, list) and all(value is None for value in column):
        return pyarrow.array(column, "string")
    try:
        return pyarrow.array(column) if isinstance(column, list) else column
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):
        return pyarrow.array(_as_cells(values).map(str, na_action="ignore"), "string")


def write_excel(path: Path, frame: pandas.DataFrame, written: FileFormat) -> None:
    """Write a workbook with one sheet."""
    if len(frame) >= EXCEL_ROWS:
        rows = f"{len(frame):,} rows and a header don't fit into an Excel sheet"
        raise DataError(rows, remedy="write a .csv or .parquet file")
    cells = pandas.DataFrame(excel_columns(frame), dtype=object)
    try:
        with path.open("wb") as file, pandas.ExcelWriter(file, engine="openpyxl") as writer:
            cells.to_excel(writer, sheet_name="predictions", header=written.has_header, index=False)
            for cell in chain.from_iterable(writer.sheets["predictions"].iter_rows()):
                if isinstance(cell.value, str):
                    cell.data_type = "s"  # not a formula or an error, such as =1 or #N/A
    except ImportError as error:
        remedy = "pip install openpyxl, or write a .csv file"
        raise UsageError("writing .xlsx needs openpyxl", remedy=remedy) from error


def excel_columns(frame: pandas.DataFrame) -> dict[str, list[Any]]:
    """Return the cells of a sheet by column. Truncate long texts, with a warning."""
    columns = {
        escape_characters(name): list(map(_as_excel, list_of(values)))
        for name, values in frame.items()
    }
    if count := sum(map(_is_long, chain(*columns.values()))):
        message = f"Excel cells hold {EXCEL_CHARACTERS:,} characters: {count:,} texts are truncated"
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


def as_json(value: Any) -> str:
    """Format a value as JSON on one line. Dates become text, NaN and infinity null."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(value, default=str)
        return as_json(json.loads(text, parse_constant=lambda _name: None))


def rounded(value: float) -> float:
    """Round a number to six significant digits. fp32 models have at most seven."""
    return float(f"{value:.6g}")


def escape_characters(text: str) -> str:
    """Escape text for cells, where ``_x0007_`` is one character."""
    return ESCAPED.sub(lambda found: f"_x{ord(found[0]):04X}_", text)
