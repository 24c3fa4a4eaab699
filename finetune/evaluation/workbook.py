"""Adds columns to a sheet in a copy of a workbook, and keeps everything else as it is.

openpyxl would lose the stored values of formulas, lists of choices on other sheets, and shapes.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr
from zipfile import ZipFile

from finetune.data.read import Sheet
from finetune.errors import explained

BOOK = "xl/workbook.xml"
# Columns are counted from 0, and column 27 is AB.
LETTERS = ["".join(name) for size in (1, 2, 3) for name in product(ascii_uppercase, repeat=size)]
NUMBERS = {name: number for number, name in enumerate(LETTERS)}
# Size and spans are hints that new columns would make wrong. The format doesn't require them.
HINT = re.compile(r'<(?:\w+:)?dimension\b[^>]*/>|(<(?:\w+:)?row\b[^>]*?) spans="[^"]*"')
ROW = re.compile(r"<((?:\w+:)?)row\b([^>]*)(?<!/)>(.*?)(?=</(?:\w+:)?row>)", re.DOTALL)
CELL = re.compile(r"<(?:\w+:)?c\b(?:[^>]*/>|.*?</(?:\w+:)?c>)", re.DOTALL)
PLACE, STYLE = re.compile(r'[^>]* r="([A-Z]*)(\d+)"'), re.compile(r'[^>]*( s="\d+")')
MERGED = re.compile(r'<(?:\w+:)?mergeCell\b[^>]*:([A-Z]+)(\d+)"')
COLUMNS = re.compile(r'(<((?:\w+:)?)col\b[^>]* min=")(\d+)(" max=")(\d+)("[^>]*>)')
TABLE_COLUMN = re.compile(r'<((?:\w+:)?)tableColumn\b[^>]*? id="(\d+)"')
# Ranges that start in a row and end in a column. Excel and LibreOffice read different ones.
RANGE = r'(<(?:\w+:)?(?:table|autoFilter)\b[^>]* ref="[A-Z]+{row}:){end}(?=\d)'
FILTER = r"(_FilterDatabase\"[^>]*>'?{name}'?!\$[A-Z]+\${row}:\$){end}(?=\$)"


def add_columns(
    path: Path, sheet: Sheet, columns: Mapping[str, Sequence[Any]], *, rows: Sequence[int]
) -> None:
    """Write a copy of a workbook, with columns to the right of all others of a sheet.

    ``rows`` are the rows of their values, counted from 1. A table or filter that ends in the last
    column includes the new ones, because sorting must keep rows together.
    """
    cells = dict(zip(rows, zip(*columns.values(), strict=True), strict=True))
    if sheet.header is not None:
        cells = {sheet.header: tuple(columns), **cells}
    source = sheet.content
    with explained("archive", path=source.path), source.open() as file, ZipFile(file) as book:
        part = _find_part(book, sheet.name)
        content, width = _add_cells(book.read(part).decode(), cells, header=sheet.header)
        ends = {"row": min(cells), "end": LETTERS[width - 1]}
        new_end = rf"\g<1>{LETTERS[width + len(columns) - 1]}"
        name = re.escape(escape(sheet.name.replace("'", "''")))
        filters = re.sub(FILTER.format(name=name, **ends), new_end, book.read(BOOK).decode())
        spanned = re.compile(RANGE.format(**ends))
        changed = {BOOK: filters, part: spanned.sub(new_end, content)}
        for target in _targets(book, part).values():
            table = book.read(target).decode() if target.startswith("xl/tables/") else ""
            if spanned.search(table) and '"queryTable"' not in table:  # a query sets its columns
                changed[target] = _add_to_table(spanned.sub(new_end, table), columns)
        parts = [(one, changed.get(one.filename) or book.read(one)) for one in book.infolist()]
    with ZipFile(path, "w") as copy:
        for item, written in parts:
            copy.writestr(item, written)


def _find_part(book: ZipFile, name: str) -> str:
    """Return the file of a sheet."""
    elements = ElementTree.fromstring(book.read(BOOK)).iter()
    [sheet] = (e for e in elements if e.tag.endswith("}sheet") and e.get("name") == name)
    [identifier] = (value for key, value in sheet.items() if key.endswith("}id"))
    return _targets(book, BOOK)[identifier]


def _targets(book: ZipFile, part: str) -> dict[str, str]:
    """Return the files to which a file of a workbook refers, by their IDs."""
    folder, name = posixpath.split(part)
    references = f"{folder}/_rels/{name}.rels"
    if references not in book.namelist():
        return {}
    elements = ElementTree.fromstring(book.read(references))
    paths = {e.attrib["Id"]: posixpath.join("/", folder, e.attrib["Target"]) for e in elements}
    return {identifier: posixpath.normpath(path)[1:] for identifier, path in paths.items()}


def _add_cells(
    content: str, added: Mapping[int, Sequence[Any]], *, header: int | None
) -> tuple[str, int]:
    """Return a sheet with more cells in some rows, and the number of columns before them."""
    content, number, rows = HINT.sub(r"\1", content), 0, dict[int, Any]()
    for row in ROW.finditer(content):
        place = PLACE.match(row[2])
        number = int(place[2]) if place else number + 1
        rows[number] = row, _cells(row[3])
    filled = [n for _, cells in rows.values() for n, cell in cells.items() if cell[-2:] != "/>"]
    merged = [NUMBERS[end] for end, row in MERGED.findall(content) if int(row) >= min(added)]
    width = max(filled + merged) + 1
    pieces, end = list[str](), 0
    for number in sorted(added.keys() & rows.keys()):  # others are merged with rows above
        row, cells = rows[number]
        neighbor = cells.get(width - 1, "") if number == header else ""
        for column, value in enumerate(added[number], start=width):
            style = STYLE.match(cells.get(column, neighbor))
            start = f'<{row[1]}c r="{LETTERS[column]}{number}"{style[1] if style else ""}'
            cells[column] = _cell(value, start, prefix=row[1])
        pieces += [content[end : row.start(3)], *(cells[column] for column in sorted(cells))]
        end = row.end()
    content, last = "".join([*pieces, content[end:]]), width + len(added[min(added)])
    return COLUMNS.sub(lambda tag: _show(tag, width + 1, last), content), width


def _cells(row: str) -> dict[int, str]:
    """Return the cells of a row by their column."""
    cells, column = dict[int, str](), -1
    for cell in CELL.findall(row):
        place = PLACE.match(cell)
        column = NUMBERS[place[1]] if place else column + 1
        cells[column] = cell
    return cells


def _cell(value: Any, start: str, *, prefix: str) -> str:
    if value is None:
        return f"{start}/>"
    if isinstance(value, str):
        text = f'<{prefix}t xml:space="preserve">{escape(value)}</{prefix}t>'
        return f'{start} t="inlineStr"><{prefix}is>{text}</{prefix}is></{prefix}c>'
    kind = ' t="b"' if isinstance(value, bool) else ""
    return f"{start}{kind}><{prefix}v>{+value!r}</{prefix}v></{prefix}c>"


def _show(tag: re.Match[str], first: int, last: int) -> str:
    """Return the tags of hidden columns, of which those from ``first`` to ``last`` show."""
    low, high = int(tag[3]), int(tag[5])
    if ' hidden="' not in tag[0] or high < first or last < low:
        return tag[0]
    hidden = [
        f"{tag[1]}{start}{tag[4]}{end}{tag[6]}" if start <= end else ""
        for start, end in [(low, first - 1), (last + 1, high)]
    ]
    return f'<{tag[2]}col min="{max(low, first)}" max="{min(high, last)}"/>'.join(hidden)


def _add_to_table(table: str, names: Iterable[str]) -> str:
    """Return the file of a table with more columns."""
    columns = TABLE_COLUMN.findall(table)
    prefix, highest = columns[0][0], max(int(number) for _, number in columns)
    added = [
        f'<{prefix}tableColumn id="{number}" name={quoteattr(name)}/>'
        for number, name in enumerate(names, start=highest + 1)
    ]
    count, end = len(columns) + len(added), f"</{prefix}tableColumns>"
    table = re.sub(r'(?<=tableColumns count=")\d+', str(count), table)
    return table.replace(end, "".join([*added, end]))
