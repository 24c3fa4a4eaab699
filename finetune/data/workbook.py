"""Excel workbooks, read by openpyxl where it is installed."""

from collections.abc import Iterator
from typing import Any

from finetune.config.schema import DataConfig
from finetune.data.delimited import NumberedValues, name_values
from finetune.data.packed import ZIP, Content, choose_member
from finetune.data.reader import Reader, Row, as_text
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield those of the one sheet that has any, or of the chosen one.

    Formulas have the values that Excel has saved.
    """
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
            sheets = {sheet.title: _values_of(sheet) for sheet in book.worksheets}
    # What openpyxl raises on damaged files: of every kind.
    except Exception as error:
        raise DataUnreadable(
            f"{path} can't be read as an Excel workbook: {error}",
            remedy="save it again, or save the sheet as .csv",
        ) from error
    filled = {title: rows for title, rows in sheets.items() if rows}
    if not filled:
        raise DataUnreadable(f"no sheet of {path} has rows", remedy="save it again, with rows")
    numbered = filled[choose_member(list(filled), options.member, path=path)]
    return name_values(iter(numbered), options, path=path, emit=emit)


def _values_of(sheet: Any) -> list[NumberedValues]:
    """Return the rows that are not blank, all of one length."""
    from openpyxl.utils.escape import unescape

    rows = (
        # Excel writes the returns of a text as _x000D_.
        [unescape(value) if isinstance(value, str) else as_text(value) or "" for value in row]
        for row in sheet.iter_rows(values_only=True)
    )
    filled = [row for row in enumerate(rows, start=1) if any(map(str.strip, row[1]))]
    width = max((len(row) for _, row in filled), default=0)
    return [(number, row + [""] * (width - len(row))) for number, row in filled]


READER = Reader((".xlsx",), rows, unit="row", first_bytes=ZIP)
