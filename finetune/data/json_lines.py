"""JSON lines: one object a line."""

import json
import re
from collections.abc import Iterator
from typing import Any

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.packed import Content
from finetune.data.reader import Reader, Row
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info

# One of the two escapes with which JSON writes a character beyond 16 bits.
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the objects."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    emit(Info(f"reading {text.path}: encoding {text.encoding}"))
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
        # Half a character, which JSON can write and nothing can store.
        if SURROGATE.search(line):
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


READER = Reader((".jsonl",), rows, first_characters=b"{")
