"""Tables whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow
from pyarrow import csv as arrow_csv

from finetune.errors import DataUnreadable
from finetune.events import Emit, Stage

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
Quoting = Literal[0, 3]  # csv.QUOTE_MINIMAL, csv.QUOTE_NONE
SAMPLE_CHARACTERS = 2**20
# A row must fit into one block.
BLOCK_BYTES = 2**24
# The module's own limit is 131,072 characters, fewer than a long document has.
csv.field_size_limit(2**31 - 1)


def find_delimiter(text: str) -> str:
    """Return the delimiter at which most rows of the beginning have as many values as the first.

    csv.Sniffer takes an apostrophe in a text for a quote, and fails on quoted line ends.
    """
    sample = io.StringIO(text[:SAMPLE_CHARACTERS], newline="").readlines()

    def share_of_even_rows(delimiter: str) -> float:
        rows = islice(csv.reader(sample, delimiter=delimiter), 100)
        counts = [len(row) for row in rows if row]
        return counts.count(counts[0]) / len(counts) if counts and counts[0] > 1 else 0.0

    return max(DELIMITERS, key=share_of_even_rows)


def read_columns(
    text: str, *, delimiter: str, path: Path, emit: Emit
) -> tuple[pyarrow.Table, Quoting]:
    """Read values whose first line names the columns.

    A value may stand in double quotes and then hold delimiters, line ends and doubled quotes.

    Returns:
        The columns, and whether quotes count: ``csv.QUOTE_MINIMAL`` or ``csv.QUOTE_NONE``.

    Raises:
        DataUnreadable: If the file is empty, or a row has not one value for each column.
    """
    try:
        return _read(text, delimiter, csv.QUOTE_MINIMAL, path=path), csv.QUOTE_MINIMAL
    except DataUnreadable:
        if delimiter != "\t":
            raise
    # Many files with tabs know no quotes, and a text may then begin with one and never end it.
    columns = _read(text, delimiter, csv.QUOTE_NONE, path=path)
    emit(Stage(f"quotes in {path} are part of the texts"))
    return columns, csv.QUOTE_NONE


def numbered_rows(
    text: str, *, delimiter: str, quoting: Quoting, path: Path
) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, and the number of its first line.

    Raises:
        DataUnreadable: If a quote does not end, or a row has not as many values as the first.
    """
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=delimiter,
        quoting=quoting,
        strict=True,
    )
    count = 0
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _unreadable(number, f"has {error}", text=text, path=path) from error
        if len(row) > 1 or "".join(row).strip():
            count = count or len(row)
            if len(row) != count:
                complaint = f"has {len(row)} values and not {count}, one for each column"
                raise _unreadable(number, complaint, text=text, path=path)
            yield number, row


def _read(text: str, delimiter: str, quoting: Quoting, *, path: Path) -> pyarrow.Table:
    rows = (row for _, row in numbered_rows(text, delimiter=delimiter, quoting=quoting, path=path))
    names = [name.strip() for name in next(rows, [])]
    if len(set(names)) < len(names):
        raise DataUnreadable(
            f"two columns of {path} have the same name: {names}", remedy="rename one"
        )
    columns = _columns_by_arrow(text, names, delimiter=delimiter, quoting=quoting)
    if columns is None:
        # Row by row: to say which one is wrong, or for what Arrow refuses, such as lines of spaces.
        columns = [pyarrow.array(column) for column in zip(*rows, strict=True)]
    if not columns or not len(columns[0]):
        raise DataUnreadable(
            f"{path} has a header row, {names}, and no rows" if names else f"{path} is empty",
            remedy="write a header row and a row for each text",
        )
    return pyarrow.table(columns, names=names)


def _columns_by_arrow(
    text: str, names: Sequence[str], *, delimiter: str, quoting: Quoting
) -> list[Any] | None:
    """Return the columns of a well-formed file, or ``None``."""
    has_quotes = quoting != csv.QUOTE_NONE and '"' in text
    numbered = [f"f{position}" for position in range(len(names))]
    try:
        if has_quotes:  # Arrow accepts characters behind a closing quote
            lines = io.StringIO(text, newline="")
            deque(csv.reader(lines, delimiter=delimiter, strict=True), maxlen=0)
        table = arrow_csv.read_csv(
            pyarrow.BufferReader(text.lstrip("\r\n").encode()),
            read_options=arrow_csv.ReadOptions(
                block_size=BLOCK_BYTES, autogenerate_column_names=True, skip_rows_after_names=1
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter,
                quote_char='"' if has_quotes else False,
                newlines_in_values=has_quotes,
            ),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(numbered, pyarrow.string()), strings_can_be_null=False
            ),
        )
    except (csv.Error, pyarrow.ArrowInvalid):
        return None
    return table.columns if table.column_names == numbered else None


def _unreadable(number: int, complaint: str, *, text: str, path: Path) -> DataUnreadable:
    line = next(islice(io.StringIO(text, newline=""), number - 1, None))
    return DataUnreadable(
        f"line {number} of {path} {complaint}: {line.strip()[:60]!r}",
        remedy='put a value that holds a delimiter, a quote or a line end in quotes: "a ""b"", c"',
    )
