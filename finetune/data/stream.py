"""Texts to classify, piece by piece: memory does not grow with their number."""

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow

from finetune.data.columns import choose_text_columns, join_texts
from finetune.data.delimited import stream_delimited
from finetune.data.encoding import find_text
from finetune.data.files import WORKBOOK, kind_of, read_file
from finetune.data.json_lines import numbered_objects
from finetune.data.lines import Row, read_lines
from finetune.data.packed import PACKED_SUFFIXES, SUFFIXES, Content, unpack
from finetune.data.parquet_files import stream_parquet
from finetune.data.source import DataOptions
from finetune.data.values import as_text
from finetune.errors import DataNotFound, DataUnreadable
from finetune.events import Emit, Info, WarningMessage

ROWS_A_PIECE = 1_024
SAMPLE_ROWS = 1_000


def read_rows(
    path: Path, options: DataOptions, *, as_lines: bool, reads_pairs: bool = False, emit: Emit
) -> Iterator[list[Row]]:
    """Return the texts of a file: of the text column if it has a table's suffix, or else its lines.

    It is read as the rows are asked for. With ``as_lines`` a table is read by lines too, with
    ``reads_pairs`` the column of second texts. Of the options, the columns of texts, the encoding
    and the header matter.

    Raises:
        UsageError: If there is no such encoding.
        DataError: If the file is missing or does not parse, or the column is not found.
    """
    if os.path.isdir(path):  # no error where a name is too long
        remedy = "name a table, or a file with one text per line"
        raise DataNotFound(f"{path} is a folder", remedy=remedy)
    if not os.path.exists(path):
        raise DataNotFound(f"there is no file {path}", remedy="check the name after --file")
    suffix = path.suffix.lower()
    if suffix in PACKED_SUFFIXES and (as_lines or path.stem.lower().endswith(".txt")):
        raise DataUnreadable(f"the lines of {path} are packed", remedy="unpack it")
    if suffix in (*SUFFIXES, *PACKED_SUFFIXES, ".json") and not as_lines:
        return _read_table(path, options, reads_pairs=reads_pairs, emit=emit)
    content, encoding = Content(path, path), options.encoding
    if path.is_file():
        encoding = find_text(content, encoding=encoding, emit=emit).encoding
    return read_lines(content.open(), name=str(path), encoding=encoding)


def _read_table(
    path: Path, options: DataOptions, *, reads_pairs: bool, emit: Emit
) -> Iterator[list[Row]]:
    records = _records(path, options, emit=emit)
    sample = list(islice(records, SAMPLE_ROWS))
    names = dict.fromkeys(name for record in sample for name in record)
    columns = pyarrow.table(
        {name: [as_text(record.get(name)) for record in sample] for name in names},
        schema=pyarrow.schema([(name, "string") for name in names]),
    )
    chosen = choose_text_columns(columns, options, reads_pairs=reads_pairs, table=str(path))
    named = " and ".join(repr(",".join(names)) for names in chosen if names)
    emit(Info(f"texts from column {named} of {path}"))
    return _pieces(chain(sample, records), chosen, path, emit)


def _pieces(
    records: Iterator[dict[str, Any]],
    chosen: tuple[Sequence[str], Sequence[str]],
    path: Path,
    emit: Emit,
) -> Iterator[list[Row]]:
    skipped, is_empty = 0, True
    while piece := list(islice(records, ROWS_A_PIECE)):
        rows = [_row_of(record, *chosen) for record in piece]
        with_text = [row for row in rows if row.has_text]
        skipped += len(rows) - len(with_text)
        if with_text:
            is_empty = False
            yield with_text
    if is_empty:
        raise DataNotFound(
            f"{path} has no texts in {','.join(chosen[0])!r}",
            remedy="name another with --text-column",
        )
    if skipped:
        emit(WarningMessage(f"{skipped:,} rows of {path} skipped: empty text"))


def _row_of(record: dict[str, Any], texts: Sequence[str], pairs: Sequence[str]) -> Row:
    """Return a row of a table, by the columns of its text and, if there are any, of its second."""
    first, second = (
        join_texts([as_text(record.pop(name, "")) for name in names]) for names in (texts, pairs)
    )
    return Row(first, record, second if pairs else None)


def _records(path: Path, options: DataOptions, *, emit: Emit) -> Iterator[dict[str, Any]]:
    """Return the rows of a table by the names of their columns, as they are read."""
    content = unpack(path)
    kind = kind_of(content)
    if kind == WORKBOOK or content.name != path:
        pieces = read_file(path, options, emit=emit).columns.to_batches(ROWS_A_PIECE)
        return chain.from_iterable(piece.to_pylist() for piece in pieces)
    if kind == ".parquet":
        return stream_parquet(content, rows_a_piece=ROWS_A_PIECE)
    text = find_text(content, encoding=options.encoding, emit=emit)
    if kind == ".jsonl":
        return (record for _, record in numbered_objects(text))
    names, rows = stream_delimited(text, options, emit=emit)
    return (dict(zip(names, row, strict=True)) for row in rows)
