"""Parallel files: texts in the lines of one, their labels in those of another."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.packed import unpack
from finetune.data.reader import RawTable
from finetune.errors import DataError
from finetune.events import Emit, Info


def read_parallel(texts: Path, labels: Path, options: DataConfig, *, emit: Emit) -> RawTable:
    """Return a table with the columns ``text`` and ``label``."""
    columns = [list(_lines_of(path, options, emit=emit)) for path in (texts, labels)]
    counts = [len(column) for column in columns]
    if counts[0] != counts[1]:
        raise DataError(
            f"{texts} has {counts[0]:,} lines, and {labels} {counts[1]:,}",
            remedy="write the text and the label of a row in the same line of both, or name both"
            " in one table",
        )
    emit(Info(f"reading the lines of {texts} as texts, those of {labels} as their labels"))
    table = pyarrow.table([pyarrow.array(own, "string") for own in columns], ["text", "label"])
    return RawTable(texts, table, lambda row: f"line {row + 1} of {texts}")


def _lines_of(path: Path, options: DataConfig, *, emit: Emit) -> Iterator[str]:
    with find_text(unpack(path), encoding=options.encoding, emit=emit).open(newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\r\n")
