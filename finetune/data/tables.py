"""Files and datasets of the Hub become texts, or pairs, and their classes, as every source does."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo, Features, Value
from datasets.fingerprint import generate_random_fingerprint
from datasets.table import InMemoryTable
from numpy.typing import NDArray

from finetune.data.columns import (
    AutoTunedOption,
    Columns,
    check_columns,
    choose_columns,
    find_indicators,
    join_indicators,
    read_texts,
)
from finetune.data.files import RawTable, read_file
from finetune.data.folders import read_folders
from finetune.data.mapped import filter_rows
from finetune.data.parts import Tables, divide_tables, name_labels
from finetune.data.source import HUB_PREFIX, DataOptions, LoadedData
from finetune.devices import host
from finetune.errors import DataError
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.base import Task
from finetune.tasks.choose import choose_task_type
from finetune.tasks.labels import distinct_values, listed_counts

# What UTF-8 of other scripts looks like where it was read as Windows-1252.
MOJIBAKE = "[ÃÂâðÐÑ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"  # noqa: RUF001


class TextColumns(NamedTuple):
    """The texts of rows, and the second texts where the rows have pairs."""

    texts: pyarrow.ChunkedArray
    pairs: pyarrow.ChunkedArray | None

    @property
    def columns(self) -> list[pyarrow.ChunkedArray]:
        """The one column, or both."""
        return [self.texts] if self.pairs is None else [self.texts, self.pairs]

    @property
    def joined(self) -> pyarrow.ChunkedArray:
        """The texts, and the pairs with a bar between their texts, to be shown or counted."""
        if self.pairs is None:
            return self.texts
        return pc.binary_join_element_wise(self.texts, self.pairs, " | ")

    def slice(self, start: int, end: int) -> "TextColumns":
        """Return those of the rows from one to before another."""
        texts, *pairs = (column.slice(start, end - start) for column in self.columns)
        return TextColumns(texts, pairs[0] if pairs else None)

    def take(self, rows: NDArray[np.int64]) -> "TextColumns":
        """Return those of some rows."""
        texts, *pairs = (column.take(pyarrow.array(rows)) for column in self.columns)
        return TextColumns(texts, pairs[0] if pairs else None)


class LabelledRows(NamedTuple):
    """The rows of a file that have their texts and a label, and ``row``, their number there."""

    table: RawTable
    rows: pyarrow.Table


def make_table(texts: Any, labels: Any, *, task: Task, pairs: Any = None) -> Dataset:
    """Return a table with the columns ``text`` and ``label``.

    Texts and labels, the latter as the task parses them, are Arrow arrays or sequences of strings.
    Of pairs, the second texts become the column ``text_pair``.
    """
    columns = {"text": texts} if pairs is None else {"text": texts, "text_pair": pairs}
    features = Features({**dict.fromkeys(columns, Value("string")), "label": task.feature})
    arrays = [*map(_strings, columns.values()), task.encode(_strings(labels))]
    rows = pyarrow.table(arrays, schema=features.arrow_schema)
    return dataset_of(rows, DatasetInfo(features=features))


def dataset_of(rows: pyarrow.Table, info: DatasetInfo) -> Dataset:
    """Return rows in memory as a ``Dataset``."""
    # Without a fingerprint, which serves the cache of map() alone, all rows would be pickled.
    return Dataset(InMemoryTable(rows), info=info, fingerprint=generate_random_fingerprint())


def column_of(table: Dataset, name: str) -> pyarrow.ChunkedArray:
    """Return a column as Arrow."""
    return table.with_format("arrow", columns=[name])[:][name]


def texts_of(table: Dataset) -> TextColumns:
    """Return the texts of rows, or their pairs."""
    pairs = column_of(table, "text_pair") if "text_pair" in table.column_names else None
    return TextColumns(column_of(table, "text"), pairs)


def update_with_texts(digest: "hashlib._Hash", column: pyarrow.ChunkedArray) -> None:
    """Add the lengths of texts and their bytes to a digest, however they are cut into chunks."""
    chunks = [pc.cast(chunk, "large_binary") for chunk in column.chunks if len(chunk)]
    for texts in chunks:
        lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        digest.update(lengths.astype(np.int64).tobytes())
    for texts in chunks:
        _, offsets, content = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset :]
        digest.update(content[int(ends[0]) : int(ends[len(texts)])])


def return_freed_memory() -> None:
    """Give the system what reading and comparing texts has freed: several times their size."""
    pyarrow.default_memory_pool().release_unused()
    host.return_freed_memory()


def read_tables(
    files: Mapping[str, Sequence[Path]],
    options: DataOptions,
    *,
    is_for_training: bool = True,
    emit: Emit,
) -> LoadedData:
    """Read each split from its files, with the columns of :func:`make_table`.

    The classes are those of the training files, under the names that a file itself gives them or
    in the order of ``sort_classes``. Rows without a text or a label are skipped. A split other than
    ``train`` without any labels, as published test splits may be, is left out of a dataset of the
    Hub and else refused; training rows of which nothing can be learned are refused with
    ``is_for_training``.

    Raises:
        UsageError: If the text and the label are to come from one column.
        DataError: If a file is missing or does not parse, a column is not found, a label does not
            occur in the training rows, or these have fewer than two texts or two classes.
    """
    tables, columns = open_tables(files, options, emit=emit)
    return make_splits(tables, columns, options, is_for_training=is_for_training, emit=emit)


def open_tables(
    files: Mapping[str, Sequence[Path]], options: DataOptions, *, emit: Emit
) -> tuple[Tables, Columns]:
    """Read the tables of each split, and choose their columns; see :func:`read_tables`.

    One file may hold several splits, and so may a folder.
    """
    tables: Tables
    if len(files) == 1 and os.path.isdir(files["train"][0]):  # no error where a name is too long
        found = read_folders(files["train"][0], options, emit=emit)
        tables = {split: [table] for split, table in found.items()}
    else:
        tables = {
            split: [read_table(path, options, emit=emit) for path in paths]
            for split, paths in files.items()
        }
    return_freed_memory()
    tables = divide_tables(tables, options, emit=emit)
    columns = choose_table_columns(tables["train"][0], options, emit=emit)
    return name_labels(tables, columns.label.name, options, emit=emit), columns


def make_splits(
    tables: Tables,
    columns: Columns,
    options: DataOptions,
    *,
    is_for_training: bool = True,
    emit: Emit,
) -> LoadedData:
    """Make the splits of tables that have been read; see :func:`read_tables`."""
    label = columns.label.name
    if options.data.startswith(HUB_PREFIX):
        tables = _leave_out_unlabelled(tables, label=label, emit=emit)
    _check_columns(tables, columns)
    first = tables["train"][0]
    raw = [one.columns[label] for own in tables.values() for one in own]
    own = raw[: len(tables["train"])]
    kind = _choose_kind(own, options, names=first.class_names.get(label), emit=emit)
    labels = iter(kind.parse(raw))
    parts = {
        split: [_labelled_rows(table, columns, next(labels), emit=emit) for table in own]
        for split, own in tables.items()
    }
    train = _joined(parts["train"])
    task = kind.of_labels(train["label"], names=first.class_names.get(label))
    if is_for_training:
        _check_learnable(train, first, task)
    splits = {}
    for split, own in parts.items():
        skips = options.skip_unknown_labels
        splits[split] = _joined(
            _with_known_labels(own, train["label"], task, split=split, is_skipped=skips, emit=emit)
        )
    _warn_of_mojibake(train["text"], path=first.path, emit=emit)
    return LoadedData(
        DatasetDict(
            {
                split: make_table(
                    rows["text"],
                    rows["label"],
                    task=task,
                    pairs=rows["text_pair"] if columns.pair else None,
                )
                for split, rows in splits.items()
            }
        ),
        task,
        columns=columns.by_option,
    )


def _choose_kind(
    labels: Sequence[pyarrow.ChunkedArray],
    options: DataOptions,
    *,
    names: Sequence[str] | None,
    emit: Emit,
) -> type[Task]:
    kind, reason = choose_task_type(options.task, distinct_values(labels), names=names)
    emit(Info(f"task: {kind.name}, {reason}"))
    return kind


def _strings(values: Any) -> Any:
    """Return values as Arrow strings, if they are not an Arrow array yet."""
    if isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return values
    return pyarrow.array(values, "string")


def _joined(parts: Iterable[LabelledRows]) -> pyarrow.Table:
    return pyarrow.concat_tables(part.rows for part in parts)


def read_table(path: Path, options: DataOptions, *, emit: Emit) -> RawTable:
    """Read a file; several columns of 0 and 1 that are its labels become one column of lists."""
    table = read_file(path, options, emit=emit)
    label = options.label_column or find_indicators(table.columns)
    columns = join_indicators(table.columns, label) if label else table.columns
    return table if columns is table.columns else replace(table, columns=columns, flags=label)


def choose_table_columns(table: RawTable, options: DataOptions, *, emit: Emit) -> Columns:
    """Return the columns of a table that are named, or else guessed, and report them."""
    if table.flags and options.label_column is None:
        options = replace(options, label_column=table.flags)
        columns = choose_columns(table.columns, options, table=str(table.path))
        columns = replace(columns, label=AutoTunedOption(table.flags, "columns of 0 and 1"))
    else:
        columns = choose_columns(table.columns, options, table=str(table.path))
    second = f", second texts from {columns.pair.name!r}" if columns.pair else ""
    emit(Info(f"texts from column {columns.text}{second}, labels from {columns.label}"))
    return columns


def _leave_out_unlabelled(
    tables: Mapping[str, Sequence[RawTable]], *, label: str, emit: Emit
) -> dict[str, Sequence[RawTable]]:
    kept = {}
    for split, parts in tables.items():
        if split == "train" or any(_has_values(part.columns, label) for part in parts):
            kept[split] = parts
            continue
        names = ", ".join(part.path.name for part in parts)
        emit(
            WarningMessage(
                f"the {split} split has no labels and is left out: {names}",
                remedy="rows of the training split are held out instead",
            )
        )
    return kept


def _has_values(columns: pyarrow.Table, name: str) -> bool:
    return name in columns.column_names and pc.any(pc.not_equal(columns[name], "")).as_py()


def _check_columns(tables: Mapping[str, Sequence[RawTable]], columns: Columns) -> None:
    """Make sure that each file has the columns."""
    for table in (table for own in tables.values() for table in own):
        check_columns(table.columns.column_names, columns, table=str(table.path))


def _labelled_rows(
    table: RawTable, columns: Columns, labels: pyarrow.ChunkedArray, *, emit: Emit
) -> LabelledRows:
    chosen = {"text": columns.text.name}
    if columns.pair:
        chosen["text_pair"] = columns.pair.name
    texts = {name: read_texts(table.columns, own) for name, own in chosen.items()}
    strict = pc.is_valid(labels)
    for column in texts.values():
        is_blank = pc.or_(pc.equal(column, ""), pc.utf8_is_space(column))
        strict = pc.and_not(strict, is_blank)
    numbered = {**texts, "label": labels, "row": pyarrow.array(np.arange(len(labels)))}
    rows = filter_rows(pyarrow.table(numbered), strict.to_numpy())
    if not len(rows):
        raise DataError(
            f"no row of {table.path} has a text in {' and in '.join(map(repr, chosen.values()))}"
            f" and a label in {columns.label.name!r}",
            remedy="name the right columns with --text-column and --label-column",
        )
    if len(rows) < len(labels):
        first = table.place(pc.index(strict, False).as_py())
        emit(
            WarningMessage(
                f"{len(labels) - len(rows):,} of {len(labels):,} rows skipped: empty text or label,"
                f" the first in {first}"
            )
        )
    return LabelledRows(table, rows)


def _check_learnable(rows: pyarrow.Table, table: RawTable, task: Task) -> None:
    """Raise an error if all rows have one label or one text."""
    if constant := task.find_constant(task.labels(task.encode(rows["label"]))):
        raise DataError(
            f"every row of {table.path} has {constant}",
            remedy="bring rows of at least two classes, or name another --label-column",
        )
    texts = [rows[name] for name in ("text", "text_pair") if name in rows.column_names]
    if all(pc.all(pc.equal(column, column[0])).as_py() for column in texts):
        raise DataError(
            f"every row of {table.path} has the same text",
            remedy="bring other texts, or name another --text-column",
        )


def _with_known_labels(
    parts: Sequence[LabelledRows],
    training: pyarrow.ChunkedArray,
    task: Task,
    *,
    split: str,
    is_skipped: bool,
    emit: Emit,
) -> list[LabelledRows]:
    """Return the rows whose labels occur in the training rows; others are an error or skipped."""
    found = [task.find_unknown(part.rows["label"], training=training) for part in parts]
    unknown = [
        (part.table, row["row"], row["unknown"])
        for part, labels in zip(parts, found, strict=True)
        for row in part.rows.append_column("unknown", labels).filter(labels.is_valid()).to_pylist()
    ]
    if not unknown:
        return list(parts)
    counts = listed_counts(Counter(label for *_, label in unknown))
    has_others = len(unknown) < sum(len(part.rows) for part in parts)
    if is_skipped and has_others:
        skipped = f"{len(unknown):,} rows of the {split} split skipped"
        emit(WarningMessage(f"{skipped}: no training row has {counts}"))
        return [
            LabelledRows(part.table, filter_rows(part.rows, labels.is_null().to_numpy()))
            for part, labels in zip(parts, found, strict=True)
        ]
    table, row, first = unknown[0]
    folded = {name.casefold() for name in task.class_names}
    differ_in_case = all(label.casefold() in folded for *_, label in unknown)
    raise DataError(
        f"no training row has these labels of the {split} split: {counts}; the first is"
        f" {first!r} in {table.place(row)}",
        remedy="write them as in the training rows: they differ in case alone"
        if differ_in_case
        else "correct them, or bring training rows of these classes"
        + ", or skip the rows with --skip-unknown-labels" * has_others,
    )


def _warn_of_mojibake(texts: pyarrow.ChunkedArray, *, path: Path, emit: Emit) -> None:
    garbled = pyarrow.chunked_array(map(_find_mojibake, texts.chunks), "string")
    if len(garbled):
        emit(
            WarningMessage(
                f"{len(garbled):,} texts of {path} look like UTF-8 that was decoded as another"
                f" encoding, such as {garbled[0].as_py()[:60]!r}",
                remedy="export the file again as UTF-8, or name its encoding with --encoding",
            )
        )


def _find_mojibake(texts: pyarrow.Array) -> pyarrow.Array:
    texts = texts.filter(pc.invert(pc.string_is_ascii(texts)))
    return texts.filter(pc.match_substring_regex(texts, MOJIBAKE))
