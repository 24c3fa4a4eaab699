"""Files whose lines hold values between commas, semicolons, tabs or bars."""

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from finetune.data.encoding import decode
from finetune.data.raw import RawTable
from finetune.errors import DataUnreadable
from finetune.events import Emit, Stage

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
# The module's own limit is 131,072 characters, fewer than a long document has.
LONGEST_VALUE = 2**31 - 1


def read_delimited(path: Path, *, emit: Emit) -> RawTable:
    """Read a file of delimited values whose first line names the columns.

    A value may stand in double quotes and then hold delimiters, line ends and doubled quotes.
    Encoding and delimiter are detected and told.

    Raises:
        DataUnreadable: If the file is no text, is empty, or a row has not a value a column.
    """
    text, encoding = decode(path.read_bytes(), path=path)
    lines = list(io.StringIO(text, newline=""))
    delimiter = _find_delimiter(lines)
    emit(Stage(f"reading {path}: {encoding}, values between {DELIMITERS[delimiter]}"))
    try:
        return _read(lines, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL, path=path)
    except DataUnreadable:
        if delimiter != "\t":
            raise
    # Many files with tabs know no quotes, and a text may then begin with one and never end it.
    table = _read(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, path=path)
    emit(Stage(f"quotes in {path} are part of the texts"))
    return table


def _find_delimiter(lines: Sequence[str]) -> str:
    """Return the delimiter at which most rows of the beginning have as many values as the first."""

    def share_of_even_rows(delimiter: str) -> float:
        rows = islice(csv.reader(lines, delimiter=delimiter), 100)
        widths = [len(row) for row in rows if row]
        return widths.count(widths[0]) / len(widths) if widths and widths[0] > 1 else 0.0

    csv.field_size_limit(LONGEST_VALUE)
    return max(DELIMITERS, key=share_of_even_rows)


def _read(lines: Sequence[str], *, delimiter: str, quoting: int, path: Path) -> RawTable:
    numbered_rows = _parse(lines, delimiter=delimiter, quoting=quoting, path=path)
    _, names = next(numbered_rows, (0, []))
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise DataUnreadable(
            f"two columns of {path} have the same name: {names}", remedy="rename one"
        )
    numbers, rows = [], []
    for number, row in numbered_rows:
        if len(row) != len(names):
            raise _unreadable(
                number,
                f"has {len(row)} values and not {len(names)}, one a column",
                lines=lines,
                path=path,
            )
        numbers.append(number)
        rows.append(row)
    if not rows:
        raise DataUnreadable(
            f"{path} has no rows but the names {names}" if names else f"{path} is empty",
            remedy="write the names of the columns in its first line and a row in each other",
        )
    values = dict(zip(names, zip(*rows, strict=True), strict=True))
    return RawTable(path, values, unit="line", numbers=numbers)


def _parse(
    lines: Sequence[str], *, delimiter: str, quoting: int, path: Path
) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not blank, and the number of its first line."""
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)  # type: ignore[arg-type]
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise _unreadable(number, f"has {error}", lines=lines, path=path) from error
        if len(row) > 1 or "".join(row).strip():
            yield number, row


def _unreadable(number: int, complaint: str, *, lines: Sequence[str], path: Path) -> DataUnreadable:
    return DataUnreadable(
        f"line {number} of {path} {complaint}: {lines[number - 1].strip()[:60]!r}",
        remedy='put a value that holds a delimiter, a quote or a line end in quotes: "a ""b"", c"',
    )
