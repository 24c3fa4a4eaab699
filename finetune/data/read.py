"""Reads files as tables: unchanged (``SourceTable``), or every value as text (``RawTable``).

``FORMATS``, at the end, lists all file formats, including those that write.py can write.
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
from numpy.typing import NDArray
from pyarrow import json as arrow_json
from pyarrow import parquet, types
from python_calamine import CalamineError, CalamineWorkbook, SheetVisibleEnum

from finetune.config.schema import DataConfig
from finetune.data import delimited, labeling_tools, packed, write
from finetune.data.delimited import Delimited, FileFormat
from finetune.data.encoding import TextFile, find_text
from finetune.data.packed import Content
from finetune.data.values import as_text, as_texts, content_of, frame_of, is_read, list_of, stored
from finetune.errors import DataNotFoundError, DataUnreadableError, reason_of
from finetune.events import Info, emit
from finetune.files import naming
from finetune.tasks.labels import map_values

# Rows converted to Python objects at a time, and bytes that Arrow reads per block.
STREAM_ROWS, BLOCK_BYTES = 1_024, 2**24
# JSON writes a character beyond 16 bits as two escapes. This is the first of them.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Arrow reads integers beyond 64 bits as floats, which lose digits.
MAX_EXACT = 2.0**53
FASTTEXT_LABEL = re.compile(r"(?<!\S)__label__(\S+?),?(?:\s+|$)", re.IGNORECASE)
FORMULA_WITHOUT_VALUE = re.compile(rb"<f\b[^>]*(/>|>[^<]*</f>)\s*(<v\s*/>|<v></v>)?\s*</c>")
SAVE_AGAIN = "save it again, or save the sheet as .csv"
UNSAVED = "formulas whose values were not saved; open it in Excel or LibreOffice and save it again"


class Sheet(NamedTuple):
    """A spreadsheet sheet that contains a table, and its header row, counted from 1."""

    content: Content
    name: str
    header: int | None


@dataclass(frozen=True)
class SourceTable:
    """A table as stored in its file: all rows and columns, in order.

    Args:
        frame: Columns have Arrow types, or Python objects if they come from Excel or mixed JSON.
            The index contains row numbers.
        unit: What the numbers count, from 1: ``line``, or ``row`` of a sheet or other data.
        class_names: Class names by column, if the file contains them.
        left_out: Content of columns with neither text nor numbers, optionally with a remedy.
        layout: Where the rows are in the file, for adding columns to a copy.
    """

    path: Path
    frame: pandas.DataFrame
    format: FileFormat
    unit: str
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    layout: Delimited | Sheet | None = None

    def texts(self) -> tuple[dict[str, pyarrow.ChunkedArray], dict[str, str]]:
        """Return the columns as text, and describe columns with neither text nor numbers."""
        columns, left_out = {}, {**self.left_out}
        for name in [name for name in self.frame if name not in left_out]:
            if (column := as_texts(self.frame[name])) is None:
                left_out[name] = content_of(self.frame[name].dropna().iloc[0])
            else:
                columns[name] = column
        return columns, left_out

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows in chunks, with missing values as None."""
        for start in range(0, len(self.frame), STREAM_ROWS):
            piece = self.frame.iloc[start : start + STREAM_ROWS]
            values = [list_of(series) for _, series in piece.items()]
            yield [dict(zip(piece.columns, row, strict=True)) for row in zip(*values, strict=True)]


@dataclass(frozen=True)
class RawTable:
    """The columns of a file with every value as text: empty if missing, lists as JSON.

    ``numbers`` are the lines or sheet rows, from 1: [rows]. ``place`` describes one:
    ``line 7 of reviews.csv``.
    """

    path: Path
    columns: pyarrow.Table
    place: Callable[[int], str]
    numbers: NDArray[np.int64]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows where a boolean column is true."""
        mask = is_kept.to_numpy()
        columns = self.columns if mask.all() else self.columns.filter(is_kept)
        return replace(self, columns=columns, numbers=self.numbers[mask])


def join_tables(tables: Sequence[RawTable]) -> RawTable:
    """Concatenate the rows of several files, with their common columns."""
    if len(tables) == 1:
        return tables[0]
    names = [set(table.columns.column_names) for table in tables]
    shared = [
        name for name in tables[0].columns.column_names if all(name in columns for columns in names)
    ]
    starts = np.cumsum([1, *(len(table.columns) for table in tables)])
    places = [(table.place, table.numbers) for table in tables]

    def place(row: int) -> str:
        number = int(np.searchsorted(starts, row, side="right")) - 1
        place_of_table, numbers = places[number]
        return place_of_table(int(numbers[row - starts[number]]))

    columns = pyarrow.concat_tables(table.columns.select(shared) for table in tables)
    return replace(tables[0], columns=columns, place=place, numbers=1 + np.arange(len(columns)))


def read_file(path: Path, options: DataConfig) -> RawTable:
    """Read the table of a file, compressed or not, as text."""
    source = read_source(path, options, readable_only=True)
    frame, path = source.frame, source.path
    if not len(frame) and not source.left_out:
        raise DataUnreadableError(f"{path} has no rows", remedy="add one row per text")
    if survey_rows := delimited.count_survey_rows(frame.head(2).values.tolist()):
        emit(Info(f"ignoring the rows with questions and IDs below the header of {path}"))
        frame = frame.iloc[survey_rows:]
    frame = labeling_tools.convert(frame)
    columns, left_out = replace(source, frame=frame).texts()
    if listed := ", ".join(f"{name!r} ({content})" for name, content in left_out.items()):
        ignored = f"ignoring columns of {path} with neither text nor numbers"
        emit(Info(f"{ignored}: {listed}"))
    for name in source.class_names.keys() & columns.keys():
        convert = partial(_name_classes, names=source.class_names[name])
        columns[name] = map_values(columns[name], convert)
    table, numbers = pyarrow.table(columns), frame.index.to_numpy(np.int64)
    if source.layout and delimited.ends_with_total(table):  # people write totals, programs don't
        emit(Info(f"ignoring the last row of {path}, which is a total"))
        table, numbers = table.slice(0, len(table) - 1), numbers[:-1]
    unit = source.unit  # row descriptions outlive the source
    return RawTable(
        path,
        table,
        lambda number: f"{unit} {number} of {path}",
        numbers,
        source.class_names,
        left_out,
    )


def read_source(path: Path, options: DataConfig, *, readable_only: bool = False) -> SourceTable:
    """Read the table of a file, compressed or not, with its original types.

    Args:
        readable_only: Skip Parquet columns with vectors or bytes, which are large.
    """
    with naming(path):
        content = packed.unpack(path, TABLE_SUFFIXES, options.table)
        found, is_member = _find_format(content), content.path != path
        if options.table and not is_member and not found.has_several:
            remedy = f"drop --table {options.table}"
            raise DataNotFoundError(f"{content.path} contains only one table", remedy=remedy)
        return found.read(content, options, readable_only)


# Delimited text, and fastText lines, where ``__label__good`` is a label.


def _read_delimited(content: Content, options: DataConfig, _narrow: bool) -> SourceTable:
    text = find_text(content, encoding=options.encoding)
    table, numbers, dialect = delimited.read_table(text, options)
    frame = frame_of(table).set_index(numbers)
    return SourceTable(content.path, frame, dialect.format, "line", layout=dialect)


def _is_fasttext(content: Content, start: bytes) -> bool:
    return content.suffix == ".ft" or bool(re.match(rb"(?i)(.*\s)?__label__\S", start))


def _read_fasttext(content: Content, options: DataConfig, _narrow: bool) -> SourceTable:
    text = _find_text(content, options)
    lines = dict(text.lines())
    labels = list(map(FASTTEXT_LABEL.findall, lines.values()))
    has_several = any(len(names) > 1 for names in labels)
    columns = {
        "text": [FASTTEXT_LABEL.sub("", line).strip() for line in lines.values()],
        "label": labels if has_several else list(map("".join, labels)),
    }
    return _source_of(text, pandas.DataFrame(columns, dtype=object), [*lines])


def _find_text(content: Content, options: DataConfig) -> TextFile:
    text = find_text(content, encoding=options.encoding)
    emit(Info(f"reading {text.path}: encoding {text.encoding}"))
    return text


def _source_of(text: TextFile, frame: pandas.DataFrame, lines: Sequence[int] = ()) -> SourceTable:
    written = FileFormat(encoding=text.encoding, line_end=text.line_end())
    if len(lines) != len(frame):  # an object can span several lines
        return SourceTable(text.path, _numbered(frame), written, "row")
    return SourceTable(text.path, frame.set_index(np.array(lines, np.int64)), written, "line")


# JSON Lines.


def _is_json(content: Content, start: bytes) -> bool:
    is_named_json = content.suffix in (".json", ".jsonl", ".ndjson")
    is_json = is_named_json and start.startswith((b"[", b"{", b'"'))
    return is_json or bool(re.match(rb'\{\s*"([^"\\]|\\.)*"\s*:|\[\s*[\[{]\s*"', start))


def _are_json_lines(content: Content, start: bytes) -> bool:
    if not _is_json(content, start):
        return False
    with content.open() as file:
        filled = (line for line in map(bytes.strip, file) if line)
        first, second = next(filled, b""), next(filled, b"")
    is_object = first.removeprefix(b"\xef\xbb\xbf").startswith(b"{") and first.endswith(b"}")
    return is_object and (bool(second) or (content.suffix != ".json" and b"}{" not in first))


def _read_json_lines(content: Content, options: DataConfig, _narrow: bool) -> SourceTable:
    text = _find_text(content, options)
    lines = [number for number, _ in text.lines()]
    table = _read_by_arrow(text, rows=len(lines))
    frame = _parse_tables(text, options, are_lines=True) if table is None else frame_of(table)
    return _source_of(text, frame, lines)


def _numbered(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return a frame with rows numbered from 1."""
    return frame.set_index(pandas.RangeIndex(1, len(frame) + 1))


def _read_by_arrow(
    text: TextFile, schema: pyarrow.Schema | None = None, *, rows: int
) -> pyarrow.Table | None:
    """Read the columns with Arrow. Return None if Arrow can't read them exactly."""
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


# JSON documents.


def _read_json(content: Content, options: DataConfig, _narrow: bool) -> SourceTable:
    text = _find_text(content, options)
    return _source_of(text, _parse_tables(text, options, are_lines=False))


def _parse_tables(text: TextFile, options: DataConfig, *, are_lines: bool) -> pandas.DataFrame:
    """Return the only table of a document, or the chosen one."""
    values = _parse_json(text)
    tables = dict(_find_tables(values if len(values) > 1 or are_lines else values[0]))
    if not tables:
        raise DataUnreadableError(
            f"{text.path} doesn't contain a list of objects",
            remedy='write a list of objects, such as [{"text": "Good.", "label": "praise"}]; pandas'
            ' writes it with orient="records"; pass a configuration with --config',
        )
    return _frame_of(tables[packed.choose_member(list(tables), options.table, path=text.path)])


def _parse_json(text: TextFile) -> list[Any]:
    """Parse the values of a file, with or without commas between them."""
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
        raise DataUnreadableError(message, remedy="fix it there, or export it again") from error
    if SURROGATE.search(content):  # half of a surrogate pair can't be stored
        encoded = json.dumps(values, ensure_ascii=False).encode("utf-16", errors="surrogatepass")
        values = json.loads(encoded.decode("utf-16", errors="replace"))
    return values


def _find_tables(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield lists of objects, with their keys."""
    if isinstance(value, list):
        if value and {*map(type, value)} == {dict}:
            yield name, value
        elif value and all(isinstance(text, str) for text in value):
            yield name, [{"text": text} for text in value]
    elif isinstance(value, dict) and value:
        if "data" in value and {"columns", "schema"} & value.keys():
            return  # pandas' orients "split" and "table"
        if rows := _rows_of_object(value, is_nested=bool(name)):
            yield name, rows
            return
        for key, inner in value.items():
            if isinstance(inner, list | dict):
                yield from _find_tables(inner, f"{name}.{key}" if name else key)


def _rows_of_object(value: dict[str, Any], *, is_nested: bool) -> list[Any]:
    """Return the rows of an object that is itself a table: a list per column or per label."""
    inner = list(value.values())
    kinds = {*map(type, inner)}
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
    # A single row, such as a text to classify. Nested rows are pandas' orient "index".
    is_row = not is_nested and delimited.are_known_names(value) and not kinds & {dict, list}
    return [value] if is_row else []


# Parquet.


def _read_parquet(content: Content, _options: DataConfig, readable_only: bool) -> SourceTable:
    """Read the columns. Class numbers with names stay numbers."""
    path, unpacked = content.path, content.unpacked
    emit(Info(f"reading {path}"))
    try:
        source: Any = path if unpacked is None else pyarrow.BufferReader(unpacked)
        file = parquet.ParquetFile(source, memory_map=unpacked is None)
        schema = file.schema_arrow
        large = [column.name for column in schema if readable_only and not is_read(column.type)]
        first: Any = next(file.iter_batches(1, columns=large), None)
        table = file.read(columns=[name for name in schema.names if name not in large])
        table.validate(full=True)  # texts may not be valid UTF-8
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        message = f"{path} is not Parquet: {reason_of(error)}"
        raise DataUnreadableError(message, remedy="export it again") from error
    if not file.metadata.num_rows:
        raise DataUnreadableError(f"{path} has no rows", remedy="export it again")
    names = delimited.complete_names(table.column_names, path=path)
    columns = dict(zip(names, map(stored, table.columns), strict=True))
    return SourceTable(
        path,
        _numbered(frame_of(pyarrow.table(columns))),
        FileFormat(metadata=schema.metadata),
        "row",
        class_names=_class_names(schema.metadata or {}),
        left_out={name: content_of(first[name][0].as_py()) for name in large},
    )


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return class names by column, which the `datasets` library stores in the schema."""
    if b"huggingface" not in metadata:
        return {}
    from datasets import ClassLabel, Features

    try:
        features = Features.from_dict(json.loads(metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):  # written by another version
        return {}
    kinds = {name: getattr(kind, "feature", kind) for name, kind in features.items()}
    return {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}


def _name_classes(value: str, *, names: Sequence[str]) -> str:
    """Return the class name for a number, or the names for a list of numbers."""
    if value.startswith("["):
        classes = [_name_classes(number, names=names) for number in json.loads(value)]
        return json.dumps(classes, ensure_ascii=False)
    if not re.fullmatch(r"-?\d+", value):
        return value
    return names[int(value)] if 0 <= int(value) < len(names) else ""


# Workbooks.


def _read_workbook(content: Content, options: DataConfig, _narrow: bool) -> SourceTable:
    """Read the chosen sheet, or the only visible sheet with rows."""
    path = content.path
    emit(Info(f"reading {path}: a spreadsheet"))
    sheet_name, table = _read_sheet(content, options)
    rows = [[as_text(cell) or "" for cell in row] for row in table.head(1_000).values.tolist()]
    start = delimited.find_start(rows, options, is_grid=True)
    if start:
        emit(Info(f"the table of {path} starts in row {table.index[start] + 1}, below other lines"))
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
        FileFormat(has_header=has_header),
        "row",
        left_out=dict.fromkeys(unsaved, UNSAVED),
        layout=Sheet(content, sheet_name, int(table.index[start]) + 1 if has_header else None),
    )


def _read_sheet(content: Content, options: DataConfig) -> tuple[str, pandas.DataFrame]:
    """Return a sheet without empty rows and columns, with merged cells filled."""
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
        emit(Info(f"ignoring hidden sheets of {path}; --table chooses one"))
    if merged:
        emit(Info(f"filling merged cells of {path} with the value of their first row"))
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
    """Return a cell as typed: whole numbers without a decimal point, empty cells as None."""
    if isinstance(cell, float):
        return None if cell != cell else int(cell) if cell.is_integer() else cell
    return cell


def _has_unsaved_formulas(content: Content) -> bool:
    if not content.start(len(packed.ZIP)).startswith(packed.ZIP):
        return False
    with content.open() as file, ZipFile(file) as archive:
        sheets = [name for name in archive.namelist() if name.startswith("xl/worksheets/")]
        return any(FORMULA_WITHOUT_VALUE.search(archive.read(name)) for name in sheets)


# All formats.


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        suffixes: Suffixes of files in folders, in archives and on the Hub.
        read: Reads the table. If the last argument is true, large columns of vectors and bytes
            are skipped.
        recognizes: Whether a file has this format, from its content and its first bytes,
            without spaces. All other files have the first format in ``FORMATS``.
        is_binary: If false, files that aren't tables, such as web pages, are detected.
        has_several: Whether a file can contain several tables, for ``--table``.
        write: Writes a table with predictions.
        write_suffixes: Suffixes of written files, if not ``suffixes``.
        number: Formats a score for writing. If None, lists and objects are written as well.
    """

    suffixes: tuple[str, ...]
    read: Callable[[Content, DataConfig, bool], SourceTable]
    recognizes: Callable[[Content, bytes], bool] | None = None
    is_binary: bool = False
    has_several: bool = False
    write: Callable[[Path, pandas.DataFrame, FileFormat], None] | None = None
    write_suffixes: tuple[str, ...] = ()
    number: Callable[[float], Any] | None = float


FORMATS = (
    Format(
        (".csv", ".tsv"),
        _read_delimited,
        write=write.write_delimited,
        write_suffixes=(".csv", ".tsv", ".txt"),
        number=write.rounded,
    ),
    Format(
        (".jsonl", ".ndjson"),
        _read_json_lines,
        _are_json_lines,
        write=write.write_json_lines,
        number=None,
    ),
    Format((".json",), _read_json, _is_json, has_several=True, write=write.write_json, number=None),
    Format(
        (".parquet",),
        _read_parquet,
        lambda _content, start: start.startswith(b"PAR1"),
        is_binary=True,
        write=write.write_parquet,
    ),
    Format((".ft",), _read_fasttext, _is_fasttext),
    Format(
        (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods"),
        _read_workbook,
        lambda content, _start: packed.is_workbook(content),
        is_binary=True,
        has_several=True,
        write=write.write_excel,
        write_suffixes=(".xlsx", ".xlsm"),
        number=write.rounded,
    ),
)
SUFFIXES = tuple(suffix for known in FORMATS for suffix in known.suffixes)
TABLE_SUFFIXES = (*SUFFIXES, *packed.PACKED_SUFFIXES, ".zip")
WRITERS = {
    suffix: (known, known.write)
    for known in FORMATS
    if known.write
    for suffix in known.write_suffixes or known.suffixes
}


def _find_format(content: Content) -> Format:
    """Return the format of a file."""
    start = content.start(packed.START_BYTES)
    if not start:
        remedy = "copy, download or export it again"
        raise DataUnreadableError(f"{content.path} is empty", remedy=remedy)
    start = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = (item for item in FORMATS if item.recognizes and item.recognizes(content, start))
    found = next(known, FORMATS[0])
    if not found.is_binary:
        packed.reject_foreign(content)
    return found
