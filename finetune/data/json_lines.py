"""JSON lines: one object a line."""

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow
from pyarrow import json as arrow_json
from pyarrow import types

from finetune.config.schema import DataConfig
from finetune.data.delimited import BLOCK_BYTES
from finetune.data.encoding import TextFile, find_text
from finetune.data.mapped import map_pieces
from finetune.data.packed import Content
from finetune.data.reader import (
    STREAM_ROWS,
    RawTable,
    Reader,
    Records,
    as_text,
    as_texts,
    readable_columns,
    report_left_out,
)
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info

# One of the two escapes with which JSON writes a character beyond 16 bits.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read(content: Content, options: DataConfig, emit: Emit) -> RawTable:
    """Read the columns as text; those of objects, or of lists of objects, are left out."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    emit(Info(f"reading {text.path}: encoding {text.encoding}"))
    columns = _read_by_arrow(text, emit=emit)
    if columns is None:
        # To say which line is wrong, or for what Arrow refuses, such as columns of both words and
        # numbers.
        columns = _read_by_line(text, emit=emit)

    def place(row: int) -> str:
        number, _ = next(islice(_numbered_objects(text), row, None))
        return f"line {number} of {text.path}"

    return RawTable(text.path, columns, place)


def stream(content: Content, options: DataConfig, emit: Emit) -> Iterator[Records]:
    """Yield the objects as they are."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    objects = (one for _, one in _numbered_objects(text))
    while piece := list(islice(objects, STREAM_ROWS)):
        yield piece


def _read_by_arrow(
    text: TextFile, *, emit: Emit, schema: pyarrow.Schema | None = None
) -> pyarrow.Table | None:
    """Return the columns, or ``None`` where Arrow can't read them."""
    with text.open(newline="\n") as lines:
        rows = sum(not line.isspace() for line in lines)
    try:
        table = arrow_json.read_json(
            text.open_for_arrow(),
            read_options=arrow_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema),
        )
    except pyarrow.ArrowException:
        return None
    if len(table) != rows:  # several objects on a line
        return None
    times = [column.name for column in table.schema if types.is_timestamp(column.type)]
    if times and schema is None:  # texts that look like a time
        schema = pyarrow.schema([(name, "string") for name in times])
        return _read_by_arrow(text, emit=emit, schema=schema)
    names = readable_columns(table.schema, path=text.path, emit=emit)
    return map_pieces(table.select(names), as_texts)


def _read_by_line(text: TextFile, *, emit: Emit) -> pyarrow.Table:
    rows = [row for _, row in _numbered_objects(text)]
    columns, nested = {}, []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [_value_as_text(row.get(name)) for row in rows]
        if None in values:
            nested.append(name)
        else:
            columns[name] = pyarrow.array(values, "string")
    report_left_out(nested, path=text.path, emit=emit)
    return pyarrow.table(columns)


def _value_as_text(value: Any) -> str | None:
    """Return a value of JSON; None for an object, or a list of more than texts and integers."""
    if isinstance(value, list) and all(isinstance(one, str | int) for one in value):
        return json.dumps([as_text(one) for one in value], ensure_ascii=False)
    return None if isinstance(value, list | dict) else as_text(value)


def _numbered_objects(text: TextFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each object, as it is read, and the number of its line."""
    is_empty = True
    with text.open(newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                is_empty = False
                yield number, _parse_object(line, place=f"line {number} of {text.path}")
    if is_empty:
        raise DataUnreadable(f"{text.path} is empty", remedy="write one JSON object per line")


def _parse_object(line: str, *, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if SURROGATE.search(line):  # half a character, which JSON can write and nothing can store
            text = json.dumps(value, ensure_ascii=False)
            encoded = text.encode("utf-16", errors="surrogatepass")
            value = json.loads(encoded.decode("utf-16", errors="replace"))
    except json.JSONDecodeError as error:
        complaint = f"{place} is not JSON, {error.msg} at column {error.colno}"
    except (RecursionError, ValueError):
        complaint = f"{place} is nested too deeply, or has a number with too many digits"
    else:
        if isinstance(value, dict):
            return value
        complaint = f"{place} is not a JSON object"
    raise DataUnreadable(
        f"{complaint}: {line.strip()[:60]!r}",
        remedy='write one object per line, such as {"text": "Good.", "label": "praise"}',
    )


READER = Reader((".jsonl",), read, stream, first_characters=b"{")
