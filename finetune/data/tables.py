"""Files and datasets of the Hub become texts and their classes, as every source of data does."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from finetune.data.columns import Columns, choose_columns, is_number
from finetune.data.files import RawTable, read_file
from finetune.data.source import DataOptions
from finetune.errors import DataError
from finetune.events import Emit, Stage, WarningMessage


class LabelledRows(NamedTuple):
    """The rows of a file that have a text and a label: columns ``text``, ``label`` and ``row``."""

    table: RawTable
    rows: pyarrow.Table


def make_table(texts: Any, labels: Any, *, classes: Sequence[str]) -> Dataset:
    """Return a table with the columns ``text`` and ``label``.

    Args:
        texts: One for each row, as an Arrow array or a sequence.
        labels: Class of each text, by name, as an Arrow array or a sequence.
        classes: Names of all classes; a label is stored as the position of its name.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(classes))})
    numbers = pc.index_in(_strings(labels), value_set=_strings(classes)).cast("int64")
    return Dataset.from_dict({"text": _strings(texts), "label": numbers}, features=features)


def column_of(table: Dataset, name: str) -> pyarrow.ChunkedArray:
    """Return a column as Arrow."""
    return table.select_columns(name).with_format("arrow")[:][name]


def texts_of(table: Dataset) -> list[str]:
    """Return the texts; ``table["text"]`` would look each one up by its number."""
    texts: list[str] = column_of(table, "text").to_pylist()
    return texts


def read_tables(
    files: Mapping[str, Sequence[Path]],
    options: DataOptions,
    *,
    needs_all_labels: bool,
    emit: Emit,
) -> DatasetDict:
    """Read each split from its files, with the columns ``text`` and ``label``.

    The classes are those of the training files, under the names that a file itself gives them or
    in the order of :func:`sort_classes`. Rows without a text or a label are skipped.

    Args:
        files: The files of each split, ``train`` among them.
        options: Of these, the columns and the encoding.
        needs_all_labels: Refuse a split other than ``train`` that has no labels at all, as
            published test splits may, instead of leaving it out.
        emit: Receives progress events.

    Raises:
        UsageError: If the text and the label are to come from one column.
        DataError: If a file is missing or does not parse, a column is not found, a label does not
            occur in the training rows, or these have fewer than two texts or two classes.
    """
    tables = {
        split: [read_file(path, options, emit=emit) for path in paths]
        for split, paths in files.items()
    }
    columns = _choose(tables["train"][0], options, emit=emit)
    if not needs_all_labels:
        tables = _leave_out_unlabelled(tables, label=columns.label.name, emit=emit)
    parts = {
        split: [_labelled_rows(table, columns, emit=emit) for table in read]
        for split, read in tables.items()
    }
    splits = {
        split: pyarrow.concat_tables(part.rows for part in own) for split, own in parts.items()
    }
    classes = _classes(splits["train"], tables["train"][0], label=columns.label.name)
    for part in (part for own in parts.values() for part in own):
        _check_labels(part, classes)
    return DatasetDict(
        {
            split: make_table(rows["text"], rows["label"], classes=classes)
            for split, rows in splits.items()
        }
    )


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: numbers by their value, then words by the alphabet.

    >>> sort_classes(["b", "10", "9", "a", "B", "10"])
    ['9', '10', 'a', 'B', 'b']
    """
    return sorted(
        set(labels),
        key=lambda label: (
            (0, float(label), "", label) if is_number(label) else (1, 0.0, label.casefold(), label)
        ),
    )


def _strings(values: Any) -> Any:
    """Return values as Arrow strings, if they are not an Arrow array yet."""
    if isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return values
    return pyarrow.array(values, "string")


def _choose(table: RawTable, options: DataOptions, *, emit: Emit) -> Columns:
    text, label = options.text_column, options.label_column
    columns = choose_columns(table.columns, text=text, label=label, table=str(table.path))
    emit(Stage(f"texts from column {columns.text}, labels from {columns.label}"))
    return columns


def _leave_out_unlabelled(
    tables: Mapping[str, list[RawTable]], *, label: str, emit: Emit
) -> dict[str, list[RawTable]]:
    kept = {}
    for split, parts in tables.items():
        if split == "train" or any(_has_values(part.columns, label) for part in parts):
            kept[split] = parts
        else:
            emit(
                WarningMessage(
                    f"the {split} split has no labels and is left out",
                    remedy="rows of the training split are held out instead",
                )
            )
    return kept


def _has_values(columns: pyarrow.Table, name: str) -> bool:
    return name in columns.column_names and pc.any(pc.not_equal(columns[name], "")).as_py()


def _labelled_rows(table: RawTable, columns: Columns, *, emit: Emit) -> LabelledRows:
    text, label = columns.text.name, columns.label.name
    choose_columns(table.columns, text=text, label=label, table=str(table.path))
    texts = table.columns[text]
    labels = _tidy_labels(table.columns[label])
    has_text = pc.not_equal(pc.utf8_trim_whitespace(texts), "")
    has_both = pc.and_(has_text, pc.not_equal(labels, ""))
    rows = pyarrow.table(
        {"text": texts, "label": labels, "row": pyarrow.array(range(len(texts)), "int64")}
    ).filter(has_both)
    if not len(rows):
        raise DataError(
            f"no row of {table.path} has a text in {text!r} and a label in {label!r}",
            remedy="name the right columns with --text-column and --label-column",
        )
    if len(rows) < len(texts):
        first = table.place(pc.index(has_both, False).as_py())
        emit(
            WarningMessage(
                f"{len(texts) - len(rows):,} of {len(texts):,} rows skipped: empty text or label,"
                f" the first in {first}"
            )
        )
    return LabelledRows(table, rows)


def _tidy_labels(labels: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    distinct = pc.unique(labels)
    tidy = pyarrow.array([_tidy(label) for label in distinct.to_pylist()], "string")
    return pc.take(tidy, pc.index_in(labels, value_set=distinct))


def _tidy(label: str) -> str:
    """Return a label without spaces around it and, of a whole number, without a fraction.

    A column of whole numbers with gaps comes out of pandas as 3.0 and the like.

    >>> _tidy(" 3.0"), _tidy("-1"), _tidy("v3.0")
    ('3', '-1', 'v3.0')
    """
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", label.strip())


def _classes(rows: pyarrow.Table, table: RawTable, *, label: str) -> Sequence[str]:
    """Return the names of the classes, having made sure that there is something to learn."""
    present = pc.unique(rows["label"]).to_pylist()
    if len(present) == 1:
        raise DataError(
            f"every row of {table.path} has the label {present[0]!r}",
            remedy="bring rows of at least two classes, or name another --label-column",
        )
    if pc.count_distinct(rows["text"]).as_py() == 1:
        raise DataError(
            f"every row of {table.path} has the same text",
            remedy="bring other texts, or name another --text-column",
        )
    return table.class_names.get(label) or sort_classes(present)


def _check_labels(part: LabelledRows, classes: Sequence[str]) -> None:
    is_known = pc.is_in(part.rows["label"], value_set=_strings(classes))
    unknown = part.rows.filter(pc.invert(is_known)).slice(0, 1).to_pylist()
    if unknown:
        place = part.table.place(unknown[0]["row"])
        raise DataError(
            f"the label {unknown[0]['label']!r} in {place} is in no training row",
            remedy="correct it, remove the row, or bring training rows of that class",
        )
