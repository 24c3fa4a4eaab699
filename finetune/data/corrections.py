"""Applies decisions on labels and new class names to loaded rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import DatasetDict
from numpy.typing import NDArray

from finetune.config.schema import DataConfig
from finetune.data.dataset import (
    DataSource,
    LoadedData,
    column_of,
    make_dataset,
    rows_where,
    texts_of,
)
from finetune.data.packed import reading_explained
from finetune.data.read import read_file
from finetune.errors import DataError, DataMismatchError
from finetune.events import Info, emit, muted
from finetune.files import file_sha256
from finetune.tasks.labels import flat_values, map_values, name_classes

KEEP, DROP = "keep", "drop"
COLUMNS = ("decision", "row", "text")
REMEDY = "audit the data again, and decide on what it writes"


def apply_corrections(loaded: LoadedData, options: DataConfig) -> LoadedData:
    """Return the data with the decisions of ``corrections``, then the names of ``label_map``.

    Raises:
        DataMismatchError: If the text of a row is not the one that was decided on.
        DataError: If a decision is not a class, or a file can't be parsed.
    """
    if options.corrections is None and options.label_map is None:
        return loaded
    labels = {
        split: loaded.task.decode(column_of(rows, "label")) for split, rows in loaded.splits.items()
    }
    kept = {split: np.ones(len(rows), bool) for split, rows in loaded.splits.items()}
    names = {name: name for name in loaded.task.class_names}
    files = [Path(name).expanduser() for name in (options.corrections, options.label_map) if name]
    with reading_explained():
        sources = [*loaded.sources, *(DataSource(str(path), file_sha256(path)) for path in files)]
    if options.corrections is not None:
        path = Path(options.corrections).expanduser()
        changed = _decide(loaded, path, labels, kept)
        dropped = sum(int((~mask).sum()) for mask in kept.values())
        emit(Info(f"{path}: the labels of {changed:,} rows changed, {dropped:,} rows dropped"))
    if options.label_map is not None:
        path = Path(options.label_map).expanduser()
        new = _read_map(path)
        missing = "".join(f"; no row has {name!r}" for name in new.keys() - names)
        emit(Info(f"{path}: {len(new.keys() & names):,} classes renamed{missing}"))
        names = {name: new.get(name, name) for name in names}
        labels = {
            split: map_values(column, lambda name: names.get(name, name))
            for split, column in labels.items()
        }
    task = type(loaded.task).of_labels(
        labels["train"].filter(pyarrow.array(kept["train"])), names=[*dict.fromkeys(names.values())]
    )
    splits = DatasetDict()
    for split, rows in loaded.splits.items():
        texts = texts_of(rows_where(rows, kept[split]))
        parsed = labels[split].filter(pyarrow.array(kept[split]))
        splits[split] = make_dataset(texts.texts, parsed, task=task, pairs=texts.pairs)
    row_numbers = {split: loaded.numbers_of(split)[mask] for split, mask in kept.items()}
    return replace(loaded, splits=splits, task=task, sources=sources, row_numbers=row_numbers)


def _decide(
    loaded: LoadedData,
    path: Path,
    labels: dict[str, pyarrow.ChunkedArray],
    kept: dict[str, NDArray[np.bool_]],
) -> int:
    """Apply the decisions of a file to ``labels`` and ``kept``; return the number of changes."""
    with muted():
        table = read_file(path, DataConfig()).columns
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(
            f"{path} has no column {missing[0]!r}",
            remedy="take suspects.csv of finetune data audit, and fill in its column decision",
        )
    decisions = pc.utf8_trim_whitespace(table["decision"])
    table = table.set_column(table.column_names.index("decision"), "decision", decisions)
    if "split" not in table.column_names:
        table = table.append_column("split", [["train"] * len(table)])
    made = table.filter(pc.invert(pc.is_in(decisions, value_set=pyarrow.array(["", KEEP]))))
    changed = 0
    for split in made["split"].unique().to_pylist():
        if split not in labels:
            raise DataError(
                f"{path} has rows of the split {split!r}, but the data has no such split",
                remedy=REMEDY,
            )
        rows_of_split = made.filter(pc.equal(made["split"], split))
        rows = _find_rows(loaded, split, rows_of_split, path)
        is_drop = pc.equal(rows_of_split["decision"], DROP).to_numpy()
        kept[split][rows[is_drop]] = False
        [parsed] = loaded.task.parse([rows_of_split["decision"].filter(pyarrow.array(~is_drop))])
        known = set(loaded.task.class_names)
        for name in flat_values(parsed).unique().to_pylist() if known else ():
            if name not in known:
                raise DataError(
                    f"{path}: the decision {name!r} is not a class of the data",
                    remedy=f"write {KEEP}, {DROP} or a class: {', '.join(sorted(known)[:20])}",
                )
        places = np.arange(len(labels[split]))
        places[rows[~is_drop]] = len(places) + np.arange(len(parsed))
        chunks = (
            pyarrow.chunked_array(parsed).cast(labels[split].type).chunks if len(parsed) else []
        )
        both = pyarrow.chunked_array([*labels[split].chunks, *chunks])
        labels[split] = both.take(pyarrow.array(places))
        changed += len(parsed)
    return changed


def _find_rows(
    loaded: LoadedData, split: str, decided: pyarrow.Table, path: Path
) -> NDArray[np.int64]:
    """Return the places of decided rows in a split; DataMismatchError if a text has changed."""
    known = pyarrow.array(map(str, (loaded.numbers_of(split) + 1).tolist()), "string")
    places = pc.index_in(decided["row"], value_set=known)
    texts = texts_of(loaded.splits[split]).joined.take(places)
    rows = zip(
        *(column.to_pylist() for column in (decided["row"], decided["text"], texts)), strict=True
    )
    for number, text, now in rows:
        if now is None or now.split() != text.split():
            reason = "is not in the data" if now is None else f"now has the text {now[:60]!r}"
            raise DataMismatchError(
                f"{path} decides on row {number} of {split} ({text[:60]!r}), which {reason}",
                remedy=REMEDY,
            )
    return np.asarray(places.to_numpy(), np.int64)


def _read_map(path: Path) -> dict[str, str]:
    """Return new names by label, from the first two columns of a table."""
    with muted():
        table = read_file(path, DataConfig(header=False)).columns
    if len(table.column_names) < 2:
        raise DataError(f"{path} has one column", remedy="write label,new name in each row")
    old_names, new_names = (column.to_pylist() for column in table.columns[:2])
    classes = name_classes([*old_names, *new_names])
    pairs = zip(old_names, new_names, strict=True)
    new = {classes[old]: classes[name] for old, name in pairs}
    return {old: name for old, name in new.items() if name and (old, name) != ("label", "into")}
