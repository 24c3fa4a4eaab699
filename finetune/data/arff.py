"""Weka's tables: names and types of the columns, then values between commas."""

import re
from collections.abc import Iterator

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.packed import Content
from finetune.data.reader import Reader, Row
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info

QUOTED = r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\""
NAME = re.compile(rf"@attribute\s+(?:{QUOTED}|(\S+))", re.IGNORECASE)
VALUE = re.compile(rf"\s*(?:{QUOTED}|([^,]*))\s*(?:,|$)")
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the rows behind ``@data``; values that are missing are empty."""
    text = find_text(content, encoding=options.encoding, emit=emit)
    emit(Info(f"reading {text.path}: ARFF, encoding {text.encoding}"))
    names: list[str] = []
    is_data = False
    with text.open(newline="\n") as lines:
        for number, line in enumerate(map(str.strip, lines), start=1):
            if not line or line.startswith("%"):
                continue
            if is_data:
                values = [] if line.startswith("{") else _values_of(line)
                if len(values) != len(names):
                    found = f"line {number} of {text.path} has {len(values)} values"
                    raise DataUnreadable(
                        f"{found} for {len(names)} columns: {line[:60]!r}",
                        remedy="put values with commas in quotes, or save it as .csv in Weka",
                    )
                yield number, dict(zip(names, values, strict=True))
            elif name := NAME.match(line):
                names.append(_unescape(name))
            else:
                is_data = line.casefold() == "@data"


def _values_of(line: str) -> list[str]:
    values, place = [], 0
    while place < len(line) and (value := VALUE.match(line, place)):
        values.append("" if value[3] and value[3].strip() == "?" else _unescape(value))
        place = value.end()
    return values if place == len(line) else []


def _unescape(found: re.Match[str]) -> str:
    if found[3] is not None:
        return found[3].strip()
    quoted = found[1] if found[1] is not None else found[2]
    return re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), quoted)


READER = Reader((".arff",), rows, first_characters=b"@relation")
