"""Texts to classify, piece by piece: memory does not grow with their number.

Lines of a pipe are read without what reads tables, which is imported where a table is.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from finetune.errors import DataNotFound
from finetune.events import Emit, Info, WarningMessage
from finetune.files import is_there

if TYPE_CHECKING:
    from finetune.config.schema import DataConfig
# As much as a pipe holds.
CHUNK_BYTES = 2**16


@dataclass(frozen=True)
class Row:
    """A text, or a pair of texts, and the other columns of its row by name."""

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    pair: str | None = None


def read_lines(stream: BinaryIO, *, name: str, encoding: str | None) -> Iterator[list[Row]]:
    """Yield the lines of a stream that are not blank, as many as there are at a time."""
    from finetune.data.encoding import decode

    chunks = iter(partial(stream.read1, CHUNK_BYTES), b"")  # type: ignore[attr-defined]
    line, is_empty = "", True
    for text in chain(decode(chunks, encoding or "utf-8-sig", name=name), ["\n"]):
        # Not splitlines, which also splits at marks that stand inside texts, such as U+2028.
        *lines, line = (line + text).split("\n")
        if rows := [Row(line.removesuffix("\r")) for line in lines if line.strip()]:
            is_empty = False
            yield rows
    if is_empty:
        raise DataNotFound(f"{name} has no texts", remedy="write one text per line")


def read_rows(
    path: Path, options: "DataConfig", *, as_lines: bool, reads_pairs: bool = False, emit: Emit
) -> Iterator[list[Row]]:
    """Return the texts of a table's text column, or the lines of another file, as they are read."""
    from finetune.data.encoding import find_text
    from finetune.data.packed import Content, unpack
    from finetune.data.read import TABLE_SUFFIXES, stream_file

    if os.path.isdir(path):  # no error where a name is too long
        remedy = "name a table, or a file with one text per line"
        raise DataNotFound(f"{path} is a folder", remedy=remedy)
    if not is_there(path):
        raise DataNotFound(f"there is no file {path}", remedy="check the name after --data")
    is_table = path.suffix.lower() in TABLE_SUFFIXES and path.suffixes[-2:-1] != [".txt"]
    if is_table and not as_lines:
        pieces = stream_file(path, options, emit=emit)
        return read_records(pieces, options, name=str(path), reads_pairs=reads_pairs, emit=emit)
    content, encoding = Content(path), options.encoding
    if path.is_file():
        content = unpack(path)
        encoding = find_text(content, encoding=encoding, emit=emit).encoding
    return read_lines(content.open(), name=str(path), encoding=encoding)


def read_records(
    pieces: Iterator[list[dict[str, Any]]],
    options: "DataConfig",
    *,
    name: str,
    reads_pairs: bool,
    keeps_empty: bool = False,
    emit: Emit,
) -> Iterator[list[Row]]:
    """Return the texts of a table's text column from its rows; without those that are empty."""
    from finetune.data.columns import PAIR, TEXT, choose_columns, join_texts
    from finetune.data.read import as_text, columns_of_records

    sample = next(pieces, [])
    columns = columns_of_records(sample)
    wanted = (TEXT, PAIR) if reads_pairs else (TEXT,)
    chosen = choose_columns(columns, options, table=name, wanted=wanted)
    texts, pairs = (chosen[one].names if one in chosen else () for one in (TEXT, PAIR))
    named = " and ".join(repr(column.name) for column in chosen.values())
    emit(Info(f"texts from column {named} of {name}"))

    def row_of(record: dict[str, Any]) -> Row:
        values = ([as_text(record.pop(key, "")) or "" for key in own] for own in (texts, pairs))
        first, second = map(join_texts, values)
        return Row(first, record, second if pairs else None)

    def has_text(row: Row) -> bool:
        return all(text is None or text.strip() for text in (row.text, row.pair))

    def rows() -> Iterator[list[Row]]:
        skipped, is_empty = 0, True
        for records in chain([sample], pieces):
            found = map(row_of, records)
            with_text = list(found if keeps_empty else filter(has_text, found))
            skipped += len(records) - len(with_text)
            if with_text:
                is_empty = False
                yield with_text
        if is_empty:
            raise DataNotFound(
                f"{name} has no texts in {','.join(texts)!r}",
                remedy="name another with --text-column",
            )
        if skipped:
            emit(WarningMessage(f"{skipped:,} rows of {name} skipped: empty text"))

    return rows()
