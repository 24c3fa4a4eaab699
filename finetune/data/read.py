"""Files become tables: as they are (``SourceTable``), or with every value as text (``RawTable``).

JSON, Parquet, spreadsheets and fastText are read here, delimited text in delimited.py.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
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
from finetune.data import delimited, labeling_tools, packed
from finetune.data.delimited import Delimited, FileFormat
from finetune.data.encoding import TextFile, find_text
from finetune.errors import DataNotFoundError, DataUnreadableError
from finetune.events import Info, emit
from finetune.tasks.labels import map_values

SUFFIXES = (
    *(".csv", ".tsv", ".jsonl", ".json", ".parquet", ".ft"),
    *(".xlsx", ".xlsm", ".xls", ".xlsb", ".ods"),
)
TABLE_SUFFIXES = (*SUFFIXES, ".ndjson", *packed.PACKED_SUFFIXES, ".zip")
# Rows converted to Python objects at a time, and bytes that Arrow reads per block.
STREAM_ROWS, BLOCK_BYTES = 1_024, 2**24
# JSON writes a character beyond 16 bits as two escapes. This is the first of them.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Arrow reads integers beyond 64 bits as floats, which lose digits.
MAX_EXACT = 2.0**53
FASTTEXT_LABEL = re.compile(r"(?<!\S)__label__(\S+?),?(?:\s+|$)", re.IGNORECASE)
FORMULA_WITHOUT_VALUE = re.compile(rb"<f\b[^>]*(/>|>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>")
SHAPES = 'write a list of objects, such as [{"text": "Good.", "label": "praise"}]'
SAVE_AGAIN = "save it again, or save the sheet as .csv"
UNSAVED = "formulas whose values were not saved; open it in Excel or LibreOffice and save it again"


class Sheet(NamedTuple):
    """The sheet of a spreadsheet with a table, and the row of its header, counted from 1."""

    content: packed.Content
    name: str
    header: int | None


@dataclass(frozen=True)
class SourceTable:
    """A table as stored in its file: all rows and columns, in their order.

    Args:
        frame: Columns have Arrow types, or Python objects if they come from Excel or mixed JSON.
            The index has the number of each row.
        unit: What the numbers count: ``line``, or ``row`` of a sheet or of other data, from 1.
        class_names: The class names per column, if the file has them.
        left_out: The content of columns that have neither text nor numbers, and maybe a remedy.
        layout: Where the rows are in the file, to add columns to a copy of it.
    """

    path: Path
    frame: pandas.DataFrame
    format: FileFormat
    unit: str
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    layout: Delimited | Sheet | None = None

    def texts(self) -> tuple[dict[str, pyarrow.ChunkedArray], dict[str, str]]:
        """Return the columns as text, and what columns hold that have neither text nor numbers."""
        columns, left_out = {}, {**self.left_out}
        for name in [name for name in self.frame if name not in left_out]:
            if (column := as_texts(self.frame[name])) is None:
                left_out[name] = _content_of(self.frame[name].dropna().iloc[0])
            else:
                columns[name] = column
        return columns, left_out

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows in pieces, with missing values as ``None``."""
        for start in range(0, len(self.frame), STREAM_ROWS):
            piece = self.frame.iloc[start : start + STREAM_ROWS]
            values = [list_of(series) for _, series in piece.items()]
            yield [dict(zip(piece.columns, row, strict=True)) for row in zip(*values, strict=True)]


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, every value as text, which is empty for missing ones; lists are JSON.

    ``numbers`` are the lines, or the rows of a sheet, from 1: [rows]. ``place`` describes one:
    ``line 7 of reviews.csv``.
    """

    path: Path
    columns: pyarrow.Table
    place: Callable[[int], str]
    numbers: NDArray[np.int64]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows for which a boolean column is true."""
        mask = is_kept.to_numpy()
        columns = self.columns if mask.all() else self.columns.filter(is_kept)
        return replace(self, columns=columns, numbers=self.numbers[mask])


def join_tables(tables: Sequence[RawTable]) -> RawTable:
    """Return the rows of several files as one table, with their common columns."""
    if len(tables) == 1:
        return tables[0]
    names = [set(table.columns.column_names) for table in tables]
    shared = [
        name for name in tables[0].columns.column_names if all(name in columns for columns in names)
    ]
    starts = np.cumsum([1, *(len(table.columns) for table in tables)])

    def place(row: int) -> str:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        return tables[number].place(int(tables[number].numbers[row - starts[number]]))

    columns = pyarrow.concat_tables(table.columns.select(shared) for table in tables)
    return replace(tables[0], columns=columns, place=place, numbers=1 + np.arange(len(columns)))


def read_file(path: Path, options: DataConfig) -> RawTable:
    """Read the table of a file, compressed or not, as text."""
    source = read_source(path, options, readable_only=True)
    frame, path = source.frame, source.path
    if not len(frame) and not source.left_out:
        raise DataUnreadableError(f"{path} has no rows", remedy="add one row per text")
    if survey_rows := delimited.count_survey_rows(frame.head(2).values.tolist()):
        emit(Info(f"the rows with questions and IDs below the header of {path} are left out"))
        frame = frame.iloc[survey_rows:]
    frame = labeling_tools.convert(frame)
    columns, left_out = replace(source, frame=frame).texts()
    if listed := ", ".join(f"{name!r} ({content})" for name, content in left_out.items()):
        ignored = f"columns of {path} are ignored, because they have neither text nor numbers"
        emit(Info(f"{ignored}: {listed}"))
    for name in source.class_names.keys() & columns.keys():
        convert = partial(_name_classes, names=source.class_names[name])
        columns[name] = map_values(columns[name], convert)
    table, numbers = pyarrow.table(columns), frame.index.to_numpy(np.int64)
    if source.format.kind in ("csv", "excel") and delimited.ends_with_total(table):
        emit(Info(f"the last row of {path} is a total and is left out"))
        table, numbers = table.slice(0, len(table) - 1), numbers[:-1]
    return RawTable(
        path,
        table,
        lambda number: f"{source.unit} {number} of {path}",
        numbers,
        source.class_names,
        left_out,
    )


def read_source(path: Path, options: DataConfig, *, readable_only: bool = False) -> SourceTable:
    """Read the table of a file, compressed or not, with its own types.

    Args:
        readable_only: Leave out columns of a Parquet file with vectors or bytes, which are large.
    """
    content = packed.unpack(path, TABLE_SUFFIXES, options.table)
    kind, is_member = _find_kind(content), content.path != path
    path = content.path
    if options.table and not is_member and kind not in ("excel", "json"):
        remedy = f"drop --table {options.table}"
        raise DataNotFoundError(f"{path} has one table only", remedy=remedy)
    if kind == "parquet":
        return _read_parquet(content, readable_only=readable_only)
    if kind == "excel":
        return _read_workbook(content, options)
    text = find_text(content, encoding=options.encoding)
    if kind == "csv":
        table, numbers, dialect = delimited.read_table(text, options)
        frame = frame_of(table).set_index(numbers)
        return SourceTable(path, frame, dialect.format, "line", layout=dialect)
    emit(Info(f"reading {path}: encoding {text.encoding}"))
    lines = [number for number, _ in text.lines()] if kind != "json" else []
    if kind == "fasttext":
        frame = _read_fasttext(text)
    elif kind == "jsonl" and (table := _read_by_arrow(text, rows=len(lines))) is not None:
        frame = frame_of(table)
    else:
        frame = _read_json(text, options, is_lines=kind == "jsonl")
    written = FileFormat(kind, encoding=text.encoding, line_end=text.line_end())
    if len(lines) != len(frame):  # an object may take several lines
        return SourceTable(path, _numbered(frame), written, "row")
    return SourceTable(path, frame.set_index(np.array(lines, np.int64)), written, "line")


def _find_kind(content: packed.Content) -> str:
    """Return the kind of a file from its content or, if that is ambiguous, its suffix."""
    start, path = content.start(packed.START_BYTES), content.path
    if not start:
        raise DataUnreadableError(f"{path} is empty", remedy="copy, download or export it again")
    if start.startswith(b"PAR1"):
        return "parquet"
    if packed.is_workbook(content):
        return "excel"
    packed.reject_foreign(content)
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    is_named_json = content.suffix in (".json", ".jsonl", ".ndjson")
    is_json = is_named_json and start.startswith((b"[", b"{", b'"'))
    if is_json or re.match(rb'\{\s*"([^"\\]|\\.)*"\s*:|\[\s*[\[{]\s*"', start):
        with content.open() as file:
            filled = (line for line in map(bytes.strip, file) if line)
            first, second = next(filled, b""), next(filled, b"")
        is_object = first.removeprefix(b"\xef\xbb\xbf").startswith(b"{") and first.endswith(b"}")
        are_lines = bool(second) or (content.suffix != ".json" and b"}{" not in first)
        return "jsonl" if is_object and are_lines else "json"
    if content.suffix == ".ft" or re.match(rb"(?i)(.*\s)?__label__\S", start):
        return "fasttext"
    return "csv"


def frame_of(table: pyarrow.Table) -> pandas.DataFrame:
    """Return a frame with Arrow types, without copying the values of the table."""
    return table.to_pandas(types_mapper=pandas.ArrowDtype)


def arrow_of(values: pandas.Series) -> Any:
    """Return a column with an Arrow type as Arrow, and a column of objects as a list."""
    if isinstance(values.dtype, pandas.ArrowDtype):
        return pyarrow.chunked_array(values.array.__arrow_array__())
    return [None if value is pandas.NA else value for value in values.tolist()]


def list_of(values: pandas.Series) -> list[Any]:
    """Return the Python objects of a column, with missing values as ``None``."""
    column = arrow_of(values)
    return column if isinstance(column, list) else column.to_pylist()


# Lines of JSON.


def _numbered(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a frame whose rows are counted from 1."""
    return frame.set_index(pandas.RangeIndex(1, len(frame) + 1))


def _read_by_arrow(
    text: TextFile, schema: pyarrow.Schema | None = None, *, rows: int
) -> pyarrow.Table | None:
    """Return the columns as Arrow reads them, or ``None`` if it can't read them exactly."""
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
        schema = pyarrow.schema([(name, "string") for name in times])
        return _read_by_arrow(text, schema, rows=rows)
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


def _frame_of(records: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return objects as columns of Python objects."""
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    return pandas.DataFrame(columns, dtype=object)


# Documents of JSON.


def _read_json(text: TextFile, options: DataConfig, *, is_lines: bool) -> pandas.DataFrame:
    """Return the only table of a document, or the chosen one."""
    values = _parse_json(text)
    tables = dict(_find_tables(values if len(values) > 1 or is_lines else values[0]))
    if not tables:
        remedy = f"{SHAPES}; pass a configuration with --config"
        raise DataUnreadableError(f"{text.path} contains no rows of one kind", remedy=remedy)
    rows = tables[packed.choose_member(list(tables), options.table, path=text.path)]
    if isinstance(rows[0], dict):
        return _frame_of(rows)
    if len(set(map(len, rows))) > 1:
        raise DataUnreadableError(
            f"the arrays of {text.path} have different lengths", remedy=SHAPES
        )
    words = [[as_text(value) or "" for value in row] for row in rows]
    names, has_header = delimited.find_names(words, options, path=text.path)
    return pandas.DataFrame(rows[int(has_header) :], columns=names, dtype=object)


def _parse_json(text: TextFile) -> list[Any]:
    """Return the values of a file, with or without commas between them."""
    content = text.open().read().rstrip()
    decoder, values, end = json.JSONDecoder(), [], 0
    try:
        while end < len(content):
            if content[end] in ", \t\r\n\ufeff":
                end += 1
            else:
                value, end = decoder.raw_decode(content, end)
                values.append(value)
    except (ValueError, RecursionError) as error:
        message = f"{text.path} can't be read: {' '.join(str(error).split())}"
        raise DataUnreadableError(message, remedy="correct it there, or export it again") from error
    if SURROGATE.search(content):  # half of a surrogate pair can't be stored
        encoded = json.dumps(values, ensure_ascii=False).encode("utf-16", errors="surrogatepass")
        values = json.loads(encoded.decode("utf-16", errors="replace"))
    return values


def _find_tables(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield lists of objects or arrays, with the keys that contain them."""
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


def _read_fasttext(text: TextFile) -> pandas.DataFrame:
    lines = [line for _, line in text.lines()]
    labels = list(map(FASTTEXT_LABEL.findall, lines))
    has_several = any(len(names) > 1 for names in labels)
    columns = {
        "text": [FASTTEXT_LABEL.sub("", line).strip() for line in lines],
        "label": labels if has_several else list(map("".join, labels)),
    }
    return pandas.DataFrame(columns, dtype=object)


# Parquet.


def _read_parquet(content: packed.Content, *, readable_only: bool) -> SourceTable:
    """Return the columns; numbers of classes that have names stay numbers."""
    path, unpacked = content.path, content.unpacked
    emit(Info(f"reading {path}"))
    try:
        source: Any = path if unpacked is None else pyarrow.BufferReader(unpacked)
        file = parquet.ParquetFile(source, memory_map=unpacked is None)
        schema = file.schema_arrow
        large = [column.name for column in schema if readable_only and not _is_read(column.type)]
        first: Any = next(file.iter_batches(1, columns=large), None)
        table = file.read(columns=[name for name in schema.names if name not in large])
        table.validate(full=True)  # texts may be other bytes than UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"{path} is not Parquet: {str(error).splitlines()[0]}"
        raise DataUnreadableError(message, remedy="export it again") from error
    if not file.metadata.num_rows:
        raise DataUnreadableError(f"{path} has no rows", remedy="export it again")
    names = delimited.complete_names(table.column_names, path=path)
    columns = dict(zip(names, map(_stored, table.columns), strict=True))
    return SourceTable(
        path,
        _numbered(frame_of(pyarrow.table(columns))),
        FileFormat("parquet", metadata=schema.metadata),
        "row",
        class_names=_class_names(schema.metadata or {}),
        left_out={name: _content_of(first[name][0].as_py()) for name in large},
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the class names per column that the library datasets stores in a schema."""
    try:
        features = Features.from_dict(json.loads(metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):  # no metadata, or of another version
        return {}
    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def _name_classes(value: str, *, names: Sequence[str]) -> str:
    """Return the name of a class for its number, or the names in a list of numbers."""
    if value.startswith("["):
        classes = [_name_classes(number, names=names) for number in json.loads(value)]
        return json.dumps(classes, ensure_ascii=False)
    if not re.fullmatch(r"-?\d+", value):
        return value
    return names[int(value)] if 0 <= int(value) < len(names) else ""


# Workbooks.


def _read_workbook(content: packed.Content, options: DataConfig) -> SourceTable:
    """Return the one sheet with rows that is not hidden, or the chosen one."""
    path = content.path
    emit(Info(f"reading {path}: a spreadsheet"))
    sheet_name, table = _read_sheet(content, options)
    rows = [[as_text(cell) or "" for cell in row] for row in table.head(1_000).values.tolist()]
    start = delimited.find_start(rows, options, is_grid=True)
    if start:
        emit(Info(f"the table of {path} begins in row {table.index[start] + 1}, below other lines"))
    names, has_header = delimited.find_names(rows[start:], options, path=path)
    body = table.iloc[start + int(has_header) :]
    empty = [name for name, is_empty in zip(names, body.isna().all(), strict=True) if is_empty]
    unsaved = empty if empty and _has_unsaved_formulas(content) else []
    columns = {
        name: [_plain_cell(cell) for cell in column.tolist()]
        for name, (_, column) in zip(names, body.items(), strict=True)
    }
    return SourceTable(
        path,
        pandas.DataFrame(columns, body.index + 1, dtype=object),
        FileFormat("excel", has_header=has_header),
        "row",
        left_out=dict.fromkeys(unsaved, UNSAVED),
        layout=Sheet(content, sheet_name, int(table.index[start]) + 1 if has_header else None),
    )


def _read_sheet(content: packed.Content, options: DataConfig) -> tuple[str, pandas.DataFrame]:
    """Return the sheet without empty rows and columns, with merged cells filled down."""
    path = content.path
    try:
        with content.open() as file:
            book = CalamineWorkbook.from_filelike(file)
            sheets = {name: book.get_sheet_by_name(name) for name in book.sheet_names}
            filled = [sheet for sheet in book.sheets_metadata if sheets[sheet.name].height]
            shown = [sheet.name for sheet in filled if sheet.visible == SheetVisibleEnum.Visible]
            if not filled:
                raise DataUnreadableError(f"no sheet of {path} has rows", remedy=SAVE_AGAIN)
            names = [sheet.name for sheet in filled] if options.table or not shown else shown
            sheet = sheets[packed.choose_member(names, options.table, path=path)]
            cells = sheet.to_python(skip_empty_area=False)
            merged = sheet.merged_cell_ranges or []
    except (CalamineError, OSError) as error:
        raise DataUnreadableError(
            f"{path} can't be read as a spreadsheet: {error}", remedy=SAVE_AGAIN
        ) from error
    if len(names) < len(filled):
        emit(Info(f"hidden sheets of {path} are ignored; --table chooses one"))
    if merged:
        emit(Info(f"merged cells of {path} have the value of their first row"))
    for (top, left), (bottom, _) in merged:
        for row in range(top + 1, min(bottom + 1, len(cells))):
            cells[row][left] = cells[top][left]
    table = pandas.DataFrame(cells, dtype=object)
    table = table.mask(table.map(lambda cell: isinstance(cell, str) and not cell.strip()))
    table = table.dropna(how="all").dropna(how="all", axis="columns")
    if not len(table):
        raise DataUnreadableError(f"sheet {sheet.name!r} of {path} has no rows", remedy=SAVE_AGAIN)
    # A wide cell at the top is a title, or stands above a group of columns.
    wide = {top for (top, left), (_, right) in merged if right > left}
    while table.index[0] in wide and len(table) > 1:
        table = table.iloc[1:]
    return sheet.name, table


def _plain_cell(cell: Any) -> Any:
    """Return a cell as a user types it: whole numbers without a point, empty cells as ``None``."""
    if isinstance(cell, float):
        return None if cell != cell else int(cell) if cell.is_integer() else cell
    return cell


def _has_unsaved_formulas(content: packed.Content) -> bool:
    if not content.start(len(packed.ZIP)).startswith(packed.ZIP):
        return False
    with content.open() as file, ZipFile(file) as archive:
        sheets = [name for name in archive.namelist() if name.startswith("xl/worksheets/")]
        return any(FORMULA_WITHOUT_VALUE.search(archive.read(name)) for name in sheets)


# Values as text.


def as_texts(values: pandas.Series) -> pyarrow.ChunkedArray | None:
    """Return a column as text, or ``None`` if it holds other values than texts and numbers."""
    column = arrow_of(values)
    if not isinstance(column, list):
        if not _is_read(column.type) or "struct<" in str(column.type):
            return None
        column = plain(column)
        column = column.to_pylist() if types.is_nested(column.type) else column
    if isinstance(column, list) and {*map(type, column)} <= {str, type(None)}:
        column = pyarrow.chunked_array([pyarrow.array(column, "string")])
    if isinstance(column, list):
        texts = pyarrow.array(map(as_text, column), "string")
        return None if texts.null_count else pyarrow.chunked_array([texts])
    if not (types.is_string(column.type) or types.is_integer(column.type)):
        column = map_values(column, as_text)
    return pc.fill_null(column.cast("string"), "")


def plain(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column in types for which Arrow has all functions."""
    column = _stored(column)
    kind = column.type
    if types.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if types.is_float16(kind):
        return column.cast("float64")
    if (is_view := types.is_string_view(kind)) or types.is_large_string(kind):
        # Before version 24, pyarrow can't count the bytes of views.
        size_bytes = column.get_total_buffer_size() if is_view else column.nbytes
        return column.cast("string" if size_bytes < 2**31 else "large_string")
    is_list = types.is_nested(kind) and hasattr(kind, "value_type")
    if is_list and not types.is_list(kind):  # Arrow's own cast is wrong
        return pyarrow.chunked_array([column.to_pylist()], pyarrow.list_(kind.value_type))
    return column


def _stored(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a column without an Arrow extension type, which pandas may not know."""
    is_extended = isinstance(column.type, pyarrow.BaseExtensionType)
    return column.cast(column.type.storage_type) if is_extended else column


def _is_read(kind: pyarrow.DataType) -> bool:
    """Return whether a type may hold texts, labels or objects, in contrast to vectors or bytes."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if types.is_nested(kind) and "struct<" not in str(kind):
        inner = getattr(kind, "value_type", None)
        is_vector = inner is None or types.is_floating(inner) or types.is_nested(inner)
        return not is_vector and _is_read(inner)
    return re.search(r"binary(_view)?\b(?!:)", str(kind)) is None


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


def _content_of(value: Any) -> str:
    """Return what is in a column that has neither texts nor numbers, from one of its values."""
    if isinstance(value, list):
        return f"lists of {_content_of(value[0]) if value else 'nothing'}"
    if isinstance(value, dict):
        return f"objects with {', '.join(map(str, value)) or 'nothing'}"
    return {str: "texts", int: "numbers", float: "numbers"}.get(type(value), "bytes")
