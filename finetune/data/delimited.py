"""Tables whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from finetune.config.schema import DataConfig
from finetune.data.columns import LABEL_NAMES, OPTIONS, TEXT_NAMES, plain_name
from finetune.data.encoding import TextFile, find_text
from finetune.data.mapped import collect
from finetune.data.packed import Content
from finetune.data.reader import Columns, Reader, Row, columns_of
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info, ignore
from finetune.tasks.labels import MISSING, NUMBER, is_number
from finetune.tasks.multi import Multi

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_ROWS, SAMPLE_CHARACTERS = 100, 2**20
HEADER_ROWS = 1_000
# A row must fit into one block.
BLOCK_BYTES = 2**24
MAX_NAME = 60
# Of lines of prose, fewer have as many commas as the first one.
MIN_SCORE = 0.5
ADD_LABELS = (
    "add a column of labels, or name a file of labels, one a line, with --labels-file; texts"
    " without labels are for finetune predict"
)
ESCAPED_QUOTE = r"(?<!\\)((?:\\\\)*)\\%s"
MIN_ROWS_BELOW = 10
# The module's own limit is 131,072 characters, fewer than a long document has.
csv.field_size_limit(2**31 - 1)
# A row, and the number of its first line.
NumberedValues = tuple[int, list[str]]


@dataclass(frozen=True)
class Delimited:
    """A file of values between delimiters; some are between quotes, unless these are empty."""

    text: TextFile
    delimiter: str
    quote: str
    skips_spaces: bool = False

    def reader(self, lines: Iterable[str]) -> Any:
        """Return Python's reader of the lines."""
        quoting: Any = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        return csv.reader(
            lines, delimiter=self.delimiter, quotechar=self.quote or None, quoting=quoting,
            skipinitialspace=self.skips_spaces, strict=True,
        )  # fmt: skip

    def values(self) -> Iterator[NumberedValues]:
        """Yield each row that is not blank, the first of which says how many values a row has."""
        with self.text.open() as lines:
            reader = self.reader(lines)
            count, line_before = 0, 0
            try:
                for row in reader:
                    if len(row) > 1 or "".join(row).strip():
                        count = count or len(row)
                        if len(row) > count and not "".join(row[count:]).strip():
                            row = row[:count]  # spreadsheets end rows with blank values
                        if len(row) != count:
                            found = f"{len(row)} values instead of {count}, as the first row"
                            raise csv.Error(found)
                        yield line_before + 1, row
                    line_before = reader.line_num
            except csv.Error as error:
                with self.text.open() as again:
                    line = next(islice(again, line_before, None)).strip()
                remedy = 'put values with a delimiter, quotes or a line end in quotes: "a ""b"", c"'
                raise DataUnreadable(
                    f"line {line_before + 1} of {self.text.path} has {error}: {line[:60]!r}",
                    remedy=f"{remedy}; {ADD_LABELS}" if count == 1 else remedy,
                ) from error
        if not count:
            remedy = "write a header row, such as text,label, and rows"
            raise DataUnreadable(f"{self.text.path} is empty", remedy=remedy)

    def is_right(self) -> bool:
        """Return whether the file reads with these quotes.

        Many with tabs know none, and a text may then begin with a quote and never end it.
        """
        with suppress(DataUnreadable):
            deque(self.values(), maxlen=0)
            return True
        return False


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the rows; whether the first one names the columns is guessed unless options say it."""
    table = _open(content, options, emit)
    return name_values(table.values(), options, path=content.path, emit=emit)


def _open(content: Content, options: DataConfig, emit: Emit) -> Delimited:
    """Find the encoding, the delimiter and the quotes of a file."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    with text.open() as file:
        sample = file.read(SAMPLE_CHARACTERS)
    delimiter, lines_above = _find_delimiter(sample, text)
    quote = _find_quote(sample, delimiter)
    between = rf"(?<!{quote}){quote}{re.escape(delimiter)} +{quote}(?!{quote})"
    skips_spaces = re.search(between, sample) is not None
    emit(Info(f"reading {text.path}: encoding {text.encoding}, delimiter {DELIMITERS[delimiter]}"))
    if lines_above:
        emit(Info(f"{lines_above} lines above the table in {text.path} are left out"))
        below = "".join(text.pieces()).split("\n", lines_above)[-1]
        blanked = ("\n" * lines_above + below).encode()
        text = TextFile(replace(content, unpacked=blanked), "utf-8")
    table = Delimited(text, delimiter, quote, skips_spaces)
    if quote == "'":
        emit(Info(f"values of {text.path} are in single quotes"))
    if text.has_bytes(f"\\{quote}".encode()) and not table.is_right():
        doubled = re.sub(ESCAPED_QUOTE % quote, rf"\1{quote * 2}", "".join(text.pieces())).encode()
        unescaped = replace(table, text=TextFile(replace(content, unpacked=doubled), "utf-8"))
        if unescaped.is_right():
            emit(Info(f"\\{quote} in {text.path} is read as a quote"))
            return unescaped
    if delimiter == "\t" and text.has_bytes(quote.encode()) and not table.is_right():
        emit(Info(f"quotes in {text.path} are read as part of the texts"))
        return replace(table, quote="")
    return table


def columns(content: Content, options: DataConfig, emit: Emit) -> Columns:
    """Read the columns; those of numbers have decimal points, and an empty text if missing."""
    file = _open(content, options, emit)
    try:
        table = _read_columns(file, options, emit)
    except (csv.Error, pyarrow.ArrowInvalid):
        # To say which row is wrong, or for what Arrow refuses, such as lines of spaces.
        named = name_values(file.values(), options, path=content.path, emit=ignore)
        table = columns_of(named, path=content.path, emit=emit)
    # Excel delimits by semicolons where a comma is decimal.
    has_commas = file.delimiter == ";" and options.task != Multi.name
    number = rf"({NUMBER}|[+-]?[0-9]+,[0-9]+)" if has_commas else f"({NUMBER})"
    missing = rf"(?i)^\s*({'|'.join(MISSING)})\s*$"
    for position, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not all(_holds_numbers(part, number) for part in (column[:SAMPLE_ROWS], column)):
            continue
        plain = pc.replace_substring(pc.replace_substring_regex(column, missing, ""), ",", ".")
        if others := column.filter(pc.not_equal(column, plain)).unique().to_pylist():
            table = table.set_column(position, name, plain)
            found = f"numbers of {name!r} in {content.path}, such as {others[0]!r}"
            emit(Info(f"{found}: a comma is decimal, a word says that one is missing"))
    return table, {}


def _read_columns(table: Delimited, options: DataConfig, emit: Emit) -> pyarrow.Table:
    """Read the columns by Arrow."""
    first = [row for _, row in islice(table.values(), HEADER_ROWS)]
    names, has_header = _find_names(first, options, path=table.text.path, emit=emit)
    if table.skips_spaces:
        raise csv.Error("Arrow skips no spaces before quotes")
    has_quotes = bool(table.quote) and table.text.has_bytes(table.quote.encode())
    if has_quotes:  # Arrow accepts characters behind a closing quote
        with table.text.open() as lines:
            deque(table.reader(lines), maxlen=0)
    batches = arrow_csv.open_csv(
        table.text.open_for_arrow(),
        read_options=arrow_csv.ReadOptions(block_size=BLOCK_BYTES, column_names=names),
        parse_options=arrow_csv.ParseOptions(
            delimiter=table.delimiter,
            quote_char=table.quote if has_quotes else False,
            newlines_in_values=has_quotes,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        ),
    )
    columns = collect(pyarrow.Table.from_batches([batch]) for batch in batches)
    return columns.slice(int(has_header))


def _holds_numbers(column: pyarrow.ChunkedArray, number: str) -> bool:
    """Return whether a column holds numbers, and beside them only what says that one is missing."""
    is_number = pc.match_substring_regex(column, rf"^\s*{number}\s*$")
    either = rf"(?i)^\s*({number}|{'|'.join(MISSING)})?\s*$"
    is_either = pc.match_substring_regex(column, either)
    return bool(pc.any(is_number).as_py() and pc.all(is_either).as_py())


def _find_delimiter(sample: str, text: TextFile) -> tuple[str, int]:
    """Return the delimiter by which most rows have as many values as the first, and lines above it.

    Above a table may be a few lines without delimiters, such as a title, if all rows then have as
    many values. Of several delimiters, commas go first in a ``.csv`` and tabs elsewhere, since
    texts have commas.
    """
    if found := re.match(r"sep=([,;|\t])\r?\n", sample):  # of Excel
        return found[1], 1

    def score(delimiter: str) -> tuple[float, int]:
        lines = io.StringIO(sample, newline="")
        reader = csv.reader(lines, delimiter=delimiter, quotechar=_find_quote(sample, delimiter))
        rows = [(row, reader.line_num) for row in islice(reader, SAMPLE_ROWS) if row]
        title = list(takewhile(lambda numbered: len(numbered[0]) == 1, rows))
        lengths = [len(row) for row, _ in rows[len(title) :]]
        is_uniform = len(set(lengths)) == 1 and len(lengths) >= MIN_ROWS_BELOW
        is_header = any(plain_name(row[0]) in TEXT_NAMES for row, _ in title)
        if not lengths or (title and (is_header or not is_uniform)):
            return 0.0, 0
        return lengths.count(lengths[0]) / len(lengths), title[-1][1] if title else 0

    suffix = text.content.suffix
    likely = "," if suffix == ".csv" else "\t"
    scores = {one: score(one) for one in sorted(DELIMITERS, key=lambda one: one != likely)}
    best = max(scores, key=lambda delimiter: scores[delimiter][0])
    is_prose = scores[best][0] < MIN_SCORE and len(sample.splitlines()) > 1
    if suffix not in READER.suffixes and is_prose:
        complaint = f"{text.path} has one text a line, and no labels behind"
        listed = ", ".join(DELIMITERS.values())
        raise DataUnreadable(f"{complaint} a {listed}", remedy=ADD_LABELS)
    return best, scores[best][1]


def _find_quote(sample: str, delimiter: str) -> str:
    """Return the single quote if nearly all lines have values between two, else the double one."""
    lines = list(filter(str.strip, islice(io.StringIO(sample), SAMPLE_ROWS)))
    between = re.compile(rf"(^|{re.escape(delimiter)})\s*'.*'\s*({re.escape(delimiter)}|$)")
    is_single = '"' not in sample and len(list(filter(between.search, lines))) > 0.9 * len(lines)
    return "'" if is_single else '"'


def name_values(
    numbered: Iterator[NumberedValues], options: DataConfig, *, path: Path, emit: Emit
) -> Iterator[Row]:
    """Yield rows by the names of their columns: the first row, if it is a header, or positions."""
    first = list(islice(numbered, HEADER_ROWS))
    names, has_header = _find_names([row for _, row in first], options, path=path, emit=emit)
    for number, row in chain(first[int(has_header) :], numbered):
        yield number, dict(zip(names, row, strict=True))


def _find_names(
    rows: Sequence[Sequence[str]], options: DataConfig, *, path: Path, emit: Emit
) -> tuple[list[str], bool]:
    """Return the names of the columns, and whether the first row is a header that has them."""
    has_header = options.header
    if has_header is None:
        has_header = _has_header(rows, options)
    header = rows[0] if has_header else [""] * len(rows[0])
    names = [name.strip() or f"column{position}" for position, name in enumerate(header, start=1)]
    if len(set(names)) < len(names):
        raise DataUnreadable(
            f"two columns of {path} have the same name: {names}",
            remedy="rename one, or give --no-header if these are values",
        )
    if not has_header:
        emit(Info(f"{path} has no header row: its columns are {', '.join(names)}"))
    if has_header and len(rows) == 1:
        raise DataUnreadable(
            f"{path} has a header row, {names}, but no rows", remedy="add one row per text"
        )
    return names, has_header


def _has_header(rows: Sequence[Sequence[str]], options: DataConfig) -> bool:
    """Return whether the first row looks like names and not like the values below it."""
    first = [value.strip() for value in rows[0]]
    if first == [str(number) for number in range(len(first))]:
        return True  # as pandas names columns
    others = [row for row in rows[1:] if row != rows[0]]  # a header may be repeated
    recurring = {
        name
        for position, name in enumerate(first)
        if any(row[position] == rows[0][position] for row in others)
    }
    named = [getattr(options, option) or "" for option in OPTIONS]
    named += getattr(options, "earlier_columns", {}).values()
    named = [part for name in named for part in name.split(",") if part]
    known = {*TEXT_NAMES, *LABEL_NAMES, *map(plain_name, named)}
    names = [name for name in first if name]
    return bool(known & {plain_name(name) for name in names if name not in recurring}) or (
        recurring.isdisjoint(names)
        and len(set(names)) == len(names)
        and not any(is_number(name) or len(name) > MAX_NAME for name in names)
    )


READER = Reader((".csv", ".tsv"), rows, columns)
