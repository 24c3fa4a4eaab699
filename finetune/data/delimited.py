"""Tables whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from finetune.data.columns import LABEL_NAMES, TEXT_NAMES, plain_name
from finetune.data.encoding import TextFile
from finetune.data.mapped import collect
from finetune.data.numbers import plain_numbers
from finetune.data.source import DataOptions
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info
from finetune.tasks.labels import is_number
from finetune.tasks.multi import Multi

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_ROWS = 100
HEADER_ROWS = 10_000
MAX_NAME = 60
Result = TypeVar("Result")
# Excel's word on the delimiter, in a line above the header.
DELIMITER_LINE = re.compile(f"sep=([{''.join(DELIMITERS)}])\r?\n")
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

    def numbered_rows(self, text: TextFile) -> Iterator[tuple[int, list[str]]]:
        """Yield each row that is not blank, as it is read, and the number of its first line.

        A first line that says the delimiter is no row.

        Raises:
            DataUnreadable: If a quote does not end, or a row has not as many values as the first.
        """
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
                is_delimiter_line = number == 1 and row == ["sep=", ""]
                if not is_delimiter_line and (len(row) > 1 or "".join(row).strip()):
                    count = count or len(row)
                    if not "".join(row[count:]).strip():
                        row = row[:count]  # spreadsheets end rows with blank values
                    if len(row) != count:
                        complaint = f"has {len(row)} values and not {count}, one for each column"
                        raise _unreadable(number, complaint, text)
                    yield number, row


def read_delimited(
    text: TextFile, options: DataOptions, *, emit: Emit
) -> tuple[pyarrow.Table, Callable[[], list[int]]]:
    """Return the columns of delimited values, and what finds the line on which each row begins.

    A value may be in quotes and then hold delimiters, line ends and doubled quotes. Where
    several delimiters fit, the suffix of the unpacked file decides. Unless the options say it,
    a first row that has a column they name, or looks like names, is one of names.

    Raises:
        DataUnreadable: If the file is empty, or a row has not one value for each column.
    """
    dialect, rows = _read_in_dialect(text, partial(_read_rows, text), emit=emit)
    columns, has_header = name_columns(rows, options, path=text.path, emit=emit)
    delimiter = DELIMITERS[dialect.delimiter]
    emit(Info(f"reading {text.path}: encoding {text.encoding}, delimiter {delimiter}"))
    # Excel delimits by semicolons where a comma is decimal.
    allows_comma = dialect.delimiter == ";" and options.task != Multi.name
    columns = plain_numbers(columns, allows_comma=allows_comma, path=text.path, emit=emit)

    def find_lines() -> list[int]:
        return [number for number, _ in dialect.numbered_rows(text)][has_header:]

    return columns, find_lines


def stream_delimited(
    text: TextFile, options: DataOptions, *, emit: Emit
) -> tuple[list[str], Iterator[list[str]]]:
    """Return the names of the columns, and the rows as they are read.

    Options and errors are those of :func:`read_delimited`. The rows are checked once before, so
    that an error comes before the first row.
    """

    def check(dialect: Dialect) -> None:
        deque(dialect.numbered_rows(text), maxlen=0)

    dialect, _ = _read_in_dialect(text, check, emit=emit)
    rows = (row for _, row in dialect.numbered_rows(text))
    sample = list(islice(rows, HEADER_ROWS))
    if not sample:
        raise _empty(text.path)
    names, has_header = _find_names(_table_of(sample), options, path=text.path)
    return names, chain(sample[has_header:], rows)


def _read_in_dialect(
    text: TextFile, read: Callable[[Dialect], Result], *, emit: Emit
) -> tuple[Dialect, Result]:
    """Return the dialect of a text, and what a function makes of the text in it."""
    dialect = _find_dialect(text)
    try:
        return dialect, read(dialect)
    except DataUnreadable:
        if dialect.delimiter != "\t":
            raise
    # Many files with tabs know no quotes, and a text may then begin with one and never end it.
    dialect = replace(dialect, quote=None)
    result = read(dialect)
    emit(Info(f"quotes in {text.path} are part of the texts"))
    return dialect, result


def name_columns(
    rows: pyarrow.Table, options: DataOptions, *, path: Path, emit: Emit
) -> tuple[pyarrow.Table, bool]:
    """Name the columns by the first row or by their position; drop those that are all blank.

    Whether the first row has names is returned too; see :func:`read_delimited`.

    Raises:
        DataUnreadable: If two columns have the same name, there are no rows, or the names are in
            the second one.
    """
    names, has_header = _find_names(rows, options, path=path)
    table = rows.slice(1) if has_header else rows
    blank = [
        position
        for position, name in enumerate(_first_row(rows))
        if not (name and has_header) and not pc.any(pc.not_equal(table[position], "")).as_py()
    ]
    table = table.rename_columns(names)
    if blank and len(table):  # as spreadsheets write them
        emit(Info(f"blank columns of {path} dropped: {len(blank)}"))
        table = table.select([n for n in range(table.num_columns) if n not in blank])
    if not has_header:
        emit(Info(f"{path} has no header row: its columns are {', '.join(table.column_names)}"))
    if len(table) == 0:
        raise DataUnreadable(
            f"{path} has a header row, {table.column_names}, and no rows",
            remedy="write a row for each text",
        )
    return table, has_header


def _find_names(rows: pyarrow.Table, options: DataOptions, *, path: Path) -> tuple[list[str], bool]:
    """Return the names of the columns, and whether the first row has them."""
    known = {*TEXT_NAMES, *LABEL_NAMES, *map(plain_name, options.named_columns)}
    has_header = options.header
    if has_header is None:
        _refuse_title(rows, known=known, path=path)
        has_header = _has_header(rows, known=known)
    given = _first_row(rows) if has_header else [""] * rows.num_columns
    names = [name or f"column{position}" for position, name in enumerate(given, start=1)]
    if len(set(names)) < len(names):
        raise DataUnreadable(
            f"two columns of {path} have the same name: {names}",
            remedy="rename one, or give --no-header if these are values",
        )
    return names, has_header


def _first_row(rows: pyarrow.Table) -> list[str]:
    return [column[0].as_py().strip() for column in rows.columns]


def _find_dialect(text: TextFile) -> Dialect:
    """Return the dialect in which most of the first rows have as many values as the first one.

    The first line may say the delimiter. Of several, it is the one of commas in a ``.csv`` and the
    one of tabs elsewhere: texts have commas. csv.Sniffer takes apostrophes in texts for quotes, and
    fails on quoted line ends.
    """
    sample = next(text.pieces(), "")
    stated = DELIMITER_LINE.match(sample)
    sample = sample[stated.end() if stated else 0 :]

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

    likely = "," if text.content.name.suffix.lower() == ".csv" else "\t"
    delimiters = sorted(stated[1] if stated else DELIMITERS, key=lambda one: one != likely)
    return max((Dialect(*both) for both in product(delimiters, "\"'")), key=score)


def _read_rows(text: TextFile, dialect: Dialect) -> pyarrow.Table:
    """Return all rows, the first one included, in columns named 0, 1 and so on."""
    first = next(dialect.numbered_rows(text), None)
    if first is None:
        raise _empty(text.path)
    table = _read_by_arrow(text, dialect, count=len(first[1]))
    if table is not None:
        return table
    # Row by row: to say which one is wrong, or for what Arrow refuses, such as lines of spaces.
    return _table_of(row for _, row in dialect.numbered_rows(text))


def _empty(path: Path) -> DataUnreadable:
    remedy = "write a header row, such as text,label, and rows"
    return DataUnreadable(f"{path} is empty", remedy=remedy)


def _table_of(rows: Iterable[Sequence[str]]) -> pyarrow.Table:
    columns = [pyarrow.array(values, "string") for values in zip(*rows, strict=True)]
    return pyarrow.table(columns, names=list(map(str, range(len(columns)))))


def _read_by_arrow(text: TextFile, dialect: Dialect, *, count: int) -> pyarrow.Table | None:
    """Return the rows of a well-formed file, or ``None``."""
    quote = dialect.quote
    if quote and not any(quote in piece for piece in text.pieces()):
        quote = None
    names = [str(position) for position in range(count)]
    try:
        if quote:  # Arrow accepts characters behind a closing quote
            with text.open() as lines:
                deque(dialect.reader(lines), maxlen=0)
        reader = arrow_csv.open_csv(
            text.open_for_arrow(),
            read_options=arrow_csv.ReadOptions(
                block_size=BLOCK_BYTES,
                column_names=names,
                skip_rows=int(DELIMITER_LINE.match(next(text.pieces(), "")) is not None),
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=dialect.delimiter,
                quote_char=quote or False,
                newlines_in_values=quote is not None,
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
            ),
        )
        return collect(pyarrow.Table.from_batches([batch]) for batch in reader)
    except (csv.Error, pyarrow.ArrowInvalid):
        return None


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


def _refuse_title(rows: pyarrow.Table, *, known: set[str], path: Path) -> None:
    """Raise an error if the second row names the columns, below a title."""
    second = [value for column in rows.columns for value in column[1:2].to_pylist()]
    if known.isdisjoint(map(plain_name, _first_row(rows))) and (
        len(known.intersection(map(plain_name, second))) > 1
    ):
        raise DataUnreadable(
            f"the names of the columns of {path} are in its second row: {second}",
            remedy="delete the row above it, or give --no-header if these are values",
        )


def _unreadable(number: int, complaint: str, text: TextFile) -> DataUnreadable:
    with text.open() as lines:
        line = next(islice(lines, number - 1, None))
    return DataUnreadable(
        f"line {number} of {text.path} {complaint}: {line.strip()[:60]!r}",
        remedy='put a value that holds a delimiter, a quote or a line end in quotes: "a ""b"", c"',
    )
