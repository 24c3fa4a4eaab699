"""Tables whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from finetune.config.schema import DataConfig
from finetune.data.columns import LABEL_NAMES, OPTIONS, TEXT_NAMES, plain_name
from finetune.data.encoding import TextFile, find_text
from finetune.data.mapped import PIECE_ROWS, collect
from finetune.data.packed import Content
from finetune.data.reader import RawTable, Reader, Records, records_of
from finetune.data.source import earlier_columns
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info
from finetune.tasks.labels import MISSING, NUMBER, is_number
from finetune.tasks.multi import Multi

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_ROWS = 100
HEADER_ROWS = 10_000
MAX_NAME = 60
WITH_COMMA = r"[+-]?[0-9]+(,[0-9]+)?"
# A row must fit into one block.
BLOCK_BYTES = 2**24
# The module's own limit is 131,072 characters, fewer than a long document has.
csv.field_size_limit(2**31 - 1)

Rows = Iterator[pyarrow.Table]
Parse = Callable[[], Rows]


def read(content: Content, options: DataConfig, emit: Emit) -> RawTable:
    """Read the columns; whether the first row names them is guessed unless the options say it."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    dialect, parse = _find_parser(text, emit=emit)
    columns, has_header = name_columns(collect(parse()), options, path=text.path, emit=emit)
    delimiter = DELIMITERS[dialect.delimiter]
    emit(Info(f"reading {text.path}: encoding {text.encoding}, delimiter {delimiter}"))
    # Excel delimits by semicolons where a comma is decimal.
    allows_comma = dialect.delimiter == ";" and options.task != Multi.name
    columns = _plain_numbers(columns, allows_comma=allows_comma, path=text.path, emit=emit)

    def place(row: int) -> str:
        number, _ = next(islice(dialect.numbered_rows(text), row + has_header, None))
        return f"line {number} of {text.path}"

    return RawTable(text.path, columns, place)


def stream(content: Content, options: DataConfig, emit: Emit) -> Iterator[Records]:
    """Yield the rows."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    pieces = _find_parser(text, emit=emit)[1]()
    first = next(pieces)
    names, has_header = _find_names(first, options, path=text.path)
    for piece in chain([first.slice(int(has_header))], pieces):
        yield from records_of(piece.rename_columns(names))


@dataclass(frozen=True)
class Dialect:
    """The delimiter of values, and whether those that contain it are in quotes."""

    delimiter: str
    has_quotes: bool = True

    def reader(self, lines: Iterable[str], *, strict: bool = True) -> Any:
        """Return a reader of rows that raises ``csv.Error`` where quotes are wrong."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quoting=csv.QUOTE_MINIMAL if self.has_quotes else csv.QUOTE_NONE,
            strict=strict,
        )

    def numbered_rows(self, text: TextFile) -> Iterator[tuple[int, list[str]]]:
        """Yield each row that is not blank, as it is read, and the number of its first line."""
        with text.open() as lines:
            reader, count = self.reader(lines), 0
            while True:
                number = reader.line_num + 1
                try:
                    row = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    raise _unreadable(number, f"has {error}", text) from error
                if len(row) > 1 or "".join(row).strip():
                    count = count or len(row)
                    if not "".join(row[count:]).strip():
                        row = row[:count]  # spreadsheets end rows with blank values
                    if len(row) != count:
                        complaint = f"has {len(row)} values instead of {count}, one for each column"
                        raise _unreadable(number, complaint, text)
                    yield number, row


def _unreadable(number: int, complaint: str, text: TextFile) -> DataUnreadable:
    with text.open() as lines:
        line = next(islice(lines, number - 1, None))
    return DataUnreadable(
        f"line {number} of {text.path} {complaint}: {line.strip()[:60]!r}",
        remedy='put values with a delimiter, quotes or a line end in quotes: "a ""b"", c"',
    )


def _find_parser(text: TextFile, *, emit: Emit) -> tuple[Dialect, Parse]:
    """Return the dialect, and what parses the rows, header included; an error comes at once."""
    dialect = _find_dialect(text)
    try:
        return dialect, _find_parser_in(dialect, text)
    except DataUnreadable:
        if dialect.delimiter != "\t":
            raise
    # Many files with tabs know no quotes, and a text may then begin with one and never end it.
    dialect = replace(dialect, has_quotes=False)
    parse = _find_parser_in(dialect, text)
    emit(Info(f"quotes in {text.path} are read as part of the texts"))
    return dialect, parse


def _find_parser_in(dialect: Dialect, text: TextFile) -> Parse:
    first = next(dialect.numbered_rows(text), None)
    if first is None:
        remedy = "write a header row, such as text,label, and rows"
        raise DataUnreadable(f"{text.path} is empty", remedy=remedy)
    has_quotes = dialect.has_quotes and any('"' in piece for piece in text.pieces())
    dialect = replace(dialect, has_quotes=has_quotes)
    parse: Parse = partial(_parse_by_arrow, dialect, text, columns=len(first[1]))
    try:
        if has_quotes:  # Arrow accepts characters behind a closing quote
            with text.open() as lines:
                deque(dialect.reader(lines), maxlen=0)
        deque(parse(), maxlen=0)
    except (csv.Error, pyarrow.ArrowInvalid):
        # To say which row is wrong, or for what Arrow refuses, such as lines of spaces.
        parse = partial(_parse_by_row, dialect, text)
        deque(parse(), maxlen=0)
    return parse


def _parse_by_arrow(dialect: Dialect, text: TextFile, *, columns: int) -> Rows:
    names = [str(position) for position in range(columns)]
    reader = arrow_csv.open_csv(
        text.open_for_arrow(),
        read_options=arrow_csv.ReadOptions(block_size=BLOCK_BYTES, column_names=names),
        parse_options=arrow_csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char='"' if dialect.has_quotes else False,
            newlines_in_values=dialect.has_quotes,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        ),
    )
    return (pyarrow.Table.from_batches([batch]) for batch in reader)


def _parse_by_row(dialect: Dialect, text: TextFile) -> Rows:
    rows = (row for _, row in dialect.numbered_rows(text))
    while piece := list(islice(rows, PIECE_ROWS)):
        columns = [pyarrow.array(values, "string") for values in zip(*piece, strict=True)]
        yield pyarrow.table(columns, names=list(map(str, range(len(columns)))))


def _find_dialect(text: TextFile) -> Dialect:
    """Return the dialect in which most of the first rows have as many values as the first one.

    Of several, commas go first in a ``.csv`` and tabs elsewhere, since texts have commas.
    """
    sample = next(text.pieces(), "")

    def score(delimiter: str) -> float:
        reader = Dialect(delimiter).reader(io.StringIO(sample, newline=""), strict=False)
        lengths = [len(row) for row in islice(reader, SAMPLE_ROWS) if row]
        return lengths.count(lengths[0]) / len(lengths) if lengths and lengths[0] > 1 else 0.0

    likely = "," if text.content.name.suffix.lower() == ".csv" else "\t"
    return Dialect(max(sorted(DELIMITERS, key=lambda one: one != likely), key=score))


def name_columns(
    rows: pyarrow.Table, options: DataConfig, *, path: Path, emit: Emit
) -> tuple[pyarrow.Table, bool]:
    """Name the columns by the first row, if it is a header, or by position; drop blank ones."""
    names, has_header = _find_names(rows, options, path=path)
    table = rows.slice(int(has_header))
    blank = [
        position
        for position, name in enumerate(_first_row(rows))
        if not (name and has_header) and not pc.any(pc.not_equal(table[position], "")).as_py()
    ]
    table = table.rename_columns(names)
    if blank and len(table):  # as spreadsheets write them
        emit(Info(f"dropped {len(blank)} blank columns of {path}"))
        table = table.select([n for n in range(table.num_columns) if n not in blank])
    if not has_header:
        emit(Info(f"{path} has no header row: its columns are {', '.join(table.column_names)}"))
    if len(table) == 0:
        raise DataUnreadable(
            f"{path} has a header row, {table.column_names}, but no rows",
            remedy="add one row per text",
        )
    return table, has_header


def _find_names(rows: pyarrow.Table, options: DataConfig, *, path: Path) -> tuple[list[str], bool]:
    """Return the names of the columns, and whether the first row has them."""
    named = [getattr(options, option) or "" for option in OPTIONS]
    named += [*earlier_columns(options).values()]
    named += [part for name in named for part in name.split(",")]
    known = {*TEXT_NAMES, *LABEL_NAMES, *map(plain_name, filter(None, named))}
    has_header = options.header
    if has_header is None:
        has_header = _has_header(rows.slice(0, HEADER_ROWS), known=known)
    given = _first_row(rows) if has_header else [""] * rows.num_columns
    names = [name or f"column{position}" for position, name in enumerate(given, start=1)]
    if len(set(names)) < len(names):
        raise DataUnreadable(
            f"two columns of {path} have the same name: {names}",
            remedy="rename one, or give --no-header if these are values",
        )
    return names, has_header


def _first_row(rows: pyarrow.Table) -> Sequence[str]:
    return [column[0].as_py().strip() for column in rows.columns]


def _has_header(rows: pyarrow.Table, *, known: set[str]) -> bool:
    """Return whether the first row looks like names and not like the values below it."""
    first = _first_row(rows)
    if first == [str(number) for number in range(len(first))]:
        return True  # as pandas names columns
    names = [name for name in first if name]
    recurring = {
        name
        for name, column in zip(first, rows.columns, strict=True)
        if pc.index(column.slice(1), column[0]).as_py() >= 0
    }
    if known & {plain_name(name) for name in names if name not in recurring}:
        return True
    return (
        recurring.isdisjoint(names)
        and len(set(names)) == len(names)
        and not any(is_number(name) or len(name) > MAX_NAME for name in names)
    )


def _plain_numbers(
    columns: pyarrow.Table, *, allows_comma: bool, path: Path, emit: Emit
) -> pyarrow.Table:
    """Return a table whose columns of numbers have decimal points, and an empty text if missing."""
    pattern = rf"^\s*({WITH_COMMA}|{NUMBER})\s*$" if allows_comma else rf"^\s*({NUMBER})\s*$"
    for position, name in enumerate(columns.column_names):
        column = columns[position]
        if _without_missing(column[:SAMPLE_ROWS], pattern) is None:  # a column of texts
            continue
        filled = _without_missing(column, pattern)
        plain = column if filled is None else pc.replace_substring(filled, ",", ".")
        if plain.equals(column):
            continue
        columns = columns.set_column(position, name, plain)
        changes = []
        if pc.any(pc.match_substring(column, ",")).as_py():
            changes.append("commas are read as decimal; --task multi reads several labels")
        emptied = column.filter(pc.and_(pc.equal(plain, ""), pc.not_equal(column, "")))
        if len(emptied):
            words = ", ".join(map(repr, emptied.unique().to_pylist()))
            changes.append(f"{words} read as missing")
        emit(Info(f"numbers of {name!r} in {path}: {', '.join(changes)}"))
    return columns


def _without_missing(column: pyarrow.ChunkedArray, pattern: str) -> pyarrow.ChunkedArray | None:
    """Return a column of numbers without its words for missing ones; None if it has others."""
    is_number = pc.match_substring_regex(column, pattern)
    folded = pc.utf8_lower(pc.utf8_trim_whitespace(column))
    is_missing = pc.is_in(folded, value_set=pyarrow.array(["", *MISSING], "string"))
    if not (pc.any(is_number).as_py() and pc.all(pc.or_(is_number, is_missing)).as_py()):
        return None
    return pc.if_else(is_missing, "", column)


READER = Reader((".csv", ".tsv"), read, stream)
