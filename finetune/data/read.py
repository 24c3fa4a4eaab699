"""Files become tables: as they are (``SourceTable``), or with every value as text (``RawTable``).

JSON, Parquet, spreadsheets and fastText are read here, delimited text in delimited.py.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pandas
import pyarrow
import pyarrow.compute as pc
from datasets import ClassLabel, Features
from numpy.typing import NDArray
from pyarrow import json as arrow_json
from pyarrow import parquet, types
from python_calamine import CalamineError, CalamineWorkbook, SheetVisibleEnum

from finetune.config.schema import DataConfig
from finetune.data import delimited, labeling_tools
from finetune.data.encoding import TextFile, find_text
from finetune.data.packed import (
    PACKED_SUFFIXES,
    START_BYTES,
    ZIP,
    Content,
    choose_member,
    is_workbook,
    reject_foreign,
    unpack,
)
from finetune.errors import DataNotFoundError, DataUnreadableError
from finetune.events import Info, emit
from finetune.tasks.labels import map_lists, map_values

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".xlsx", ".xls", ".xlsb", ".ods", ".ft")
TABLE_SUFFIXES = (*SUFFIXES, ".ndjson", *PACKED_SUFFIXES, ".zip")
# Rows that are Python objects at a time, and bytes that Arrow reads at once.
STREAM_ROWS, BLOCK_BYTES = 1_024, 2**24
# JSON writes a character beyond 16 bits as two escapes; this is the first.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Arrow reads integers beyond 64 bits as floats, which lose digits.
MAX_EXACT = 2.0**53
FASTTEXT_LABEL = re.compile(r"(?<!\S)__label__(\S+?),?(?:\s+|$)", re.IGNORECASE)
FORMULA_WITHOUT_VALUE = re.compile(rb"<f\b[^>]*(/>|>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>")
SHAPES = 'write a list of objects, such as [{"text": "Good.", "label": "praise"}]'
OBJECT = 'write one object per line, such as {"text": "Good.", "label": "praise"}'
SAVE_AGAIN = "save it again, or save the sheet as .csv"
WITH_MEMBERS = ("excel", "json")


@dataclass(frozen=True)
class FileFormat:
    """The format of a file, so that another file can be written in the same format.

    Args:
        kind: ``csv`` (of any delimiter), ``jsonl``, ``json``, ``parquet``, ``excel`` or
            ``fasttext``.
        encoding: As Python names it; ``utf-8-sig`` and ``utf-16`` begin with a byte-order mark.
        metadata: Schema metadata of a Parquet file, with the class names.
        names: Column names, some of which may be empty.
    """

    kind: str
    delimiter: str = ","
    quote: str = '"'
    encoding: str = "utf-8"
    has_header: bool = True
    line_end: str = "\n"
    metadata: Mapping[bytes, bytes] | None = None
    names: Sequence[str] = field(default=(), compare=False)


@dataclass(frozen=True)
class SourceTable:
    """A table as stored in its file: all rows and columns, in their order.

    Args:
        frame: Columns have Arrow types, or Python objects if they come from Excel or mixed JSON.
        place: Returns the place of a row, counted from 0: ``line 7 of reviews.csv``.
        class_names: The class names per column, if the file has them.
    """

    path: Path
    frame: pandas.DataFrame
    format: FileFormat
    place: Callable[[int], str]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows in pieces, with missing values as ``None``."""
        for start in range(0, len(self.frame), STREAM_ROWS):
            piece = self.frame.iloc[start : start + STREAM_ROWS]
            columns = (arrow_of(series) for _, series in piece.items())
            values = [
                column if isinstance(column, list) else column.to_pylist() for column in columns
            ]
            yield [dict(zip(piece.columns, row, strict=True)) for row in zip(*values, strict=True)]


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, every value as text, before their meaning is known.

    Args:
        columns: Empty text where a value is missing; lists are JSON.
        place: Returns the place of a row, counted from 0: ``line 7 of reviews.csv``.
        numbers: The row numbers in the file, from 0: [rows].
        class_names: The class names per column, if the file has them.
    """

    path: Path
    columns: pyarrow.Table
    place: Callable[[int], str]
    numbers: NDArray[np.int64]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows for which a boolean column is true."""
        mask = is_kept.to_numpy()
        columns = self.columns if mask.all() else self.columns.filter(is_kept)
        return replace(self, columns=columns, numbers=self.numbers[mask])

    def first(self, is_wanted: pyarrow.ChunkedArray) -> str:
        """Return the place of the first row for which a boolean column is true."""
        return self.place(int(self.numbers[pc.index(is_wanted, True).as_py()]))


def join_tables(tables: Sequence[RawTable]) -> RawTable:
    """Return the rows of several files as one table, with their common columns."""
    if len(tables) == 1:
        return tables[0]
    names = [set(table.columns.column_names) for table in tables]
    shared = [
        name for name in tables[0].columns.column_names if all(name in columns for columns in names)
    ]
    starts = np.cumsum([0, *(len(table.columns) for table in tables)])

    def place(row: int) -> str:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return tables[number].place(int(tables[number].numbers[row - starts[number]]))

    columns = pyarrow.concat_tables(table.columns.select(shared) for table in tables)
    return replace(tables[0], columns=columns, place=place, numbers=np.arange(len(columns)))


def read_file(path: Path, options: DataConfig) -> RawTable:
    """Read the table of a file, compressed or not, as text."""
    source = read_source(path, options, readable_only=True)
    if not len(source.frame.columns) and not len(source.frame):
        raise DataUnreadableError(f"{source.path} has no rows", remedy="add one row per text")
    frame = source.frame
    if survey_rows := delimited.count_survey_rows(frame.head(2).values.tolist()):
        emit(Info(f"the questions and ids below the header of {source.path} are left out"))
        frame = frame.iloc[survey_rows:]
    if source.format.kind in ("csv", "json", "jsonl"):
        frame = labeling_tools.convert(frame)
    columns, left_out = {}, []
    for name, values in frame.items():
        if (texts := as_texts(values)) is None:
            left_out.append(name)
        else:
            columns[name] = texts
    _report_left_out(left_out, path=source.path)
    table, numbers = pyarrow.table(columns), frame.index.to_numpy(np.int64)
    for name in source.class_names.keys() & columns.keys():
        named = map_values(table[name], partial(_name_classes, names=source.class_names[name]))
        table = table.set_column(table.column_names.index(name), name, named)
    if source.format.kind in ("csv", "excel") and delimited.ends_with_total(table):
        emit(Info(f"the last row of {source.path} is a total and is left out"))
        table, numbers = table.slice(0, len(table) - 1), numbers[:-1]
    return RawTable(source.path, table, source.place, numbers, source.class_names)


def read_source(path: Path, options: DataConfig, *, readable_only: bool = False) -> SourceTable:
    """Read the table of a file, compressed or not, with its own types.

    Args:
        readable_only: Leave out columns of a Parquet file that can't be texts or labels.
    """
    content = unpack(path, TABLE_SUFFIXES, options.table)
    kind = _find_kind(content)
    if options.table and content.path == path and kind not in WITH_MEMBERS:
        raise DataNotFoundError(
            f"{path} has one table only", remedy=f"leave out --table {options.table}"
        )
    if kind == "parquet":
        return _read_parquet(content, readable_only=readable_only)
    if kind == "excel":
        return _read_workbook(content, options)
    text = find_text(content, encoding=options.encoding)
    if kind == "csv":
        table, dialect = delimited.read_table(text, options)
        file_format = FileFormat(
            "csv", dialect.delimiter, dialect.quote, text.encoding, dialect.has_header,
            text.line_end(), names=dialect.header if dialect.has_header else (),
        )  # fmt: skip
        return SourceTable(content.path, frame_of(table), file_format, dialect.place)
    emit(Info(f"reading {text.path}: encoding {text.encoding}"))
    read = {"json": _read_json, "jsonl": _read_json_lines, "fasttext": _read_fasttext}[kind]
    frame, place = read(text, options)
    file_format = FileFormat(kind, encoding=text.encoding, line_end=text.line_end())
    return SourceTable(content.path, frame, file_format, place)


def _find_kind(content: Content) -> str:
    """Return the kind of a file from its content or, if that is ambiguous, its suffix."""
    start = content.start(START_BYTES)
    if not start:
        raise DataUnreadableError(
            f"{content.path} is empty", remedy="copy, download or export it again"
        )
    if start.startswith(b"PAR1"):
        return "parquet"
    if is_workbook(content):
        return "excel"
    reject_foreign(content)
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    is_named_json = content.suffix in (".json", ".jsonl", ".ndjson")
    is_json = is_named_json and start.startswith((b"[", b"{", b'"'))
    if is_json or re.match(rb'\{\s*"([^"\\]|\\.)*"\s*:|\[\s*[\[{]\s*"', start):
        return "jsonl" if _is_json_lines(content) else "json"
    if content.suffix == ".ft" or re.match(rb"(?i)(.*\s)?__label__\S", start):
        return "fasttext"
    return "csv"


def _is_json_lines(content: Content) -> bool:
    """Return whether a JSON file has one object per line."""
    with content.open() as file:
        filled = (line for line in map(bytes.strip, file) if line)
        first, second = next(filled, b""), next(filled, b"")
    is_object = first.removeprefix(b"\xef\xbb\xbf").startswith(b"{") and first.endswith(b"}")
    if second or not is_object or content.suffix == ".json":
        return bool(second) and is_object
    try:
        return isinstance(json.loads(first), dict) and content.suffix != ".json"
    except ValueError:
        return False


def frame_of(table: pyarrow.Table) -> pandas.DataFrame:
    """Return a frame with Arrow types, without copying the values of the table."""
    return table.to_pandas(types_mapper=pandas.ArrowDtype)


def arrow_of(values: pandas.Series) -> Any:
    """Return a column with an Arrow type as Arrow, a column of objects as a list."""
    if isinstance(values.dtype, pandas.ArrowDtype):
        return pyarrow.chunked_array(values.array.__arrow_array__())
    return [None if value is pandas.NA else value for value in values.tolist()]


# Lines of JSON.


def _read_json_lines(
    text: TextFile, options: DataConfig
) -> tuple[pandas.DataFrame, Callable[[int], str]]:
    def place(row: int) -> str:
        number, _ = next(islice(text.lines(), row, None))
        return f"line {number} of {text.path}"

    table = _read_by_arrow(text)
    if table is not None:
        return frame_of(table), place
    objects = [
        _parse_object(line, place=f"line {number} of {text.path}") for number, line in text.lines()
    ]
    return _frame_of_records(objects), place


def _read_by_arrow(text: TextFile, schema: pyarrow.Schema | None = None) -> pyarrow.Table | None:
    """Return the columns as Arrow reads them, or ``None`` if it can't read them exactly."""
    rows = sum(1 for _ in text.lines())
    try:
        table = arrow_json.read_json(
            text.open_for_arrow(),
            read_options=arrow_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema),
        )
    except pyarrow.ArrowException:
        return None
    times = [column.name for column in table.schema if types.is_timestamp(column.type)]
    if times and not schema:  # texts that look like a time
        return _read_by_arrow(text, pyarrow.schema([(name, "string") for name in times]))
    is_exact = (
        len(table) == rows  # no line has several objects
        and not any(re.search("struct|timestamp", str(column.type)) for column in table.schema)
        and all(
            (pc.max(pc.abs(column)).as_py() or 0) < MAX_EXACT
            for column in table.columns
            if types.is_floating(column.type)
        )
    )
    return table if is_exact else None


def _parse_object(line: str, *, place: str) -> dict[str, Any]:
    reason = ""
    try:
        value = _without_half_characters(json.loads(line), line)
        if isinstance(value, dict):
            return value
    except (RecursionError, ValueError) as error:
        reason = f", {error}"
    raise DataUnreadableError(f"{place} is not a JSON object{reason}: {line[:60]!r}", remedy=OBJECT)


def _without_half_characters(value: Any, source: str) -> Any:
    """Return a value of JSON without what it can write and nothing can store."""
    if not SURROGATE.search(source):
        return value
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-16", errors="surrogatepass")
    return json.loads(encoded.decode("utf-16", errors="replace"))


def _frame_of_records(records: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return objects as columns: of Arrow's types, or of objects if the values are of several."""
    names = dict.fromkeys(name for record in records for name in record)
    return _frame_of_values({name: [record.get(name) for record in records] for name in names})


def _frame_of_values(columns: Mapping[str, list[Any]]) -> pandas.DataFrame:
    series = {}
    for name, values in columns.items():
        kinds = {*map(type, values)} - {type(None)}
        is_plain = len(kinds) <= 1 and kinds <= {str, bool, int, float}
        try:
            arrow = pyarrow.array(values) if is_plain else None
        except (pyarrow.ArrowException, OverflowError):  # numbers of more than 64 bits
            arrow = None
        if arrow is None:
            series[name] = pandas.Series(values, dtype=object)
        else:
            series[name] = pandas.Series(arrow, dtype=pandas.ArrowDtype(arrow.type))
    return pandas.DataFrame(series)


# Documents of JSON.


def _read_json(
    text: TextFile, options: DataConfig
) -> tuple[pandas.DataFrame, Callable[[int], str]]:
    """Return the only table of a document, or the chosen one."""
    try:
        tables = dict(_find_tables(_parse_json("".join(text.pieces()))))
    except (ValueError, RecursionError) as error:
        raise DataUnreadableError(
            f"{text.path} can't be read: {' '.join(str(error).split())}",
            remedy="correct it there, or export it again",
        ) from error
    if not tables:
        raise DataUnreadableError(
            f"{text.path} holds no rows", remedy=f"{SHAPES}; a configuration is named by --config"
        )
    rows = tables[choose_member(list(tables), options.table, path=text.path)]

    def place(row: int) -> str:
        return f"row {row + 1} of {text.path}"

    if isinstance(rows[0], dict):
        return _frame_of_records(rows), place
    if len(set(map(len, rows))) > 1:
        raise DataUnreadableError(f"the arrays of {text.path} have several lengths", remedy=SHAPES)
    words = [[as_text(value) or "" for value in row] for row in rows]
    names, has_header = delimited.find_names(words, options, path=text.path)
    columns = zip(*rows[int(has_header) :], strict=True)
    return _frame_of_values(dict(zip(names, map(list, columns), strict=True))), place


def _parse_json(text: str) -> Any:
    """Return the value of JSON, or a list of several values, with or without commas between."""
    decoder, values, end = json.JSONDecoder(), [], 0
    text = text.strip().removeprefix("\ufeff")
    while end < len(text):
        value, end = decoder.raw_decode(text, end)
        values.append(value)
        while end < len(text) and text[end] in ", \t\r\n":
            end += 1
    return _without_half_characters(values[0] if len(values) == 1 else values, text)


def _find_tables(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield lists of objects, or of arrays, by the keys under which they are."""
    if isinstance(value, list):
        if value and {*map(type, value)} in ({dict}, {list}):
            yield name, value
        elif value and all(isinstance(text, str) for text in value):
            yield name, [{"text": text} for text in value]
    elif isinstance(value, dict) and value:
        if {"schema", "data"} <= value.keys():  # pandas' orient "table"
            value = {"data": value["data"]}
        if rows := _rows_of_object(value):
            yield name, rows
            return
        for key, inner in value.items():
            if isinstance(inner, list | dict):
                yield from _find_tables(inner, f"{name}.{key}" if name else key)


def _rows_of_object(value: dict[str, Any]) -> list[Any]:
    """Return the rows of an object that is a table by itself: pandas' orients, or label → texts."""
    inner = list(value.values())
    first, kinds = inner[0], {*map(type, inner)}
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):  # split
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    if kinds == {dict} and all(row.keys() == first.keys() for row in inner):
        if any(isinstance(cell, dict) for row in inner for cell in row.values()):
            return []
        is_named = delimited.are_known_names(value)
        if is_named:  # columns: {"text": {"0": ...}, "label": {"0": ...}}
            return [{name: cells[key] for name, cells in value.items()} for key in first]
        is_index = delimited.are_known_names(first) or len(inner) > len(first)
        return inner if is_index else []
    if kinds == {list}:
        is_plain = not any(isinstance(cell, dict | list) for values in inner for cell in values[:1])
        recurs = any(2 * len(set(map(str, values))) <= len(values) for values in inner)
        are_columns = len(value) > 1 and len(set(map(len, inner))) == 1
        if is_plain and are_columns and (recurs or delimited.are_known_names(value)):
            return [dict(zip(value, row, strict=True)) for row in zip(*inner, strict=True)]
        if all(isinstance(text, str) for values in inner for text in values):
            return [
                {"text": text, "label": label} for label, values in value.items() for text in values
            ]
        return []
    # A single row, such as a text to classify.
    is_row = delimited.are_known_names(value) and not kinds & {dict, list}
    return [value] if is_row else []


# Lines of fastText, where ``__label__good`` is a label.


def _read_fasttext(
    text: TextFile, options: DataConfig
) -> tuple[pandas.DataFrame, Callable[[int], str]]:
    numbers, lines = zip(*text.lines(), strict=True)
    labels = list(map(FASTTEXT_LABEL.findall, lines))
    has_several = any(len(names) > 1 for names in labels)
    columns = {
        "text": [FASTTEXT_LABEL.sub("", line).strip() for line in lines],
        "label": labels if has_several else list(map("".join, labels)),
    }
    return _frame_of_values(columns), lambda row: f"line {numbers[row]} of {text.path}"


# Parquet.


def _read_parquet(content: Content, *, readable_only: bool) -> SourceTable:
    """Return the columns; numbers of classes that have names stay numbers."""
    path = content.path
    emit(Info(f"reading {path}"))
    try:
        source: Any = path
        if content.unpacked is not None:
            source = pyarrow.BufferReader(content.unpacked)
        file = parquet.ParquetFile(source, memory_map=content.unpacked is None)
        schema = file.schema_arrow
        wanted = [
            column.name for column in schema if not readable_only or _is_readable(column.type)
        ]
        _report_left_out([column for column in schema.names if column not in wanted], path=path)
        table = file.read(columns=wanted)
        table.validate(full=True)  # texts may be other bytes than UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataUnreadableError(
            f"{path} is not Parquet: {str(error).splitlines()[0]}", remedy="export it again"
        ) from error
    if not file.metadata.num_rows:
        raise DataUnreadableError(f"{path} has no rows", remedy="export it again")
    names = delimited.complete_names(table.column_names, path=path)
    columns = dict(zip(names, map(_stored, table.columns), strict=True))
    file_format = FileFormat("parquet", metadata=schema.metadata)
    return SourceTable(
        path, frame_of(pyarrow.table(columns)), file_format,
        lambda row: f"row {row + 1} of {path}", class_names=_class_names(schema),
    )  # fmt: skip


def _class_names(schema: pyarrow.Schema) -> dict[str, list[str]]:
    """Return the class names that the library datasets stores in the schema."""
    try:
        features = Features.from_arrow_schema(schema)
    except Exception:  # metadata of another program
        return {}
    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def _name_classes(value: str, *, names: Sequence[str]) -> str:
    """Return the name of a class for its number, or the names in a list of numbers."""
    if value.startswith("["):
        named = [_name_classes(number, names=names) for number in json.loads(value)]
        return json.dumps(named, ensure_ascii=False)
    if not re.fullmatch(r"-?\d+", value):
        return value
    return names[int(value)] if 0 <= int(value) < len(names) else ""


# Workbooks.


def _read_workbook(content: Content, options: DataConfig) -> SourceTable:
    """Return the one sheet with rows that is not hidden, or the chosen one."""
    path = content.path
    emit(Info(f"reading {path}: a spreadsheet"))
    table = _read_sheet(content, options)
    rows = [[as_text(cell) or "" for cell in row] for row in table.head(1_000).values.tolist()]
    start = delimited.find_start(rows, options, is_grid=True)
    if start:
        emit(Info(f"the table of {path} begins in row {table.index[start] + 1}, below other lines"))
    names, has_header = delimited.find_names(rows[start:], options, path=path)
    body = table.iloc[start + int(has_header) :]
    if body.isna().all().any() and _has_unsaved_formulas(content):
        raise DataUnreadableError(
            f"{path} has formulas whose values were not saved",
            remedy="open it in Excel or LibreOffice and save it again, which computes the values",
        )
    columns = {
        name: [_plain_cell(cell) for cell in column.tolist()]
        for name, (_, column) in zip(names, body.items(), strict=True)
    }
    numbers = body.index.to_numpy() + 1
    frame = pandas.DataFrame({name: pandas.Series(v, dtype=object) for name, v in columns.items()})
    return SourceTable(
        path, frame, FileFormat("excel", has_header=has_header),
        lambda row: f"row {numbers[row]} of {path}",
    )  # fmt: skip


def _read_sheet(content: Content, options: DataConfig) -> pandas.DataFrame:
    """Return the cells of the sheet without empty rows and columns, merged ones filled down."""
    path = content.path
    try:
        with content.open() as file:
            book = CalamineWorkbook.from_filelike(file)
            hidden = {
                sheet.name
                for sheet in book.sheets_metadata
                if sheet.visible != SheetVisibleEnum.Visible and sheet.name != options.table
            }
            sheets = {name: book.get_sheet_by_name(name) for name in book.sheet_names}
            sheets = {name: sheet for name, sheet in sheets.items() if sheet.height}
            shown = [name for name in sheets if name not in hidden] or list(sheets)
            if not shown:
                raise DataUnreadableError(f"no sheet of {path} has rows", remedy=SAVE_AGAIN)
            sheet = sheets[choose_member(shown, options.table, path=path)]
            cells = sheet.to_python(skip_empty_area=False)
            merged = sheet.merged_cell_ranges or []
    except (CalamineError, OSError) as error:
        raise DataUnreadableError(
            f"{path} can't be read as a spreadsheet: {error}", remedy=SAVE_AGAIN
        ) from error
    if ignored := sorted(hidden & sheets.keys() - {sheet.name}):
        emit(Info(f"hidden sheets of {path} left out: {', '.join(ignored)}"))
    filled_down = 0
    # Such a cell is a title, or stands above a group of columns.
    wide = {top for (top, left), (_, right) in merged if right > left}
    for (top, left), (bottom, _) in merged:
        for row in range(top + 1, min(bottom + 1, len(cells))):
            cells[row][left] = cells[top][left]
            filled_down += 1
    if filled_down:
        emit(Info(f"{filled_down:,} merged cells of {path} have the value of their first row"))
    table = pandas.DataFrame(cells, dtype=object)
    table = table.mask(table.map(lambda cell: isinstance(cell, str) and not cell.strip()))
    table = table.dropna(how="all").dropna(how="all", axis="columns")
    if not len(table):
        raise DataUnreadableError(f"sheet {sheet.name!r} of {path} has no rows", remedy=SAVE_AGAIN)
    while table.index[0] in wide and len(table) > 1:
        table = table.iloc[1:]
    return table


def _plain_cell(cell: Any) -> Any:
    """Return a cell as it is typed: whole numbers without a decimal point, nothing as ``None``."""
    if isinstance(cell, float):
        return None if cell != cell else int(cell) if cell.is_integer() else cell
    return cell


def _has_unsaved_formulas(content: Content) -> bool:
    if not content.start(len(ZIP)).startswith(ZIP):
        return False
    with content.open() as file, ZipFile(file) as archive:
        sheets = [name for name in archive.namelist() if name.startswith("xl/worksheets/")]
        return any(FORMULA_WITHOUT_VALUE.search(archive.read(name)) for name in sheets)


# Values as text.


def as_texts(values: pandas.Series) -> pyarrow.ChunkedArray | None:
    """Return a column as text, or ``None`` if it holds other values than texts and numbers."""
    column = arrow_of(values)
    if isinstance(column, list):
        texts = pyarrow.array(map(as_text, column), "string")
        return None if texts.null_count else pyarrow.chunked_array([texts])
    return texts_of_column(column) if _is_readable(column.type) else None


def texts_of_column(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a readable column as text, each value as by ``as_text``, missing ones too."""
    column = plain(column)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_list(column.type) or types.is_large_list(column.type):
        values = pc.binary_join(map_lists(column, _as_json), ", ")
        column = pc.binary_join_element_wise("[", values, "]", "")
    elif not (types.is_string(column.type) or types.is_integer(column.type)):
        if types.is_float16(column.type):  # has no unique values
            column = column.cast("float64")
        column = map_values(column, as_text)
    column = column.cast("string")
    return pc.fill_null(column, "") if column.null_count else column


def _stored(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column without an extension of Arrow's types, which pandas may not know."""
    is_extended = isinstance(column.type, pyarrow.BaseExtensionType)
    return column.cast(column.type.storage_type) if is_extended else column


def plain(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column without Arrow's newer types, most of whose functions are missing."""
    column = _stored(column)
    kind = column.type
    if types.is_string_view(kind) or types.is_large_string(kind):
        return column.cast("string" if column.nbytes < 2**31 else "large_string")
    if _is_other_list(kind):  # Arrow's own cast of list views is wrong
        return pyarrow.chunked_array([column.to_pylist()], pyarrow.list_(kind.value_type))
    return column


def _is_other_list(kind: pyarrow.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (types.is_list_view, types.is_large_list_view, types.is_fixed_size_list)
    )


def _as_json(values: pyarrow.Array) -> pyarrow.Array:
    texts = pc.fill_null(values.cast("string"), "")
    return map_values(texts, partial(json.dumps, ensure_ascii=False))


def _is_readable(kind: pyarrow.DataType) -> bool:
    """Return whether a type may hold texts or labels, no vectors or pictures."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_list(kind) or types.is_large_list(kind) or _is_other_list(kind):
        inner = kind.value_type
        return _is_readable(inner) and not (types.is_floating(inner) or types.is_nested(inner))
    return not (
        types.is_nested(kind)
        or any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary))
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def as_text(value: Any) -> str | None:
    """Return a value as text, a list as JSON; None if it is not text or a number, such as bytes.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, None, b"x", ["x", 1], {"y": 1})]
    ['3.0', '3', '2.5', 'true', '', None, '["x", "1"]', None]
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str | int | None) for item in value):
        return json.dumps(list(map(as_text, value)), ensure_ascii=False)
    if isinstance(value, bytes | list | dict):
        return None
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _report_left_out(names: Iterable[str], *, path: Path) -> None:
    if listed := ", ".join(map(repr, names)):
        left_out = f"columns of {path} left out, since they hold neither text nor numbers"
        emit(Info(f"{left_out}: {listed}"))
