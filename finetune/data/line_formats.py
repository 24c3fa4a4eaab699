"""Tables of lines: Weka's ARFF, and fastText's, where ``__label__good`` is a label."""

import re
from collections.abc import Iterator

from finetune.config.schema import DataConfig
from finetune.data.json_lines import open_text
from finetune.data.packed import Content
from finetune.data.reader import Reader, Row
from finetune.errors import DataUnreadable
from finetune.events import Emit

QUOTED = r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\""
NAME = re.compile(rf"@attribute\s+(?:{QUOTED}|(\S+))", re.IGNORECASE)
VALUE = re.compile(rf"\s*(?:{QUOTED}|([^,]*?))\s*,")
LABEL = re.compile(r"(?<!\S)__label__(\S+?),?(?:\s+|$)", re.IGNORECASE)


def arff_rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the rows behind ``@data``; values that are missing are empty."""
    text = open_text(content, options, emit)
    names: list[str] = []
    is_data = False
    for number, line in text.lines():
        if line.startswith("%"):
            continue
        if is_data:
            values = list(map(_value_of, VALUE.finditer(f"{line},")))
            if len(values) != len(names) or line.startswith("{"):
                raise DataUnreadable(
                    f"line {number} of {text.path} has not {len(names)} values: {line[:60]!r}",
                    remedy="put values with commas in quotes, or save it as .csv in Weka",
                )
            yield number, dict(zip(names, values, strict=True))
        elif name := NAME.match(line):
            names.append(_value_of(name))
        else:
            is_data = line.casefold() == "@data"


def _value_of(found: re.Match[str]) -> str:
    if found[3] is not None:
        return "" if found[3] == "?" else found[3]
    quoted = found[1] if found[1] is not None else found[2]
    return re.sub(r"\\(.)", r"\1", quoted.replace(r"\n", "\n"))


def fasttext_rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the text and the label of each line or, where one has several, a list of them."""
    text = open_text(content, options, emit)
    has_several = any(len(LABEL.findall(line)) > 1 for _, line in text.lines())
    for number, line in text.lines():
        labels = LABEL.findall(line)
        label = labels if has_several else "".join(labels)
        yield number, {"text": LABEL.sub("", line).strip(), "label": label}


ARFF = Reader((".arff",), arff_rows, start=b"@relation")
FASTTEXT = Reader((".ft",), fasttext_rows, start=rb"(.*\s)?__label__\S")
