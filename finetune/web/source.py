"""What ``finetune label`` reads: rows with the labels they have, and computes: their features."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
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
from finetune.events import Info, emit, muted
from finetune.runs.linear_head import prepare_head, read_frozen_features
from finetune.runs.prepare import RunInputs, encode_rows
from finetune.tasks.labels import are_lists
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single
from finetune.web.journal import Labels, LabelSource


def read_label_source(path: Path, options: DataConfig, *, is_multi_label: bool) -> LabelSource:
    """Read a table or a file with one text per line."""
    try:  # sentence pairs, if two columns have the names of a pair
        with muted():
            pieces = [*read_texts(path, options, as_lines=False, reads_pairs=True)]
    except DataNotFoundError:
        if options.text_pair_column is not None:
            raise
        pieces = [*read_texts(path, options, as_lines=False)]
    lists = [piece[:] for piece in pieces]
    columns = [[text or "" for piece in lists for text in piece.texts]]
    if lists[0].pairs is not None:
        columns.append([text or "" for piece in lists for text in piece.pairs])
    labels, has_lists = Labels(), False
    if (table := lists[0].source) is not None:
        labels, has_lists = _read_labels(table.frame, options, str(path))
    digest = hashlib.sha256(repr(labels.rows).encode())
    for column in columns:
        update_with_texts(digest, pyarrow.chunked_array([column]))
    source = LabelSource(columns, labels, is_multi_label or has_lists, digest.hexdigest())
    if source.is_blank.all():
        raise DataNotFoundError(f"{path} has no texts", remedy="write one text per line")
    return source


def _read_labels(frame: Any, options: DataConfig, path: str) -> tuple[Labels, bool]:
    """Return the labels of a table, and whether they are lists of classes."""
    names = [str(name) for name in frame.columns]
    chosen = [name for name in names if plain_name(name) in LABEL_NAMES][:1]
    if options.label_column is not None:
        chosen = [*columns_named(options.label_column, names)]
    if unknown := {*chosen} - {*names}:
        raise DataNotFoundError(
            f"{path} has no column {min(unknown)!r}", remedy=f"the columns are: {', '.join(names)}"
        )
    columns = {name: as_texts(frame[name]) for name in chosen}
    if not columns or None in columns.values():
        return Labels(), False
    values = read_labels(pyarrow.table(columns), chosen).to_pylist()
    cells = {row: value for row, value in enumerate(values) if value and value.strip()}
    task = Multi if are_lists({*cells.values()}) else Single
    [column] = task.parse([pyarrow.chunked_array([[*cells.values()]], "string")])
    parsed = [[value] if task is Single else value for value in column.to_pylist()]
    rows = {row: (*names,) for row, names in zip(cells, parsed, strict=True)}
    classes = sorted({name for names in rows.values() for name in names})
    if cells:
        emit(Info(f"{len(cells):,} labels from column {' and '.join(map(repr, chosen))} of {path}"))
    return Labels(classes, rows, dict.fromkeys(rows, "file")), task is Multi


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
