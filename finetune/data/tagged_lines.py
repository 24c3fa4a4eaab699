"""Lines of fastText: words such as ``__label__good`` before the text, or behind it."""

import re
from collections.abc import Iterator

from finetune.config.schema import DataConfig
from finetune.data.json_lines import open_text
from finetune.data.packed import Content
from finetune.data.reader import Reader, Row
from finetune.events import Emit

PREFIX = "__label__"
LABEL = re.compile(rf"(?<!\S){PREFIX}(\S+?),?(?:\s+|$)", re.IGNORECASE)


def rows(content: Content, options: DataConfig, emit: Emit) -> Iterator[Row]:
    """Yield the text and the label of each line or, where one has several, a list of them."""
    text = open_text(content, options, emit)
    has_several = any(len(LABEL.findall(line)) > 1 for _, line in text.lines())
    for number, line in text.lines():
        labels = LABEL.findall(line)
        label = labels if has_several else "".join(labels)
        yield number, {"text": LABEL.sub("", line).strip(), "label": label}


READER = Reader((".ft",), rows, start=rb"(.*\s)?__label__\S")
