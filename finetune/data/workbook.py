"""Excel workbooks, read by openpyxl where it is installed."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.delimited import name_columns
from finetune.data.packed import ZIP, Content
from finetune.data.reader import RawTable, Reader, Records, as_text, records_of
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info


def read(content: Content, options: DataConfig, emit: Emit) -> RawTable:
    """Read the one sheet that has any rows; formulas have the values that Excel has saved."""
    path = content.path
    emit(Info(f"reading {path}: an Excel workbook"))
    try:
        import openpyxl
    except ImportError as error:
        raise DataUnreadable(
            f"{path} is an Excel workbook, and openpyxl, which reads these, is not installed",
            remedy="pip install 'finetune-mps[excel]', or save the sheet as .csv",
        ) from error
    try:
        with content.open() as file:
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            sheets = {sheet.title: _rows_of(sheet) for sheet in book.worksheets}
    # What openpyxl raises on damaged files: of every kind.
    except Exception as error:
        raise DataUnreadable(
            f"{path} can't be read as an Excel workbook: {error}",
            remedy="save it again, or save the sheet as .csv",
        ) from error
    filled = {title: rows for title, rows in sheets.items() if rows}
    if len(filled) != 1:
        raise DataUnreadable(
            f"{path} has rows in {len(filled)} sheets: {', '.join(filled)}",
            remedy="save the sheet with the texts as a file of its own, such as .csv",
        )
    [rows] = filled.values()
    values = [pyarrow.array(column, "string") for column in zip_longest(*rows, fillvalue="")]
    table = pyarrow.table(values, names=list(map(str, range(len(values)))))
    columns = name_columns(table, options, path=path, emit=emit)[0]
    return RawTable(path, columns, lambda row: f"row {row + 1} of {path}")


def stream(content: Content, options: DataConfig, emit: Emit) -> Iterator[Records]:
    """Yield the rows of the sheet."""
    return records_of(read(content, options, emit).columns)


def _rows_of(sheet: Any) -> list[list[str]]:
    """Return the rows that are not blank."""
    from openpyxl.utils.escape import unescape

    rows = (
        # Excel writes the returns of a text as _x000D_.
        [unescape(value) if isinstance(value, str) else as_text(value) for value in row]
        for row in sheet.iter_rows(values_only=True)
    )
    return [row for row in rows if any(value.strip() for value in row)]


READER = Reader((".xlsx",), read, stream, first_bytes=ZIP)
