"""Reads delimited tables: finds the delimiter, the header and the first row."""

import csv
import io
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from finetune.config.schema import DataConfig
from finetune.data.columns import LABEL_NAMES, OPTIONS, TEXT_NAMES, OtherData, plain_name
from finetune.data.encoding import TextFile
from finetune.data.packed import WORDS
from finetune.errors import DataUnreadableError
from finetune.events import Info, emit
from finetune.tasks.labels import is_number

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
SAMPLE_ROWS, SAMPLE_CHARACTERS = 100, 2**20
HEADER_ROWS = 1_000
# A row must fit into one block.
BLOCK_BYTES = 2**24
MAX_NAME = 60
# Minimum fraction of lines with as many delimiters as the first line. Prose has fewer.
MIN_SCORE = 0.5
# Penalty for a delimiter that explains all lines except a title above the table.
TITLE_PENALTY = 0.1
MAX_TITLE_ROWS, MIN_ROWS_BELOW = 10, 10
ADD_LABELS = WORDS["remedies"]["labels"]
ESCAPED_QUOTE = r"(?<!\\)((?:\\\\)*)\\%s"
# A comma in a decimal number, or between words.
PROSE_COMMA = re.compile(r"(?<=\d),(?=\d)|, ")
TOTAL = re.compile(WORDS["total"])
# The default limit of 131,072 characters is too small for long documents.
csv.field_size_limit(2**31 - 1)


@dataclass(frozen=True)
class FileFormat:
    """The format of a file, for writing another file in the same format.

    Args:
        encoding: A Python codec name. ``utf-8-sig`` and ``utf-16`` start with a byte-order mark.
        metadata: Schema metadata of a Parquet file, with the class names.
    """

    delimiter: str = ","
    quote: str = '"'
    encoding: str = "utf-8"
    has_header: bool = True
    line_end: str = "\n"
    metadata: Mapping[bytes, bytes] | None = None


@dataclass(frozen=True)
class Delimited:
    """A file of delimited values and its format. An empty ``format.quote`` means no quotes."""

    text: TextFile
    format: FileFormat
    lines_above: int = 0
    skips_spaces: bool = False
    escapes_quotes: bool = False

    def _lines(self) -> Iterator[str]:
        quote = self.format.quote
        pattern, doubled = re.compile(ESCAPED_QUOTE % quote), rf"\1{quote * 2}"
        with self.text.open() as file:
            for line in islice(file, self.lines_above, None):
                yield pattern.sub(doubled, line) if self.escapes_quotes else line

    def reader(self) -> Any:
        """Return a ``csv.reader`` for the lines."""
        quote = self.format.quote
        options: dict[str, Any] = {"delimiter": self.format.delimiter, "strict": True}
        options["skipinitialspace"] = self.skips_spaces
        quotes = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
        return csv.reader(self._lines(), **options, **quotes)

    def values(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each non-blank row with its line. The first row sets the number of values."""
        reader, count, line_before = self.reader(), 0, 0
        try:
            for row in reader:
                is_filled = len(row) > 1 or "".join(row).strip()
                if is_filled or (row and count == 1):  # in a single column, a blank text is a row
                    count = count or len(row)
                    if not "".join(row[count:]).strip():
                        row = row[:count]  # spreadsheets end rows with blank values
                    if len(row) != count:
                        raise csv.Error(f"{len(row)} values, but the first row has {count}")
                    yield self.lines_above + line_before + 1, row
                line_before = reader.line_num
        except csv.Error as error:
            line = next(islice(self._lines(), line_before, None)).strip()
            place = f"line {self.lines_above + line_before + 1} of {self.text.path}"
            raise DataUnreadableError(
                f"{place} has {error}: {line[:60]!r}",
                remedy='put quotes around values with a delimiter, quotes or a line end: "a ""b""'
                ', c"' + (f"; {ADD_LABELS}" if count == 1 else ""),
            ) from error
        if not count:
            remedy = "write a header row, such as text,label, and rows"
            raise DataUnreadableError(f"{self.text.path} is empty", remedy=remedy)

    def find_lines(self, rows: int) -> NDArray[np.int64]:
        """Return the line of each row below the header: [rows]."""
        below = islice(self.values(), self.format.has_header, None)
        first, ends, last = next(below, (0, []))[0], 0, b""
        for last in self.text.chunks():
            ends += last.count(b"\n")
        # Lines and rows correspond unless lines are blank or end within quotes.
        if ends + (not last.endswith(b"\n")) == first - 1 + rows:
            return np.arange(first, first + rows)
        return np.array([first, *(number for number, _ in below)][:rows], np.int64)


Read = tuple[pyarrow.Table, NDArray[np.int64], Delimited]


def read_table(text: TextFile, options: DataConfig) -> Read:
    """Read the columns and the line of each row. Guess the header unless it is set."""
    file = _find_dialect(text, options)
    # Spark and MySQL write \\" for a quote; in many files with tabs, quotes are part of the texts.
    others = {f"\\{file.format.quote} is read as a quote": replace(file, escapes_quotes=True)}
    if file.format.delimiter == "\t":
        without = replace(file, format=replace(file.format, quote=""))
        others["quotes are read as part of the texts"] = without
    try:
        return _read_table(file, options)
    except DataUnreadableError:
        for message, other in others.items():
            with suppress(DataUnreadableError):
                read = _read_table(other, options)
                emit(Info(f"{text.path}: {message}"))
                return read
        raise


def _read_table(file: Delimited, options: DataConfig) -> Read:
    numbered = list(islice(file.values(), HEADER_ROWS))
    names, has_header = find_names([row for _, row in numbered], options, path=file.text.path)
    file = replace(file, format=replace(file.format, has_header=has_header))
    if len(numbered) > has_header and not (file.skips_spaces or file.escapes_quotes):
        with suppress(csv.Error, pyarrow.ArrowInvalid):
            table = _read_by_arrow(file, names, first=numbered[has_header][0])
            return table, file.find_lines(len(table)), file
    # Reports invalid rows, and reads files that Arrow rejects, such as with lines of spaces.
    rows = islice(file.values(), has_header, None)
    pieces, lines = [], []
    while piece := list(islice(rows, HEADER_ROWS)):
        lines += [number for number, _ in piece]
        values = zip(*(row for _, row in piece), strict=True)
        pieces.append(pyarrow.table([pyarrow.array(column, "string") for column in values], names))
    return pyarrow.concat_tables(pieces), np.array(lines, np.int64), file


def _read_by_arrow(file: Delimited, names: Sequence[str], *, first: int) -> pyarrow.Table:
    """Read the columns with Arrow, starting at a line."""
    quote = file.format.quote
    has_quotes = bool(quote) and any(quote.encode() in chunk for chunk in file.text.chunks())
    if has_quotes:  # Arrow accepts characters after a closing quote
        deque(file.reader(), maxlen=0)
    parsing = {"delimiter": file.format.delimiter, "newlines_in_values": has_quotes}
    reading = {"block_size": BLOCK_BYTES, "column_names": names, "skip_rows": first - 1}
    as_text = dict.fromkeys(names, pyarrow.string())
    return arrow_csv.read_csv(
        file.text.open_for_arrow(),
        read_options=arrow_csv.ReadOptions(**reading),
        parse_options=arrow_csv.ParseOptions(**parsing, quote_char=has_quotes and quote),
        convert_options=arrow_csv.ConvertOptions(column_types=as_text, strings_can_be_null=False),
    )


def _find_dialect(text: TextFile, options: DataConfig) -> Delimited:
    with text.open() as lines:
        sample = lines.read(SAMPLE_CHARACTERS)
    delimiter, lines_above = _find_delimiter(sample, text, options)
    quote = _find_quote(sample, delimiter)
    end = rf"(?<=[^\r\n{re.escape(quote + delimiter)}]){quote}"
    between = rf"{end}{re.escape(delimiter)} +{quote}(?!{quote})"
    skips_spaces = re.search(between, sample) is not None
    quotes = ", single quotes" if quote == "'" else ""
    above = f", {lines_above:,} lines above the table are skipped" if lines_above else ""
    known = f"encoding {text.encoding}, delimiter {DELIMITERS[delimiter]}{quotes}{above}"
    emit(Info(f"reading {text.path}: {known}"))
    written = FileFormat(delimiter, quote, text.encoding, line_end=text.line_end())
    return Delimited(text, written, lines_above, skips_spaces)


def _find_delimiter(sample: str, text: TextFile, options: DataConfig) -> tuple[str, int]:
    """Return the delimiter that explains the lines best, and the lines above the table."""
    if mark := re.match(r"sep=([,;|\t])\r?\n", sample):  # written by Excel
        return mark[1], 1
    likely = "," if text.content.suffix == ".csv" else "\t"
    scores = {delimiter: _score(sample, delimiter, options) for delimiter in DELIMITERS}
    best = max(scores, key=lambda delimiter: (*scores[delimiter][:3], delimiter == likely))
    _, share, _, lines_above = scores[best]
    is_prose = share < MIN_SCORE and len(sample.splitlines()) > 1
    if is_prose and text.content.suffix not in (".csv", ".tsv"):
        raise DataUnreadableError(
            f"{text.path} has one text per line and no label column", remedy=ADD_LABELS
        )
    return (best, lines_above) if share else (likely, 0)  # no share: one column


def _score(sample: str, delimiter: str, options: DataConfig) -> tuple[bool, float, int, int]:
    """Score how well a delimiter explains the lines, and count the lines above the table.

    Column names of a run decide first, then the fraction of rows with as many values as the first,
    then the number of known names; commas only inside numbers or before spaces count less. Lines
    above a table, such as a title, are accepted if no delimiter explains all lines.
    """
    lines = io.StringIO(sample, newline="")
    reader = csv.reader(lines, delimiter=delimiter, quotechar=_find_quote(sample, delimiter))
    rows, lines_before, line = [], [], 0
    for row in islice(reader, SAMPLE_ROWS):
        if "".join(row).strip():
            rows.append(row)
            lines_before.append(line)
        line = reader.line_num
    if not rows:
        return False, 0.0, 0, 0
    start = find_start(rows, options)
    below = rows[start:]
    width, known = len(below[0]), len(_known(below[0], options))
    fitting = [len(row) >= width and not "".join(row[width:]).strip() for row in below]
    share = sum(fitting) / len(below) if width > 1 else 0.0
    if start and known < 2 and not rows[0][0].startswith("#"):
        is_header = len(below) > 2 and _has_header(below, options)
        is_title = share == 1 and (is_header or len(below) >= MIN_ROWS_BELOW)
        share = share - TITLE_PENALTY if is_title else 0.0
    is_of_run = width > 1 and bool(_named(options) & {plain_name(name) for name in below[0]})
    is_prose = delimiter == "," and len(PROSE_COMMA.findall(sample)) == sample.count(",") > 0
    return is_of_run, share, known - 2 * is_prose, lines_before[start]


def _find_quote(sample: str, delimiter: str) -> str:
    """Return the single quote if nearly all lines put it around values, else the double quote."""
    lines = list(filter(str.strip, islice(io.StringIO(sample), SAMPLE_ROWS)))
    between = re.compile(rf"(^|{re.escape(delimiter)})\s*'.*'\s*({re.escape(delimiter)}|$)")
    is_single = '"' not in sample and len(list(filter(between.search, lines))) > 0.9 * len(lines)
    return "'" if is_single else '"'


def find_start(rows: Sequence[Sequence[str]], options: DataConfig, *, is_grid: bool = False) -> int:
    """Return the number of rows above a table, such as a title or comments.

    A row with two known column names, or one column name of the run, is the header. Otherwise, rows
    above the table have one value, or a different number of values than all rows below. In a grid,
    such as a spreadsheet, each row has all columns.
    """
    for number, row in enumerate(rows[:MAX_TITLE_ROWS]):
        if len(_known(row, options)) >= 2 or _named(options) & set(map(plain_name, row)):
            return number
    if not is_grid and len(rows[0]) == 2 and not rows[0][0].strip():  # an index without a name
        return 0
    counts = [sum(map(bool, map(str.strip, row))) for row in rows]
    start = next((number for number, count in enumerate(counts) if count > 1), 0)
    widths = list(map(len, rows))
    below = max(i for i, width in enumerate([0, *widths[:-1]]) if width != widths[-1])
    if widths[-1] > 1 and below <= MAX_TITLE_ROWS and _has_header(rows[below:], options):
        start = max(start, below)
    is_comment = rows[0][0].startswith("#") and counts[0] == 1
    is_name = any(_known(row, options) for row in rows[:start])
    return start if is_grid or is_comment or not is_name else 0


def _named(options: DataConfig) -> set[str]:
    """Return the column names set by options or the run, without column numbers."""
    columns = [getattr(options, option) or "" for option in OPTIONS]
    columns += getattr(options, "earlier_columns", {}).values()
    names = {plain_name(name) for column in columns for name in column.split(",")}
    return {name for name in names if name and not name.isdigit()}


def _known(names: Iterable[str], options: DataConfig) -> set[str]:
    plain = {plain_name(name) for name in names if len(name) <= MAX_NAME}
    return plain & {*TEXT_NAMES, *LABEL_NAMES, *_named(options)}


def has_columns_of_run(line: str, options: DataConfig) -> bool:
    """Return whether a line contains column names of a run, with a delimiter other than a comma."""
    cells = {plain_name(cell.strip('"')) for cell in re.split(r"[\t;|]", line)}
    return len(cells) > 1 and bool(cells & _named(options))


def are_known_names(names: Iterable[object]) -> bool:
    """Return whether any of the names is a known text or label column name."""
    return bool(_known(map(str, names), DataConfig()))


def find_names(
    rows: Sequence[Sequence[str]], options: DataConfig, *, path: Path
) -> tuple[list[str], bool]:
    """Return the column names, and whether they come from a header in the first row."""
    has_header = _has_header(rows, options) if options.header is None else options.header
    names = complete_names(rows[0] if has_header else [""] * len(rows[0]), path=path)
    if not has_header:
        hint = "" if options.header is False else "; --header reads the first row as names"
        emit(Info(f"{path} has no header row: its columns are {', '.join(names)}{hint}"))
    elif len(rows) == 1:
        message = f"{path} has a header row, {names}, but no rows"
        raise DataUnreadableError(message, remedy="add one row per text")
    return names, has_header


def complete_names(header: Sequence[str], *, path: Path) -> list[str]:
    """Return the column names, with numbers for unnamed columns."""
    names = [name.strip() or f"column{number}" for number, name in enumerate(header, start=1)]
    if len(set(names)) < len(names):
        raise DataUnreadableError(
            f"duplicate column names in {path}: {names}",
            remedy="rename one of them; --no-header reads the first row of a .csv as values",
        )
    return names


def _has_header(rows: Sequence[Sequence[str]], options: DataConfig) -> bool:
    """Return whether the first row looks like names, unlike the values below it."""
    first = _without_marks(rows[0])
    # pandas names columns as in the second case.
    if count_survey_rows(rows[1:]) or first == [str(number) for number in range(len(first))]:
        return True
    others = [row for row in rows[1:] if _without_marks(row) != first]  # it may be repeated
    recurring = {
        name
        for position, name in enumerate(first)
        if any(row[position : position + 1] == [rows[0][position]] for row in others)
    }
    names = {name for name in first if name}
    if _known(names - recurring, options):
        return True
    if recurring & names or any(is_number(name) or len(name) > MAX_NAME for name in names):
        return False
    return not (isinstance(options, OtherData) and _is_text(first, others))


def _without_marks(row: Sequence[str]) -> list[str]:
    return [value.strip('\ufeff" ') for value in row]


def _is_text(first: Sequence[str], others: Sequence[Sequence[str]]) -> bool:
    """Return whether the first row contains a text like the rows below, not column names."""
    rows = [row for row in others[:SAMPLE_ROWS] if len(row) == len(first)]
    if not rows:
        return False
    columns = [*zip(*rows, strict=True)]
    for name, values in zip(first, columns, strict=True):
        patterns = (WORDS["patterns"][kind] for kind in ("number", "date"))
        is_typed = any(all(re.fullmatch(kind, value) for value in values) for kind in patterns)
        if is_typed or (name not in values and 3 * len({*values}) <= len(values)):
            return False
    lengths = [sum(map(len, values)) / len(values) for values in columns]
    text, length = max(zip(first, lengths, strict=True), key=itemgetter(1))
    return " " in text and (text.endswith((".", "!", "?")) or 2 * len(text) > length)


def count_survey_rows(rows: Sequence[Sequence[object]]) -> int:
    """Count the rows below a header in which Qualtrics writes questions and IDs."""
    for number, row in enumerate(rows[:2], start=1):
        if all(isinstance(cell, str) and cell.startswith('{"ImportId":') for cell in row):
            return number
    return 0


def ends_with_total(table: pyarrow.Table) -> bool:
    """Return whether the last row is a total of the rows above."""
    if len(table) < 3:
        return False
    above, last = (row.values() for row in table.slice(len(table) - 2).to_pylist())
    cells = [(value.strip(), higher.strip()) for value, higher in zip(last, above, strict=True)]
    others = [pair for pair in cells if len(pair[0]) > MAX_NAME or not TOTAL.fullmatch(pair[0])]
    are_sums = all(not value or is_number(value.replace(",", ".")) for value, _ in others)
    is_unlike = any(not value or is_number(value) > is_number(higher) for value, higher in others)
    return len(others) < len(cells) and are_sums and is_unlike
