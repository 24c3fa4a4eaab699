"""One file becomes columns of text, by its format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune.data.delimited import name_columns, read_delimited
from finetune.data.encoding import find_text
from finetune.data.json_lines import numbered_objects, read_json_lines
from finetune.data.mapped import filter_rows
from finetune.data.packed import GZIP, SUFFIXES, ZIP, Content, unpack
from finetune.data.parquet_files import read_parquet
from finetune.data.source import DataOptions
from finetune.errors import DataUnreadable
from finetune.events import Emit, Info

WORKBOOK = ".xlsx"
KINDS_BY_FIRST_BYTES = {
    b"PAR1": ".parquet",
    ZIP: "an Excel workbook or another archive",
    b"\xd0\xcf\x11\xe0": "an Excel workbook of before 2007",
    GZIP: "compressed with gzip",
    b"BZh91AY&SY": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    **{
        bytes([0x80, protocol]): "a pickle, which can run code and is not read"
        for protocol in range(2, 6)
    },
}


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

    It may be packed, as ``unpack`` says, or the only sheet of an Excel workbook. Of the options,
    the encoding, the header and the columns matter.

    Raises:
        UsageError: If there is no such encoding.
        DataNotFound: If there is no such file.
        DataUnreadable: If the format is none of those known, or the file does not parse.
    """
    content = unpack(path)
    kind = kind_of(content)
    if kind == WORKBOOK:
        return _read_workbook(content, options, emit=emit)
    if kind == ".parquet":
        emit(Info(f"reading {path}"))
        columns, class_names = read_parquet(content, emit=emit)
        return RawTable(path, columns, class_names=class_names)
    text = find_text(content, encoding=options.encoding, emit=emit)
    if kind == ".jsonl":
        emit(Info(f"reading {path}: encoding {text.encoding}"))
        columns = read_json_lines(text, emit=emit)
        return RawTable(path, columns, lambda: [number for number, _ in numbered_objects(text)])
    columns, find_lines = read_delimited(text, options, emit=emit)
    return RawTable(path, columns, find_lines)


def _read_workbook(content: Content, options: DataOptions, *, emit: Emit) -> RawTable:
    from finetune.data.workbook import read_workbook

    path = content.path
    emit(Info(f"reading {path}: an Excel workbook"))
    return RawTable(path, name_columns(read_workbook(content), options, path=path, emit=emit)[0])


def kind_of(content: Content) -> str:
    """Return the suffix of a file's format, by its first bytes and its name.

    Raises:
        DataUnreadable: If it is no table.
    """
    first_bytes, suffix = content.start(64), content.name.suffix.lower()
    if first_bytes.startswith(ZIP) and suffix == WORKBOOK:
        return WORKBOOK
    kinds = (kind for start, kind in KINDS_BY_FIRST_BYTES.items() if first_bytes.startswith(start))
    kind = next(kinds, "a workbook" if suffix in (".xlsx", ".xls", ".ods") else suffix)
    if kind not in SUFFIXES and kind == suffix:
        start = first_bytes.lstrip(b"\xef\xbb\xbf \t\r\n")
        if start.startswith(b"["):
            kind = "one JSON array, not one object a line"
        elif start.startswith(b"__label__"):
            kind = "in fastText's format"
        else:
            kind = ".jsonl" if start.startswith(b"{") else ".csv"
    if kind not in SUFFIXES:
        raise DataUnreadable(
            f"{content.name} is {kind}", remedy=f"save it as {', '.join(SUFFIXES)}"
        )
    return kind
