"""One file becomes columns of text, by its format."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import json as arrow_json
from pyarrow import parquet, types

from finetune.data.delimited import BLOCK_BYTES, DELIMITERS, name_columns, read_delimited
from finetune.data.encoding import DecodedText, decode, encode_for_arrow
from finetune.data.mapped import ROWS_A_PIECE, collect, filter_rows, map_pieces
from finetune.data.numbers import plain_numbers
from finetune.data.packed import GZIP, SUFFIXES, ZIP, read_content
from finetune.data.source import DataOptions
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.labels import map_lists
from finetune.tasks.multi import Multi

PARQUET = b"PAR1"
KINDS_BY_FIRST_BYTES = {
    PARQUET: ".parquet",
    ZIP: "an Excel workbook or another archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook of before 2007",
    GZIP: "compressed with gzip",
    **{
        bytes([0x80, protocol]): "a pickle, which can run code and is not read"
        for protocol in range(2, 6)
    },
}
# Of two that JSON spells a character beyond 16 bits with.
HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
# In one line: Arrow's reader ends the process where JSON is nested some thousand deep.
MOST_BRACKETS = 1000


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, before it is known what they mean.

    Args:
        columns: Every value as text; what is missing is an empty text.
        lines: Returns the line on which each row begins, from 1; ``None`` where rows have no lines.
        class_names: For columns that come with the names of all their classes, these names.
        files: The file of each row, where each has its own.
        rows: Which rows of the file these are, where they are not all of it: int64 of shape [rows].
        flags: The column of lists that several columns of 0 and 1 have become, if they have.
    """

    path: Path
    columns: pyarrow.Table
    lines: Callable[[], Sequence[int]] | None = None
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    files: Sequence[Path] = ()
    rows: NDArray[np.int64] | None = None
    flags: str | None = None

    def where(self, is_kept: pyarrow.ChunkedArray) -> "RawTable":
        """Return the rows for which a column of truth values has true."""
        mask = is_kept.to_numpy()
        return replace(self, columns=filter_rows(self.columns, mask), rows=np.flatnonzero(mask))

    def place(self, row: int) -> str:
        """Return where a row, counted from 0, is in the file: ``line 7 of reviews.csv``."""
        row = row if self.rows is None else int(self.rows[row])
        if self.files:
            return str(self.files[row])
        number = f"row {row + 1}" if self.lines is None else f"line {self.lines()[row]}"
        return f"{number} of {self.path}"


def read_file(path: Path, options: DataOptions, *, emit: Emit) -> RawTable:
    """Read a table from a file; its content says the format, and its suffix where that is open.

    It may be packed, as ``read_content`` says, or the only sheet of an Excel workbook. Of the
    options, the encoding, the header and the columns matter.

    Raises:
        UsageError: If there is no such encoding.
        DataNotFound: If there is no such file.
        DataUnreadable: If the format is none of those known, or the file does not parse.
    """
    if _is_parquet(path):
        emit(Info(f"reading {path}"))
        return _read_parquet(path, path, emit=emit)
    content, name = read_content(path)
    if content.startswith(ZIP) and name.suffix == ".xlsx":
        return _read_workbook(content, options, path=path, emit=emit)
    kind = kind_of(content, path=name)
    if kind == ".parquet":
        emit(Info(f"reading {path}"))
        return _read_parquet(path, pyarrow.BufferReader(content), emit=emit)
    decoded = decode(content, path=path, encoding=options.encoding)
    del content  # the texts once are enough
    warn_of_rivals(decoded, path=path, emit=emit)
    if kind == ".jsonl":
        emit(Info(f"reading {path}: encoding {decoded.encoding}"))
        return _read_json_lines(decoded, path=path, emit=emit)
    return _read_delimited(decoded, options, suffix=name.suffix, path=path, emit=emit)


def _read_workbook(content: bytes, options: DataOptions, *, path: Path, emit: Emit) -> RawTable:
    from finetune.data.workbook import read_workbook

    emit(Info(f"reading {path}: an Excel workbook"))
    rows = read_workbook(content, path=path)
    return RawTable(path, name_columns(rows, options, path=path, emit=emit)[0])


def _read_delimited(
    decoded: DecodedText, options: DataOptions, *, suffix: str, path: Path, emit: Emit
) -> RawTable:
    table = read_delimited(decoded.text, options, suffix=suffix, path=path, emit=emit)
    delimiter, encoding = DELIMITERS[table.dialect.delimiter], decoded.encoding
    emit(Info(f"reading {path}: encoding {encoding}, delimiter {delimiter}"))

    def lines() -> list[int]:
        text = _read_again(path, encoding=encoding)
        numbers = [number for number, _ in table.dialect.numbered_rows(text, path=path)]
        return numbers[table.has_header :]

    # Excel delimits by semicolons where a comma is decimal.
    allows_comma = delimiter == DELIMITERS[";"] and options.task != Multi.name
    columns = plain_numbers(table.columns, allows_comma=allows_comma, path=path, emit=emit)
    return RawTable(path, columns, lines)


def _read_again(path: Path, *, encoding: str) -> str:
    """Return a text that was not held in memory until now."""
    return decode(read_content(path).content, path=path, encoding=encoding).text


def kind_of(first_bytes: bytes, *, path: Path) -> str:
    """Return the suffix of a file's format, by its first 64 bytes and its name.

    Raises:
        DataUnreadable: If it is no table.
    """
    suffix = path.suffix.lower()
    kinds = (kind for start, kind in KINDS_BY_FIRST_BYTES.items() if first_bytes.startswith(start))
    kind = next(kinds, "a workbook" if suffix in (".xlsx", ".xls", ".ods") else suffix)
    if kind not in SUFFIXES and kind == suffix:
        start = first_bytes[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(b"["):
            kind = "one JSON array, not one object a line"
        elif start.startswith(b"__label__"):
            kind = "in fastText's format"
        else:
            kind = ".jsonl" if start.startswith(b"{") else ".csv"
    if kind not in SUFFIXES:
        raise DataUnreadable(f"{path} is {kind}", remedy=f"save it as {', '.join(SUFFIXES)}")
    return kind


def warn_of_rivals(decoded: DecodedText, *, path: Path, emit: Emit) -> None:
    """Warn where other encodings fit a file nearly as well as the one that was detected."""
    if decoded.rivals:
        emit(
            WarningMessage(
                f"the encoding of {path} is a guess, {decoded.encoding}; its bytes also fit"
                f" {', '.join(decoded.rivals)}",
                remedy="check how the texts look, and name another with --encoding",
            )
        )


def as_text(value: Any) -> str:
    """Return a value as text; a whole number has no fraction, whatever its type.

    What is no text or number, such as bytes, is an empty text.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, float("nan"), None, b"x", ["x"])]
    ['3.0', '3', '2.5', 'true', '', '', '', '']
    """
    if value is None or value != value or isinstance(value, bytes | list | dict):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _read_json_lines(decoded: DecodedText, *, path: Path, emit: Emit) -> RawTable:
    """Read one JSON object a line; columns of lists or objects are left out."""
    text, encoding = decoded.text, decoded.encoding
    columns = _json_columns(text, path=path, emit=emit)
    if columns is None:
        # Line by line: to say which one is wrong, or for what Arrow refuses, such as columns of
        # both words and numbers.
        rows = [row for _, row in numbered_objects(text.split("\n"), path=path)]
        names = dict.fromkeys(name for row in rows for name in row)
        nested = [name for name in names if any(_is_nested(row.get(name)) for row in rows)]

        def column(name: str) -> pyarrow.Array:
            values = (row.get(name) for row in rows)
            return pyarrow.array(map(_value_as_text, values), "string")

        columns = pyarrow.table({name: column(name) for name in names if name not in nested})
        _report_left_out(nested, path=path, emit=emit)

    def lines() -> list[int]:
        lines = _read_again(path, encoding=encoding).split("\n")
        return [number for number, _ in numbered_objects(lines, path=path)]

    return RawTable(path, columns, lines)


def _json_columns(
    text: str, *, path: Path, emit: Emit, schema: pyarrow.Schema | None = None
) -> pyarrow.Table | None:
    """Return the columns of JSON lines, or ``None`` where Arrow can't read them."""
    if text.count("{") + text.count("[") > text.count("\n") + MOST_BRACKETS and any(
        line.count("{") + line.count("[") > MOST_BRACKETS for line in text.split("\n")
    ):
        return None
    try:
        table = arrow_json.read_json(
            encode_for_arrow(text),
            read_options=arrow_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema),
        )
    except pyarrow.ArrowException:
        return None
    if len(table) != text.strip().count("\n") + 1:  # several objects on a line, or blank lines
        return None
    times = [column.name for column in table.schema if types.is_timestamp(column.type)]
    if times and schema is None:  # texts that look like a time
        schema = pyarrow.schema([(name, "string") for name in times])
        return _json_columns(text, path=path, emit=emit, schema=schema)
    return map_pieces(table.select(_plain_names(table.schema, path=path, emit=emit)), _as_texts)


def _is_nested(value: Any) -> bool:
    """Return whether a value of JSON is an object, or a list of more than texts and integers."""
    if isinstance(value, list):
        return not all(isinstance(one, str | int) for one in value)
    return isinstance(value, dict)


def numbered_objects(lines: Iterable[str], *, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each JSON object and the number of its line.

    Raises:
        DataUnreadable: If a line is no JSON object, or all are blank.
    """
    is_empty = True
    for number, line in enumerate(lines, start=1):
        if line.strip():
            is_empty = False
            yield number, _parse_object(line, place=f"line {number} of {path}")
    if is_empty:
        raise DataUnreadable(f"{path} is empty", remedy="write one JSON object a line")


def _parse_object(line: str, *, place: str) -> dict[str, Any]:
    """Return the JSON object of a line."""
    try:
        value = json.loads(line)
        if HALF_CHARACTER.search(line):
            value = json.loads(_mended(json.dumps(value, ensure_ascii=False)))
    except json.JSONDecodeError as error:
        complaint = f"{place} is not JSON, {error.msg} at column {error.colno}"
    except (RecursionError, ValueError):
        complaint = f"{place} is nested too deeply, or holds a number of too many digits"
    else:
        if isinstance(value, dict):
            return value
        complaint = f"{place} is not a JSON object"
    raise DataUnreadable(
        f"{complaint}: {line.strip()[:60]!r}",
        remedy='write one object a line, such as {"text": "Good.", "label": "praise"}',
    )


def _mended(text: str) -> str:
    """Return a text without halves of characters, which JSON can spell and nothing can store."""
    return text.encode("utf-16", errors="surrogatepass").decode("utf-16", errors="replace")


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == PARQUET
    except OSError:
        return False  # the general reader says why


def _read_parquet(path: Path, source: Path | pyarrow.NativeFile, *, emit: Emit) -> RawTable:
    """Read the columns of texts and numbers, piece by piece.

    A column of numbers that the library datasets wrote with the names of its classes is read as
    these names; a number without a name, such as -1, as missing.
    """
    with _parquet_errors_explained(path):
        file = parquet.ParquetFile(source, memory_map=True)
        schema = file.schema_arrow
        names = _plain_names(schema, path=path, emit=emit)
    is_empty = file.metadata.num_rows == 0
    if is_empty or len(set(names)) < len(names):
        complaint = "holds no rows" if is_empty else "has two columns of the same name"
        raise DataUnreadable(f"{path} {complaint}", remedy="write it again")
    kinds = {name: schema.field(name).type for name in names}
    class_names = {
        name: own
        for name, own in _class_names(schema.metadata or {}).items()
        if name in kinds and (types.is_integer(kinds[name]) or _is_list_of_labels(kinds[name]))
    }
    batches = _read_batches(file, path=path, rows=ROWS_A_PIECE, columns=names)
    tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
    with _parquet_errors_explained(path):  # a damaged file may have none of its rows
        columns = collect(_as_texts(_with_class_names(one, class_names)) for one in tables)
    return RawTable(path, columns, class_names=class_names)


def _with_class_names(
    table: pyarrow.Table, class_names: Mapping[str, Sequence[str]]
) -> pyarrow.Table:
    for name, own in class_names.items():
        column, named = table[name], partial(_with_names, names=own)
        has_lists = _is_list_of_labels(column.type)
        column = map_lists(column, named) if has_lists else named(column)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def stream_parquet(path: Path, *, rows_a_piece: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as they are read, all columns by name.

    Raises:
        DataUnreadable: If the file, or a part of it, does not parse.
    """
    with _parquet_errors_explained(path):
        file = parquet.ParquetFile(path)
    for batch in _read_batches(file, path=path, rows=rows_a_piece):
        yield from batch.to_pylist()


def _read_batches(
    file: parquet.ParquetFile, *, path: Path, rows: int, columns: Sequence[str] | None = None
) -> Iterator[pyarrow.RecordBatch]:
    with _parquet_errors_explained(path):
        for batch in file.iter_batches(batch_size=rows, columns=columns):
            batch.validate(full=True)  # texts may be other bytes than UTF-8
            yield batch


@contextmanager
def _parquet_errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataUnreadable(
            f"{path} is not Parquet: {str(error).splitlines()[0]}", remedy="write it again"
        ) from error


def _is_plain(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds a text, a number or a truth value in each row."""
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    tests = (
        *(types.is_string, types.is_large_string, types.is_string_view),
        *(types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null),
    )
    return any(is_of(kind) for is_of in tests)


def _is_list_of_labels(kind: pyarrow.DataType) -> bool:
    """Return whether a column holds lists of texts or of whole numbers."""
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    own = kind.value_type
    return _is_plain(own) and not (types.is_floating(own) or types.is_boolean(own))


def _plain_names(schema: pyarrow.Schema, *, path: Path, emit: Emit) -> list[str]:
    """Return the columns of texts, numbers, truth values and labels; the others are reported."""
    names = [one.name for one in schema if _is_plain(one.type) or _is_list_of_labels(one.type)]
    _report_left_out([name for name in schema.names if name not in names], path=path, emit=emit)
    return names


def _as_texts(table: pyarrow.Table) -> pyarrow.Table:
    """Return columns of texts, numbers and truth values as text; lists as JSON."""
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if _is_list_of_labels(column.type):
            values = pc.binary_join(map_lists(column, _as_json), ", ")
            column = pc.binary_join_element_wise("[", values, "]", "")
        if types.is_floating(column.type):
            column = column.cast("float64")  # half precision has no unique values
            numbers = pc.unique(column)
            texts = pyarrow.array([as_text(number) for number in numbers.to_pylist()], "string")
            column = pc.take(texts, pc.index_in(column, value_set=numbers))
        columns[name] = pc.fill_null(column.cast("string"), "")
    return pyarrow.table(columns)


def _with_names(numbers: pyarrow.ChunkedArray, *, names: Sequence[str]) -> pyarrow.ChunkedArray:
    known = pyarrow.array(range(len(names)), "int64")
    positions = pc.index_in(numbers.cast("int64"), value_set=known)
    return pc.take(pyarrow.array(names, "string"), positions)


def _as_json(values: pyarrow.Array) -> pyarrow.Array:
    """Return the values of lists as JSON's texts; what is missing is an empty text."""
    texts = pc.fill_null(values.cast("string"), "")
    known = texts.unique()
    quoted = [json.dumps(one, ensure_ascii=False) for one in known.to_pylist()]
    return pc.take(pyarrow.array(quoted, "string"), pc.index_in(texts, value_set=known))


def _value_as_text(value: Any) -> str:
    return _list_as_text(value) if isinstance(value, list) else as_text(value)


def _list_as_text(values: Sequence[Any] | None) -> str:
    """Return a list as JSON of texts; what is missing is an empty text."""
    if values is None:
        return ""
    return json.dumps([as_text(value) for value in values], ensure_ascii=False)


def _report_left_out(names: Sequence[str], *, path: Path, emit: Emit) -> None:
    if names:
        listed = ", ".join(map(repr, names))
        emit(Info(f"columns of {path} left out, neither texts nor numbers: {listed}"))


def _class_names(metadata: Mapping[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of classes that the library datasets keeps beside the columns."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        kinds = {name: one.get("feature", one) for name, one in features.items()}
        return {
            name: list(map(str, kind["names"]))
            for name, kind in kinds.items()
            if kind.get("_type") == "ClassLabel"
        }
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return {}  # not written by it
