"""Reads texts to classify: lines as they arrive, or table rows with all columns.

Modules for reading tables are imported only for tables.
"""

import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from finetune.errors import DataNotFoundError, DataUnreadableError
from finetune.events import Info, emit
from finetune.files import is_there, naming

if TYPE_CHECKING:
    from finetune.config.schema import DataConfig
    from finetune.data.columns import Columns
    from finetune.data.read import SourceTable
# The capacity of a pipe.
CHUNK_BYTES = 2**16
# Columns are chosen based on this many rows.
SAMPLE_ROWS = 10_000


@dataclass(frozen=True)
class Texts:
    """Texts or text pairs, some missing or blank, and the table that they come from."""

    texts: Any  # a list or an Arrow column
    pairs: Any = None
    source: "SourceTable | None" = None
    columns: "Columns" = field(default_factory=dict)  # of the table

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice) -> "Texts":
        """Return a slice of the texts, as lists."""
        texts, pairs = (
            column[rows].to_pylist() if hasattr(column, "to_pylist") else column and column[rows]
            for column in (self.texts, self.pairs)
        )
        frame = self.source and self.source.frame.iloc[rows]
        return Texts(texts, pairs, self.source and replace(self.source, frame=frame))

    @property
    def is_filled(self) -> list[bool]:
        """Whether each text, or both texts of a pair, are non-blank."""
        columns = [column for column in (self.texts, self.pairs) if column is not None]
        return [
            all(text and not text.isspace() for text in row) for row in zip(*columns, strict=True)
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return the table rows, or empty rows without a table."""
        return [*chain(*self.source.records())] if self.source else [{}] * len(self)


def not_unicode(text: str, error: UnicodeEncodeError) -> DataUnreadableError:
    """Return the error for a text with half of a surrogate pair."""
    return DataUnreadableError(
        f"{reprlib.repr(text)} can't be written as UTF-8: {error.reason}",
        remedy="read texts with their encoding and without errors='surrogateescape'; set the "
        "terminal's encoding to UTF-8",
    )


def read_lines(stream: BinaryIO, *, name: str, encoding: str | None) -> Iterator[Texts]:
    """Yield the lines of a stream, in batches of the lines available so far."""
    from finetune.data.encoding import decode

    chunks = iter(partial(stream.read1, CHUNK_BYTES), b"")  # type: ignore[attr-defined]
    line, is_empty = "", True
    for text in decode(chunks, encoding or "utf-8-sig", name=name):
        # Not splitlines, which also splits at separators inside texts, such as U+2028.
        *lines, line = (line + text).split("\n")
        if lines:
            is_empty = False
            yield Texts([line.removesuffix("\r") for line in lines])
    if line:
        yield Texts([line.removesuffix("\r")])
    elif is_empty:
        raise DataNotFoundError(f"{name} contains no texts", remedy="write one text per line")


def read_texts(
    path: Path, options: "DataConfig", *, as_lines: bool, reads_pairs: bool = False
) -> Iterator[Texts]:
    """Read the text column of a table, or the lines of another file."""
    from finetune.data.delimited import has_columns_of_run
    from finetune.data.encoding import find_text
    from finetune.data.packed import Content, unpack
    from finetune.data.read import TABLE_SUFFIXES, read_source

    if os.path.isdir(path):  # no error if a name is too long
        remedy = "pass a table, or a file with one text per line"
        raise DataNotFoundError(f"{path} is a folder", remedy=remedy)
    if not is_there(path):
        raise DataNotFoundError(f"file not found: {path}", remedy="check the path")
    is_table = path.suffix.lower() in TABLE_SUFFIXES and path.suffixes[-2:-1] != [".txt"]
    content, encoding = Content(path), options.encoding
    if path.is_file() and (as_lines or not is_table):
        with naming(path):
            content = unpack(path)
            text = find_text(content, encoding=encoding)
            encoding = text.encoding
            is_table = has_columns_of_run(next(text.lines(), (0, ""))[1], options)
    if is_table and not as_lines:
        return iter([texts_of_table(read_source(path, options), options, reads_pairs=reads_pairs)])
    return read_lines(content.open(), name=str(path), encoding=encoding)


def texts_of_table(source: "SourceTable", options: "DataConfig", *, reads_pairs: bool) -> Texts:
    """Return the texts in the columns set by options or by the run."""
    import pyarrow

    from finetune.data.columns import PAIR, TEXT, choose_columns, describing, join_texts

    wanted = (TEXT, PAIR) if reads_pairs else (TEXT,)
    sample, left_out = replace(source, frame=source.frame.head(SAMPLE_ROWS)).texts()
    table, name = pyarrow.table(sample), str(source.path)
    with describing(left_out):
        chosen = choose_columns(table, options, table=name, wanted=wanted)
    listed = " and ".join(repr(column.name) for column in chosen.values())
    emit(Info(f"texts from column {listed} of {source.path}"))
    names = dict.fromkeys(name for column in chosen.values() for name in column.names)
    whole, _ = replace(source, frame=source.frame[[*names]]).texts()
    columns = [join_texts(pyarrow.table(whole), chosen[option].names) for option in wanted]
    texts, pairs = (*columns, None)[:2]
    return Texts(texts, pairs, source, chosen)
