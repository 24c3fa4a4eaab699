"""Writes the input table with predictions, in the format given by the file suffix."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pandas

from finetune.data.delimited import Delimited, FileFormat
from finetune.data.packed import ZIP
from finetune.data.read import WRITERS, Sheet, SourceTable
from finetune.data.stream import SAMPLE_ROWS, Texts
from finetune.data.write import as_json, as_line, excel_columns, rounded, write_excel, write_text
from finetune.errors import UsageError
from finetune.evaluation.workbook import add_columns
from finetune.events import WarningMessage, emit
from finetune.files import naming, replacing_file
from finetune.ownership import check_output_file
from finetune.tasks.base import Prediction, rename_taken
from finetune.tasks.explanation import notable
from finetune.tasks.labels import has_decimal_commas

DELIMITERS = {".csv": ",", ".tsv": "\t", ".txt": "\t"}
# The end of a row, and the blank lines below it.
ROW_END = re.compile(r"((?:[\r\n]\s*)?\Z)")


class PredictionFile:
    """Collects predictions and writes them next to the input columns."""

    def __init__(self, path: Path, *, source: Path | None, overwrite: bool = False) -> None:
        """Raise a UsageError if the file can't be written or is the source."""
        has_macros = source is not None and source.suffix.lower() == ".xlsm"
        suffixes = [suffix for suffix in WRITERS if suffix != ".xlsm" or has_macros]
        if path.suffix.lower() not in suffixes:
            remedy = f"use one of {', '.join(suffixes)}"
            raise UsageError(f"unsupported extension of {path}", remedy=remedy)
        folder = path.absolute().parent
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            message = f"{path} is a folder, or its folder is missing or read-only"
            raise UsageError(message, remedy="choose a file in an existing, writable folder")
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise UsageError(f"{path} is the input file", remedy="choose another --output")
        check_output_file(path, overwrite=overwrite)
        self.path, self.overwrite = path, overwrite
        self._source: SourceTable | None = None
        self._texts: list[dict[str, str]] = []
        self._results: list[dict[str, Any]] = []

    @property
    def rows(self) -> int:
        """The number of predictions."""
        return len(self._results)

    def reading(self, pieces: Iterable[Texts]) -> Iterator[Texts]:
        """Yield texts and keep their table."""
        for piece in pieces:
            self._source = piece.source
            yield piece

    def add(self, predictions: Sequence[Prediction]) -> None:
        """Add the predictions of the next rows."""
        self._results.extend(prediction.result for prediction in predictions)
        if self._source is None:
            self._texts.extend(prediction.texts for prediction in predictions)

    def write(self) -> None:
        """Write all rows to a temporary file, then rename it."""
        with replacing_file(self.path) as partial:
            self._write(partial)
            check_output_file(self.path, overwrite=self.overwrite)

    def _write(self, path: Path) -> None:
        """Add columns to a copy of the source if it has the same format, or write a new file."""
        suffix, source = self.path.suffix.lower(), self._source
        (output, write), layout = WRITERS[suffix], source and source.layout
        frame = source.frame if source else pandas.DataFrame(self._texts, dtype=object)
        written = source.format if source else FileFormat(has_header=suffix != ".txt")
        rows = self._results
        if show := output.number:
            has_commas = isinstance(layout, Delimited) and _has_commas(frame)
            show = _with_comma if suffix in DELIMITERS and has_commas else show
            rows = [_flatten(row, show) for row in rows]
        added = pandas.DataFrame(rows, index=frame.index, dtype=object)
        added = added.set_axis([*rename_taken(dict.fromkeys(added), frame.columns)], axis="columns")
        if isinstance(layout, Delimited) and layout.text.content.suffix == suffix:
            return write_text(path, _lines_with(layout, added), written)
        if isinstance(layout, Sheet) and write is write_excel:
            if layout.content.suffix == suffix and layout.content.start(len(ZIP)) == ZIP:
                return add_columns(path, layout, excel_columns(added), rows=[*added.index])
            lost = f"{self.path} lacks the formats, formulas and other sheets of the input"
            remedy = "to keep them, input and output must both be .xlsx, or both .xlsm"
            emit(WarningMessage(lost, remedy=remedy))
        if source is None or WRITERS[suffix] != WRITERS.get(source.path.suffix.lower()):
            written = FileFormat(has_header=written.has_header)
        if suffix in DELIMITERS:
            written = replace(written, delimiter=DELIMITERS[suffix], quote='"')
        return write(path, frame.join(added), written)


def _with_comma(value: float) -> str:
    return str(rounded(value)).replace(".", ",")


def _has_commas(frame: pandas.DataFrame) -> bool:
    """Return whether a column uses decimal commas."""
    columns = ({*values.head(SAMPLE_ROWS)} - {""} for _, values in frame.items())
    return any(map(has_decimal_commas, columns))


def _lines_with(file: Delimited, added: pandas.DataFrame) -> Iterator[str]:
    """Yield the lines of a file, with more cells at the end of each row."""
    with naming(file.text.path), file.text.open() as opened:
        lines = opened.readlines()
        written, (starts, rows) = file.format, zip(*file.values(), strict=True)
    yield from lines[: starts[0] - 1]
    texts = [
        "".join(lines[start - 1 : end - 1]) for start, end in pairwise([*starts, len(lines) + 1])
    ]
    are_quoted = bool(written.quote) and texts[0].rstrip("\r\n").endswith(written.quote)
    more = chain([added.columns] * written.has_header, added.itertuples(index=False, name=None))
    for text, row, cells in zip(texts, rows, more, strict=True):
        line, end, _ = ROW_END.split(text, maxsplit=1)
        if line.endswith(written.delimiter):  # there may be more blank cells than columns
            line = as_line(row, written)
        yield f"{line}{written.delimiter}{as_line(cells, written, quotes_all=are_quoted)}{end}"


def _flatten(result: Mapping[str, Any], show: Callable[[float], Any]) -> dict[str, Any]:
    """Flatten a result to columns, with numbers formatted by ``show``."""
    row: dict[str, Any] = {}
    for name, value in result.items():
        if isinstance(value, Mapping):
            row |= _flatten({f"probability_{label}": value[label] for label in value}, show)
        elif isinstance(value, list):
            row[name] = joined(value, show)
        else:
            row[name] = show(value) if isinstance(value, float) else value
    return row


def joined(values: Sequence[Any], show: Callable[[float], Any] = "{:.3f}".format) -> str:
    """Return labels, probabilities or an explanation joined by |; as JSON if a label has a |."""
    if any(isinstance(value, Mapping) for value in values):
        values = notable(values)
    cells = [str(show(value) if isinstance(value, float) else value) for value in values]
    return as_json(cells) if "|" in "".join(cells) else "|".join(cells)
