"""Files of rows become tables of texts and their classes, as every source of data does."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from finetune.data.columns import Columns, choose_columns, is_number
from finetune.data.files import read_file
from finetune.data.raw import RawTable
from finetune.errors import DataError
from finetune.events import Emit, Stage, WarningMessage


class LabelledRows(NamedTuple):
    """The rows of a file that have a text and a label.

    Args:
        table: The file.
        rows: Their numbers in it, from 0.
        texts: One a row.
        labels: One a row.
    """

    table: RawTable
    rows: Sequence[int]
    texts: Sequence[str]
    labels: Sequence[str]


def make_table(texts: Sequence[str], labels: Sequence[str], *, classes: Sequence[str]) -> Dataset:
    """Return a table with the columns ``text`` and ``label``.

    Args:
        texts: One a row.
        labels: Class of each text, by name.
        classes: Names of all classes; a label is stored as the position of its name.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(classes))})
    return Dataset.from_dict({"text": list(texts), "label": list(labels)}, features=features)


def read_tables(
    files: Mapping[str, Sequence[Path]],
    *,
    text_column: str | None,
    label_column: str | None,
    needs_all_labels: bool,
    emit: Emit,
) -> DatasetDict:
    """Read each split from its files, with the columns ``text`` and ``label``.

    The classes are those of the training files, under the names that a file itself gives them or
    in the order of :func:`sort_classes`. Rows without a text or a label are left out.

    Args:
        files: The files of each split, ``train`` among them.
        text_column: Name of the texts' column; ``None`` to guess it.
        label_column: Name of the classes' column; ``None`` to guess it.
        needs_all_labels: Refuse a split other than ``train`` that has no labels at all, as
            published test splits may, instead of leaving it out.
        emit: Is told what is read, how, and what is left out.

    Raises:
        UsageError: If the text and the label are to come from one column.
        DataError: If a file is missing or does not parse, a column is not found, a label does not
            occur among the training rows, or these have fewer than two texts or two classes.
    """
    tables = {
        split: [read_file(path, emit=emit) for path in paths] for split, paths in files.items()
    }
    columns = _choose(tables["train"][0], text=text_column, label=label_column, emit=emit)
    if not needs_all_labels:
        tables = _leave_out_unlabelled(tables, label=columns.label, emit=emit)
    splits = {
        split: [_labelled_rows(table, columns, emit=emit) for table in parts]
        for split, parts in tables.items()
    }
    classes = _classes(splits["train"], label=columns.label)
    for parts in splits.values():
        for part in parts:
            _check_labels(part, classes)
    return DatasetDict(
        {
            split: make_table(
                [text for part in parts for text in part.texts],
                [label for part in parts for label in part.labels],
                classes=classes,
            )
            for split, parts in splits.items()
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


def _choose(table: RawTable, *, text: str | None, label: str | None, emit: Emit) -> Columns:
    columns = choose_columns(table.values, text=text, label=label, table=str(table.path))
    guessed = [
        option
        for option, name in (("--text-column", text), ("--label-column", label))
        if name is None
    ]
    hint = f" (guessed; {' and '.join(guessed)} can name others)" if guessed else ""
    emit(Stage(f"texts from column {columns.text!r}, labels from {columns.label!r}{hint}"))
    return columns


def _leave_out_unlabelled(
    tables: Mapping[str, list[RawTable]], *, label: str, emit: Emit
) -> dict[str, list[RawTable]]:
    kept = {}
    for split, parts in tables.items():
        if split == "train" or any(any(part.values.get(label, ())) for part in parts):
            kept[split] = parts
        else:
            emit(
                WarningMessage(
                    f"the {split} split has no labels and is left out",
                    remedy="rows of the training split are held out in its place",
                )
            )
    return kept


def _labelled_rows(table: RawTable, columns: Columns, *, emit: Emit) -> LabelledRows:
    choose_columns(table.values, text=columns.text, label=columns.label, table=str(table.path))
    texts = table.values[columns.text]
    labels = [_tidy(label) for label in table.values[columns.label]]
    rows = [row for row, text in enumerate(texts) if text.strip() and labels[row]]
    if not rows:
        raise DataError(
            f"no row of {table.path} has a text in {columns.text!r} and a label in"
            f" {columns.label!r}",
            remedy="name the right columns with --text-column and --label-column",
        )
    left_out = len(texts) - len(rows)
    if left_out:
        first = next(row for row, text in enumerate(texts) if not (text.strip() and labels[row]))
        emit(
            WarningMessage(
                f"{left_out:,} of {len(texts):,} rows are left out for want of a text or a label,"
                f" the first in {table.place(first)}"
            )
        )
    return LabelledRows(table, rows, [texts[row] for row in rows], [labels[row] for row in rows])


def _tidy(label: str) -> str:
    """Return a label without spaces around it and, of a whole number, without a fraction.

    A column of whole numbers with gaps comes out of pandas as 3.0 and the like.

    >>> _tidy(" 3.0"), _tidy("-1"), _tidy("v3.0")
    ('3', '-1', 'v3.0')
    """
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", label.strip())


def _classes(parts: Sequence[LabelledRows], *, label: str) -> Sequence[str]:
    """Return the names of the classes, having made sure that there is something to learn."""
    path = parts[0].table.path
    present = {label for part in parts for label in part.labels}
    if len(present) == 1:
        raise DataError(
            f"every row of {path} has the label {present.pop()!r}",
            remedy="bring rows of two classes at least, or name another --label-column",
        )
    if len({text for part in parts for text in part.texts}) == 1:
        raise DataError(
            f"every row of {path} has the same text",
            remedy="bring other texts, or name another --text-column",
        )
    return parts[0].table.class_names.get(label) or sort_classes(present)


def _check_labels(part: LabelledRows, classes: Sequence[str]) -> None:
    known = set(classes)
    for row, label in zip(part.rows, part.labels, strict=True):
        if label not in known:
            raise DataError(
                f"the label {label!r} in {part.table.place(row)} is none of the training rows'",
                remedy="correct it, take the row out, or bring training rows of that class",
            )
