"""JSON lines: one object a line."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow
import pyarrow.compute as pc
from pyarrow import json as arrow_json
from pyarrow import types

from finetune.config.schema import DataConfig
from finetune.data.delimited import BLOCK_BYTES
from finetune.data.encoding import TextFile, find_text
from finetune.data.mapped import map_pieces
from finetune.data.packed import Content
from finetune.data.reader import Columns, Reader, Row, as_texts, columns_of, readable_columns
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info

# One of the two escapes with which JSON writes a character beyond 16 bits.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Arrow reads whole numbers beyond 64 bits as floating-point ones, which lose digits.
MAX_EXACT = 2.0**53


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the objects."""
    return _read_rows(open_text(content, options, emit))


def columns(content: Content, options: DataConfig, emit: Emit) -> Columns:
    """Read the columns; those of objects, or of lists of objects, are left out."""
    text = open_text(content, options, emit)
    table = _read_columns(text)
    if table is None:
        # To say which line is wrong, or for what Arrow refuses, such as columns of both words and
        # numbers.
        return columns_of(_read_rows(text), path=text.path, emit=emit), {}
    names = readable_columns(table.schema, path=text.path, emit=emit)
    return map_pieces(table.select(names), as_texts), {}


def open_text(content: Content, options: DataConfig, emit: Emit) -> TextFile:
    """Find the encoding of a file, and report it."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    emit(Info(f"reading {text.path}: encoding {text.encoding}"))
    return text


def _read_columns(text: TextFile, schema: pyarrow.Schema | None = None) -> pyarrow.Table | None:
    """Return the columns as Arrow reads them, or ``None`` where it can't, or not exactly."""
    rows = sum(1 for _ in text.lines())
    try:
        table = arrow_json.read_json(
            text.open_for_arrow(),
            read_options=arrow_json.ReadOptions(block_size=BLOCK_BYTES),
            parse_options=arrow_json.ParseOptions(explicit_schema=schema),
        )
    except pyarrow.ArrowException:
        return None
    # Texts that look like a time; objects and lists that hold some are left to the other parser.
    times = [one.name for one in table.schema if types.is_timestamp(one.type)]
    if times and not schema:
        return _read_columns(text, pyarrow.schema([(name, "string") for name in times]))
    is_exact = (
        len(table) == rows  # no line has several objects
        and not any("list<item: timestamp" in str(one.type) for one in table.schema)
        and all(
            (pc.max(pc.abs(column)).as_py() or 0) < MAX_EXACT
            for column in table.columns
            if types.is_floating(column.type)
        )
    )
    return table if is_exact else None


def _read_rows(text: TextFile) -> Iterator[Row]:
    number = 0
    for number, line in text.lines():
        yield number, _parse_object(line, place=f"line {number} of {text.path}")
    if not number:
        raise DataUnreadable(f"{text.path} is empty", remedy="write one JSON object per line")


def _parse_object(line: str, *, place: str) -> dict[str, Any]:
    reason = ""
    try:
        value = without_half_characters(json.loads(line), line)
        if isinstance(value, dict):
            return value
    except (RecursionError, ValueError) as error:
        reason = f", {error}"
    raise DataUnreadable(
        f"{place} is not a JSON object{reason}: {line[:60]!r}",
        remedy='write one object per line, such as {"text": "Good.", "label": "praise"}',
    )


def without_half_characters(value: Any, source: str) -> Any:
    """Return a value of JSON without what it can write and nothing can store."""
    if not SURROGATE.search(source):
        return value
    encoded = json.dumps(value, ensure_ascii=False).encode("utf-16", errors="surrogatepass")
    return json.loads(encoded.decode("utf-16", errors="replace"))


READER = Reader((".jsonl",), rows, columns, start=rb"\{")
