"""What ``finetune label`` reads: rows with the labels they have, and computes: their features."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray

from finetune.config.schema import Config, DataConfig
from finetune.data.columns import LABEL_NAMES, columns_named, plain_name, read_labels
from finetune.data.dataset import make_dataset, update_with_texts
from finetune.data.read import as_texts
from finetune.data.stream import read_texts
from finetune.errors import DataNotFoundError
from finetune.events import Event, Info, emit, sent_to
from finetune.runs.guess import suggest_encoder
from finetune.runs.linear_head import prepare_head, read_frozen_features
from finetune.runs.prepare import RunInputs, encode_rows
from finetune.tasks.labels import are_lists, name_classes, split_labels
from finetune.tasks.regression import Regression
from finetune.web.journal import Labels


@dataclass(frozen=True)
class LabelSource:
    """The rows of a file: a column of texts, or two of text pairs, and the labels in the file."""

    texts: Sequence[Sequence[str]]
    is_blank: NDArray[np.bool_]
    labels: Labels
    is_multi_label: bool
    digest: str
    suggested_model: str


def read_label_source(path: Path, options: DataConfig, *, is_multi_label: bool) -> LabelSource:
    """Read a table or a file with one text per line."""
    pieces = _read_pieces(path, options)
    columns = [
        pyarrow.chunked_array([getattr(piece, name) for piece in pieces], "string")
        for name in ("texts", "pairs")
        if getattr(pieces[0], name) is not None
    ]
    texts = [["" if text is None else text for text in column.to_pylist()] for column in columns]
    is_blank = np.array([not all(map(str.strip, row)) for row in zip(*texts, strict=True)], bool)
    if is_blank.all():
        raise DataNotFoundError(f"{path} has no texts", remedy="write one text per line")
    labels = Labels()
    if (source := pieces[0].source) is not None:
        labels, has_lists = _read_labels(source.frame, options, str(path))
        is_multi_label |= has_lists
    digest = hashlib.sha256(repr(labels.rows).encode())
    for column in columns:
        update_with_texts(digest, column)
    model = suggest_encoder(columns[0])
    return LabelSource(texts, is_blank, labels, is_multi_label, digest.hexdigest(), model)


def _read_pieces(path: Path, options: DataConfig) -> list[Any]:
    """Return sentence pairs if two columns have the names of a pair, and otherwise texts."""
    events: list[Event] = []
    try:
        with sent_to(events.append):
            pairs = read_texts(path, options, as_lines=False, reads_pairs=True)
            pieces = [piece[:] for piece in pairs]
    except DataNotFoundError:
        if options.text_pair_column is not None:
            raise
        return [piece[:] for piece in read_texts(path, options, as_lines=False)]
    for event in events:
        emit(event)
    return pieces


def _read_labels(frame: Any, options: DataConfig, path: str) -> tuple[Labels, bool]:
    """Return the labels of a table, and whether they are lists of classes."""
    names = [str(name) for name in frame.columns]
    chosen = [name for name in names if plain_name(name) in LABEL_NAMES][:1]
    if options.label_column is not None:
        chosen = [*columns_named(options.label_column, names)]
    if unknown := [name for name in chosen if name not in names]:
        raise DataNotFoundError(
            f"{path} has no column {unknown[0]!r}", remedy=f"the columns are: {', '.join(names)}"
        )
    columns = {name: as_texts(frame[name]) for name in chosen}
    if not columns or None in columns.values():
        return Labels(), False
    values = read_labels(pyarrow.table(columns), chosen).to_pylist()
    cells = {row: value for row, value in enumerate(values) if value and value.strip()}
    distinct = {*cells.values()}
    is_multi_label = are_lists(distinct)
    parts = {cell: split_labels(cell, None) if is_multi_label else [cell] for cell in distinct}
    classes = name_classes(dict.fromkeys(name for part in parts.values() for name in part))
    known = {
        cell: (*dict.fromkeys(classes[name] for name in part),) for cell, part in parts.items()
    }
    rows = {row: known[cell] for row, cell in cells.items()}
    if cells:
        emit(Info(f"{len(cells):,} labels from column {' and '.join(map(repr, chosen))} of {path}"))
    return Labels(sorted({*classes.values()}), rows, dict.fromkeys(rows, "file")), is_multi_label


class TextEncoder:
    """Computes features as ``data check`` does, and stores the features of the file."""

    def __init__(self, config: Config) -> None:
        self._config = replace(config, training=replace(config.training, class_weights="none"))
        self._inputs: RunInputs | None = None

    def __call__(self, columns: Sequence[Sequence[str]]) -> NDArray[np.float32]:
        """Return the features of texts or text pairs, [texts, hidden]; the first are stored."""
        rows = make_dataset(
            columns[0],
            ["0"] * len(columns[0]),
            task=Regression(),
            pairs=columns[1] if len(columns) > 1 else None,
        )
        if self._inputs is None:
            self._inputs = prepare_head(self._config, rows, Regression(), samples=False)
            return read_frozen_features(self._inputs).features
        known = self._inputs
        examples = encode_rows(rows, "names", known.text_model, config=known.config)
        unstored = replace(known.config, cache=replace(known.config.cache, feature_cache=False))
        inputs = replace(known, config=unstored, examples={"train": examples})
        return read_frozen_features(inputs).features
