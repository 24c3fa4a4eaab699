"""Workbooks to which predictions are added."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import openpyxl
import pytest
from data_files import add_predictions, messages, write_workbook, write_zip
from openpyxl.chart import BarChart, Reference
from openpyxl.comments import Comment
from openpyxl.formatting.rule import ColorScaleRule
from openpyxl.styles import Font, PatternFill
from openpyxl.worksheet.datavalidation import DataValidation
from openpyxl.worksheet.table import Table
from openpyxl.worksheet.worksheet import Worksheet

from finetune.config.schema import DataConfig
from finetune.data.read import read_source
from finetune.errors import UsageError
from finetune.evaluation.prediction_file import PredictionFile

SHEET = "xl/worksheets/sheet1.xml"
LABEL = {"label": "=A&B", "probability": 0.98765432}
ROWS = [["ID", "Text", "Price"], [7, "The screen is broken", 1.5], [8, "Where is it?", 2]]
Change = Callable[[Worksheet], object]


def write_book(path: Path, change: Change = lambda sheet: None, rows: Any = ROWS) -> Path:
    write_workbook(path.with_suffix(".xlsx"), {"Tickets": rows, "It's & co": rows}).rename(path)
    book = openpyxl.load_workbook(path)
    change(book["Tickets"])
    book.save(path)
    return path


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> Path:
    files = parts(path)
    with ZipFile(path, "w") as book:
        for name, content in files.items():
            book.writestr(name, change(content) if name == SHEET else content)
    return path


def parts(path: Path) -> dict[str, bytes]:
    with ZipFile(path) as book:
        return {name: book.read(name) for name in book.namelist()}


def cells(path: Path, sheet: str = "Tickets") -> list[tuple[Any, ...]]:
    return [*openpyxl.load_workbook(path)[sheet].values]


def hide_unused(sheet: Worksheet) -> None:
    columns = sheet.column_dimensions["C"]
    columns.min, columns.max, columns.hidden = 3, 16_384, True


def style(sheet: Worksheet) -> None:
    sheet["C1"].font, sheet["D2"].fill = Font(bold=True), PatternFill("solid", fgColor="FFFF00")
    sheet["Z3"].fill = PatternFill("solid", fgColor="FFFF00")
    sheet["A2"].number_format, sheet.freeze_panes = "0000", "B2"
    sheet.column_dimensions["B"].width = 50
    sheet.row_dimensions[2].hidden = True


def annotate(sheet: Worksheet) -> None:
    choices = DataValidation(type="list", formula1="'It''s & co'!$A$1:$A$3")
    choices.add("A2:A9")
    sheet.add_data_validation(choices)
    sheet.conditional_formatting.add("C2:C3", ColorScaleRule("min", None, "FF0000", "max"))
    sheet["B2"].comment = Comment("asked again", "me")
    chart = BarChart()
    chart.add_data(Reference(sheet, min_col=3, min_row=1, max_row=3))
    sheet.add_chart(chart, "K3")


@pytest.mark.parametrize("change", [style, annotate, hide_unused])
def test_workbook_copy_changes_only_the_new_cells(change: Change, tmp_path: Path) -> None:
    source = write_book(tmp_path / "a.xlsx", change)
    output = add_predictions(source, tmp_path / "b.xlsx", LABEL, table="Tickets")
    assert [row[:5] for row in cells(output)] == [
        (*ROWS[0], "label", "probability"),
        *((*row, "=A&B", 0.987654) for row in ROWS[1:]),
    ]
    before, after = parts(source), parts(output)
    assert {name for name in before if before[name] != after[name]} == {SHEET}
    added = rb'<c r="[DE]\d"[^>]*?(/>|>.*?</c>)|<dimension[^>]*>|<cols>.*</cols>'
    assert re.sub(added, b"", after[SHEET]) == re.sub(added, b"", before[SHEET])
    table = read_source(output, DataConfig(table="Tickets")).frame
    assert table["label"].tolist() == ["=A&B"] * 2


def test_new_cells_are_formatted_like_their_neighbors_and_visible(tmp_path: Path) -> None:
    source = write_book(tmp_path / "a.xlsx", lambda sheet: (style(sheet), hide_unused(sheet)))
    output = add_predictions(source, tmp_path / "b.xlsx", LABEL, table="Tickets")
    sheet = openpyxl.load_workbook(output)["Tickets"]
    assert sheet["D1"].font.b
    assert [sheet[name].fill.fgColor.rgb[2:] for name in ("D2", "Z3")] == ["FFFF00"] * 2
    columns = re.findall(rb"<col [^>]*>", parts(output)[SHEET])
    shown = [re.findall(rb'min="(\d+)" max="(\d+)"', tag)[0] for tag in columns]
    assert shown == [(b"2", b"2"), (b"3", b"3"), (b"4", b"5"), (b"6", b"16384")]
    assert [b"hidden" in tag for tag in columns] == [False, True, False, True]


def filter_rows(sheet: Worksheet) -> None:
    sheet.auto_filter.ref = "A1:C3"


def format_as_table(sheet: Worksheet) -> None:
    sheet["C1"].value = "Label"  # a table can't have a second column with this name
    sheet.add_table(Table(displayName="Tickets", ref="A1:C3"))


@pytest.mark.parametrize("change", [filter_rows, format_as_table])
@pytest.mark.parametrize("name", ["Tickets", "It's & co"])
def test_tables_and_filters_include_the_new_columns(
    change: Change, name: str, tmp_path: Path
) -> None:
    source = write_workbook(tmp_path / "a.xlsx", {"Tickets": ROWS, "It's & co": ROWS})
    book = openpyxl.load_workbook(source)
    change(book[name])
    book.save(source)
    add_predictions(source, tmp_path / "b.xlsx", LABEL, table=name)
    sheet = openpyxl.load_workbook(tmp_path / "b.xlsx")[name]
    if change is filter_rows:
        assert sheet.auto_filter.ref == "A1:E3"
        assert b"!$A$1:$E$3<" in parts(tmp_path / "b.xlsx")["xl/workbook.xml"]
    else:
        table = sheet.tables["Tickets"]
        assert (table.ref, table.autoFilter.ref) == ("A1:E3", "A1:E3")
        titles = [cell.value for cell in sheet[1]]
        assert titles == ["ID", "Text", "Label", "predicted_label", "probability"]
        assert table.column_names == titles


@pytest.mark.parametrize(
    ("rows", "change", "first", "expected"),
    [
        # A title and blank rows, and merged cells.
        ([["Tickets of May"], [], *ROWS[:2], [], ROWS[2]], None, "D3", [3, 4, 6]),
        (ROWS, lambda sheet: [sheet.merge_cells(f"C{n}:D{n}") for n in (2, 3)], "E1", [1, 2, 3]),
        (ROWS, lambda sheet: sheet.merge_cells("A2:A3"), "D1", [1, 2, 3]),
        ([["A wide title"], *ROWS], lambda sheet: sheet.merge_cells("A1:H1"), "D2", [2, 3, 4]),
        ([[f"{row[0]}-", row[1]] for row in ROWS], None, "C1", [1, 2, 3]),
        ([[None, None, *row] for row in ROWS], None, "F1", [1, 2, 3]),
        ([[*row, *[1] * 22] for row in ROWS[1:]], None, "Z1", [1, 2]),
    ],
)
def test_predictions_are_written_next_to_their_texts(
    rows: Any, change: Change | None, first: str, expected: list[int], tmp_path: Path
) -> None:
    source = write_workbook(tmp_path / "a.xlsx", {"Tickets": rows})
    if change:
        book = openpyxl.load_workbook(source)
        change(book["Tickets"])
        book.save(source)
    output = add_predictions(source, tmp_path / "b.xlsx", LABEL)
    sheet = openpyxl.load_workbook(output)["Tickets"]
    column = sheet[first].column
    filled = [row for row in range(1, 9) if sheet.cell(row, column).value is not None]
    assert filled == expected
    assert sheet.cell(expected[-1], column).value == "=A&B"


def with_prefix(sheet: bytes) -> bytes:
    return re.sub(rb"<(/?)(\w)", rb"<\1x:\2", sheet).replace(b"xmlns=", b"xmlns:x=")


@pytest.mark.parametrize(
    "change",
    [
        with_prefix,  # as .NET does
        lambda sheet: re.sub(rb' r="\w+"', b"", sheet),
        lambda sheet: sheet.replace(b"<row ", b'<row spans="1:3" '),
    ],
)
def test_sheets_written_by_other_programs_are_supported(
    change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    source = rewrite(write_book(tmp_path / "a.xlsx"), change)
    output = add_predictions(source, tmp_path / "b.xlsx", LABEL, table="Tickets")
    assert [row[3:] for row in cells(output)][1:] == [("=A&B", 0.987654)] * 2
    assert b"spans" not in parts(output)[SHEET]


def test_formulas_and_rich_text_are_kept(tmp_path: Path) -> None:
    formula = b'<c r="C2"><f>ROW()/2</f><v>1</v></c>'
    rich = (
        b'<c r="B2" t="inlineStr"><is><r><rPr><b/></rPr><t>Help</t></r><r><t>less</t></r></is></c>'
    )

    def change(sheet: bytes) -> bytes:
        sheet = re.sub(rb'<c r="C2".*?</c>', formula, sheet)
        return re.sub(rb'<c r="B2".*?</c>', rich, sheet)

    source = rewrite(write_book(tmp_path / "a.xlsx"), change)
    output = add_predictions(source, tmp_path / "b.xlsx", LABEL, table="Tickets")
    assert rich + formula in parts(output)[SHEET]
    frame = read_source(output, DataConfig(table="Tickets")).frame
    assert frame.iloc[0].tolist() == [7, "Helpless", 1, "=A&B", 0.987654]


def test_macro_workbook_is_copied_only_to_a_macro_workbook(tmp_path: Path) -> None:
    source = write_book(tmp_path / "a.xlsm")
    output = add_predictions(source, tmp_path / "b.xlsm", LABEL, table="Tickets")
    assert cells(output)[1][3:] == ("=A&B", 0.987654)
    with pytest.raises(UsageError, match="unsupported extension"):
        PredictionFile(tmp_path / "c.xlsm", source=tmp_path / "a.xlsx")


def test_new_workbook_warns_about_lost_formats_and_sheets(tmp_path: Path) -> None:
    source = write_book(tmp_path / "a.xlsm")
    with messages() as said:
        output = add_predictions(source, tmp_path / "b.xlsx", LABEL, table="Tickets")
    assert "b.xlsx lacks the formats, formulas and other sheets of the input" in said[-1]
    assert cells(output, "predictions")[1] == (*ROWS[1], "=A&B", 0.987654)


def test_workbook_in_a_zip_file_is_copied(tmp_path: Path) -> None:
    book = write_workbook(tmp_path / "a.xlsx", {"Tickets": ROWS})
    source = write_zip(tmp_path / "data.zip", {"a.xlsx": book.read_bytes()})
    with messages() as said:
        output = add_predictions(source, tmp_path / "b.xlsx", LABEL)
    assert cells(output)[1] == (*ROWS[1], "=A&B", 0.987654)
    assert "lacks" not in "".join(said)


@pytest.mark.parametrize(
    "text", ["bell \a", "a\rb", "a\r\nb", "_x0041_", "#N/A", "=1+1", "+1", "a\tb\n", "TRUE", "🙂"]
)
def test_texts_survive_a_workbook_round_trip(text: str, tmp_path: Path) -> None:
    """In new workbooks and in copies."""
    (tmp_path / "a.csv").write_text("ID,Text\n1,Hello\n")
    new = add_predictions(tmp_path / "a.csv", tmp_path / "a.xlsx", {"label": text})
    copy = add_predictions(new, tmp_path / "b.xlsx", {"note": text})
    frame = read_source(copy, DataConfig()).frame
    assert frame.iloc[0].tolist()[:2] == ["1", "Hello"]
    assert frame.iloc[0].tolist()[2:] == [text, text]
