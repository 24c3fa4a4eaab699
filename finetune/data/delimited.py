"""Tables whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from finetune.data.columns import LABEL_NAMES, TEXT_NAMES, is_number, plain_name
from finetune.errors import DataUnreadable
from finetune.events import Emit, Stage

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_CHARACTERS = 2**20
SAMPLE_ROWS = 100
HEADER_ROWS = 10_000
LONGEST_NAME = 60
OpenText = Callable[[], TextIO]
# A row must fit into one block.
BLOCK_BYTES = 2**24
# The module's own limit is 131,072 characters, fewer than a long document has.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class Dialect:
    """The delimiter of values, and the quote around those that contain it; ``None`` for none."""

    delimiter: str
    quote: str | None

    def reader(self, lines: Iterable[str]) -> Any:
        """Return a reader of rows that raises ``csv.Error`` where quotes are wrong."""
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            strict=True,
        )

    def numbered_rows(self, text: str, *, path: Path) -> Iterator[tuple[int, list[str]]]:
        """Yield each row that is not blank, and the number of its first line.

        Raises:
            DataUnreadable: If a quote does not end, or a row has not as many values as the first.
        """
        return self.stream_rows(lambda: io.StringIO(text, newline=""), path=path)

    def stream_rows(self, open_text: OpenText, *, path: Path) -> Iterator[tuple[int, list[str]]]:
        """Yield the same from a text that is opened, without holding it in memory."""
        lines = open_text()
        reader, count = self.reader(lines), 0
        while True:
            number = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise _unreadable(number, f"has {error}", open_text=open_text, path=path) from error
            if len(row) > 1 or "".join(row).strip():
                count = count or len(row)
                if not "".join(row[count:]).strip():
                    row = row[:count]  # spreadsheets end rows with blank values
                if len(row) != count:
                    complaint = f"has {len(row)} values and not {count}, one for each column"
                    raise _unreadable(number, complaint, open_text=open_text, path=path)
                yield number, row


@dataclass(frozen=True)
class DelimitedTable:
    """The columns of a table, how it is written, and whether its first row names the columns."""

    columns: pyarrow.Table
    dialect: Dialect
    has_header: bool


def read_delimited(
    text: str, *, header: bool | None, known: Iterable[str], path: Path, emit: Emit
) -> DelimitedTable:
    """Read a table of delimited values.

    A value may be in quotes and then hold delimiters, line ends and doubled quotes.

    Args:
        text: The file's text.
        header: Whether the first row names the columns; ``None`` to detect it.
        known: Names of columns that the user gave.
        path: What errors call the file.
        emit: Receives progress events.

    Raises:
        DataUnreadable: If the file is empty, or a row has not one value for each column.
    """
    dialect = _find_dialect(text)
    try:
        columns = _read_rows(text, dialect, path=path)
    except DataUnreadable:
        if dialect.delimiter != "\t":
            raise
        # Many files with tabs know no quotes, and a text may then begin with one and never end it.
        dialect = replace(dialect, quote=None)
        columns = _read_rows(text, dialect, path=path)
        emit(Stage(f"quotes in {path} are part of the texts"))
    first, columns, has_header = _split_header(columns, header=header, known=known)
    names = [name.strip() or f"column{position}" for position, name in enumerate(first, start=1)]
    table = _drop_blank(first, pyarrow.table(columns, names=names), path=path, emit=emit)
    if not has_header:
        emit(Stage(f"{path} has no header row: its columns are {', '.join(table.column_names)}"))
    if len(set(table.column_names)) < table.num_columns:
        raise DataUnreadable(
            f"two columns of {path} have the same name: {table.column_names}",
            remedy="rename one, or give --no-header if these are values",
        )
    if len(table) == 0:
        raise DataUnreadable(
            f"{path} has a header row, {table.column_names}, and no rows",
            remedy="write a row for each text",
        )
    return DelimitedTable(table, dialect, has_header)


def _find_dialect(text: str) -> Dialect:
    """Return the dialect in which most of the first rows have as many values as the first one.

    csv.Sniffer takes apostrophes in texts for quotes, and fails on quoted line ends.
    """
    sample = text[:SAMPLE_CHARACTERS]

    def score(dialect: Dialect) -> float:
        is_single = dialect.quote == "'"
        if is_single and not re.search(rf"(?m)(^|[{dialect.delimiter}])'", sample):
            return -1.0
        lines = io.StringIO(sample, newline="")
        reader = csv.reader(
            lines, delimiter=dialect.delimiter, quotechar=dialect.quote, strict=is_single
        )
        try:
            rows = [row for row in islice(reader, SAMPLE_ROWS) if row]
        except csv.Error:
            return -1.0
        if not rows or len(rows[0]) < 2:
            return 0.0
        is_even = [len(row) == len(rows[0]) for row in rows]
        values = [value for row in rows for value in row if value]
        still_quoted = [len(value) > 1 and value[0] == value[-1] == "'" for value in values]
        return sum(is_even) / len(rows) - sum(still_quoted) / (len(values) or 1)

    return max((Dialect(*both) for both in product(DELIMITERS, "\"'")), key=score)


def _read_rows(text: str, dialect: Dialect, *, path: Path) -> list[pyarrow.ChunkedArray]:
    """Return the columns, the first row included."""
    rows = (row for _, row in dialect.numbered_rows(text, path=path))
    first = next(rows, None)
    if first is None:
        raise DataUnreadable(
            f"{path} is empty", remedy="write a header row, such as text,label, and rows"
        )
    columns = _columns_by_arrow(text, dialect, count=len(first))
    if columns is None:
        # Row by row: to say which one is wrong, or for what Arrow refuses, such as lines of spaces.
        columns = list(map(pyarrow.array, zip(first, *rows, strict=True)))
    return [pyarrow.chunked_array(column, "string") for column in map(_chunks, columns)]


def _columns_by_arrow(text: str, dialect: Dialect, *, count: int) -> list[Any] | None:
    """Return the columns of a well-formed file, or ``None``."""
    quote = dialect.quote if dialect.quote and dialect.quote in text else None
    names = [str(position) for position in range(count)]
    try:
        if quote:  # Arrow accepts characters behind a closing quote
            deque(dialect.reader(io.StringIO(text, newline="")), maxlen=0)
        table = arrow_csv.read_csv(
            pyarrow.BufferReader(text.lstrip("\r\n").encode()),
            read_options=arrow_csv.ReadOptions(block_size=BLOCK_BYTES, column_names=names),
            parse_options=arrow_csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=quote or False,
                newlines_in_values=quote is not None,
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
            ),
        )
    except (csv.Error, pyarrow.ArrowInvalid):
        return None
    return list(table.columns)


def _chunks(column: Any) -> list[Any]:
    return column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]


def stream_delimited(
    open_text: OpenText, *, header: bool | None, known: Iterable[str], path: Path
) -> tuple[list[str], Iterator[list[str]]]:
    """Return the names of the columns, and the rows as they are read.

    Args and errors are those of :func:`read_delimited`. The rows are checked once before, so that
    an error comes before the first row.
    """
    with open_text() as file:
        dialect = _find_dialect(file.read(SAMPLE_CHARACTERS))
    try:
        deque(dialect.stream_rows(open_text, path=path), maxlen=0)
    except DataUnreadable:
        if dialect.delimiter != "\t":
            raise
        dialect = replace(dialect, quote=None)
    rows = (row for _, row in dialect.stream_rows(open_text, path=path))
    sample = list(islice(rows, HEADER_ROWS))
    if not sample:
        raise DataUnreadable(
            f"{path} is empty", remedy="write a header row and a row for each text"
        )
    columns = [pyarrow.chunked_array([column], "string") for column in zip(*sample, strict=True)]
    first, _, has_header = _split_header(columns, header=header, known=known)
    names = [name.strip() or f"column{position}" for position, name in enumerate(first, start=1)]
    return names, chain(sample[has_header:], rows)


def _split_header(
    columns: Sequence[pyarrow.ChunkedArray], *, header: bool | None, known: Iterable[str]
) -> tuple[list[str], list[pyarrow.ChunkedArray], bool]:
    """Return the names of the columns, empty without a header row, and the values below it."""
    first = [column[0].as_py() for column in columns]
    values = [column.slice(1) for column in columns]
    known = {*TEXT_NAMES, *LABEL_NAMES, *map(plain_name, known)}
    if _has_header(first, values, known=known) if header is None else header:
        return first, values, True
    return [""] * len(first), list(columns), False


def _has_header(
    first: Sequence[str], columns: Sequence[pyarrow.ChunkedArray], *, known: Iterable[str]
) -> bool:
    """Return whether the first row looks like names and not like the values below it."""
    if [name.strip() for name in first] == [str(number) for number in range(len(first))]:
        return True  # as pandas names columns
    names = [name.strip() for name in first if name.strip()]
    recurring = {
        name.strip()
        for name, column in zip(first, columns, strict=True)
        if pc.index(column, name).as_py() >= 0
    }
    if {plain_name(name) for name in names if name not in recurring}.intersection(known):
        return True
    return (
        recurring.isdisjoint(names)
        and len(set(names)) == len(names)
        and not any(is_number(name) or len(name) > LONGEST_NAME for name in names)
    )


def _drop_blank(
    first: Sequence[str], table: pyarrow.Table, *, path: Path, emit: Emit
) -> pyarrow.Table:
    """Drop columns without a name and a value, as spreadsheets write them."""
    blank = [
        position
        for position, name in enumerate(first)
        if not name.strip() and not pc.any(pc.not_equal(table[position], "")).as_py()
    ]
    if blank and len(table):
        emit(Stage(f"blank columns of {path} dropped: {len(blank)}"))
        return table.select([n for n in range(table.num_columns) if n not in blank])
    return table


def _unreadable(number: int, complaint: str, *, open_text: OpenText, path: Path) -> DataUnreadable:
    with open_text() as lines:
        line = next(islice(lines, number - 1, None))
    return DataUnreadable(
        f"line {number} of {path} {complaint}: {line.strip()[:60]!r}",
        remedy='put a value that holds a delimiter, a quote or a line end in quotes: "a ""b"", c"',
    )
