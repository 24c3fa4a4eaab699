"""Files of lines: texts in one and their labels in another, or a file for each class."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.packed import unpack
from finetune.data.reader import RawTable
from finetune.errors import DataError, DataUnreadable, SeveralTables
from finetune.events import Emit, Info

LABELS = re.compile(r"(?<![a-z])labels?(?![a-z])", re.IGNORECASE)


def read_parallel(texts: Path, labels: Path, options: DataConfig, *, emit: Emit) -> RawTable:
    """Return a table of the lines of two files, with the columns ``text`` and ``label``."""
    columns = [list(_lines_of(path, options, emit=emit)) for path in (texts, labels)]
    counts = [len(column) for column in columns]
    if counts[0] != counts[1]:
        raise DataError(
            f"{texts} has {counts[0]:,} lines, and {labels} {counts[1]:,}",
            remedy="write the text and the label of a row in the same line of both",
        )
    emit(Info(f"reading the lines of {texts} as texts, those of {labels} as their labels"))
    table = pyarrow.table([pyarrow.array(own, "string") for own in columns], ["text", "label"])
    return RawTable(texts, table, lambda row: f"line {row + 1} of {texts}")


def read_class_files(files: Sequence[Path], options: DataConfig, *, emit: Emit) -> RawTable:
    """Return a table of the lines of several files, labelled with the names of these."""
    path = files[0].parent
    if labels := [file for file in files if LABELS.search(file.stem)]:
        raise DataUnreadable(
            f"{path} seems to hold texts and labels in files of their own: {labels[0].name}",
            remedy=f"name both: --texts-file FILE --labels-file {labels[0]}",
        )
    has_one_stem = len({file.stem for file in files}) == 1  # as rt-polarity.pos
    rows = [
        (line.strip(), file.suffix[1:] if has_one_stem else file.stem, f"line {number} of {file}")
        for file in files
        for number, line in enumerate(_lines_of(file, options, emit=emit), start=1)
        if line.strip()
    ]
    if all("\t" in text for text, _, _ in rows):
        raise SeveralTables(path, [file.name for file in files])
    emit(Info(f"reading {path}: {len(rows):,} lines of {len(files)} files, one for each class"))
    columns = {name: [row[place] for row in rows] for place, name in enumerate(("text", "label"))}
    return RawTable(path, pyarrow.table(columns), lambda row: rows[row][2])


def _lines_of(path: Path, options: DataConfig, *, emit: Emit) -> Iterator[str]:
    with find_text(unpack(path), encoding=options.encoding, emit=emit).open(newline="\n") as lines:
        for line in lines:
            yield line.rstrip("\r\n")
