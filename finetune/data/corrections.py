"""Corrects labels: applies decisions on audit suspects, and a map of class names."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.columns import OtherData
from finetune.data.dataset import LoadedData, number_splits, texts_of, with_labels
from finetune.data.read import read_file
from finetune.errors import DataError
from finetune.events import Info, emit, muted
from finetune.tasks.base import Task
from finetune.tasks.labels import distinct_values, flat_values, listed, map_values, name_classes
from finetune.tasks.tables import format_cell

# Decisions that are not a class.
KEEP, DROP = "keep", "drop"
Labels = Mapping[str, pyarrow.ChunkedArray]


def correct_labels(loaded: LoadedData, options: DataConfig) -> LoadedData:
    """Apply the decisions in ``corrections``, then the new names in ``label_map``.

    Classes that lose all their rows are dropped.
    """
    task, splits = loaded.task, dict[str, pyarrow.Table]()
    columns: Labels = {split: task.decode(rows["label"]) for split, rows in loaded.splits.items()}
    names, had_rows = {name: name for name in task.class_names}, _classes_in(columns)
    if options.corrections is not None:
        path = Path(options.corrections).expanduser()
        columns = _decide(loaded, path, columns, is_other=isinstance(options, OtherData))
        names |= {name: name for name in _classes_in(columns)} if names else {}
    if options.label_map is not None:
        names |= _read_label_map(Path(options.label_map).expanduser(), names)
    if names:
        columns = {split: _rename(column, names) for split, column in columns.items()}
    kept = {split: column.is_valid().to_numpy() for split, column in columns.items()}
    columns = {split: column.drop_null() for split, column in columns.items()}
    gone = {*had_rows} - _classes_in(columns)
    classes = [name for name in dict.fromkeys(names.values()) if name and name not in gone]
    task = type(task).of_labels(columns["train"], names=classes)
    for split, rows in loaded.splits.items():
        splits[split] = with_labels(rows.filter(kept[split]), columns[split], task=task)
    return replace(loaded, splits=splits, task=task)


def _classes_in(columns: Labels) -> set[str]:
    return {*distinct_values(map(flat_values, columns.values()))} - {None}


def _rename(column: pyarrow.ChunkedArray, names: Mapping[str, str]) -> pyarrow.ChunkedArray:
    """Rename labels. A label without a new name becomes empty."""
    renamed = map_values(column, lambda name: names.get(name) or None)
    if not pyarrow.types.is_list(column.type) or all(names.values()):
        return renamed
    lists = [row and ([*filter(None, row)] or None) for row in renamed.to_pylist()]
    return pyarrow.chunked_array([lists], column.type)


def read_class_columns(path: Path) -> list[list[str]]:
    """Read the columns of a table, including its header, whose cells can be classes."""
    with muted():
        table = read_file(path, DataConfig(header=False)).columns.to_pydict()
    return [[*map(name_classes(cells).__getitem__, cells)] for cells in table.values()]


def _read_label_map(path: Path, names: Collection[str]) -> dict[str, str]:
    """Read the new name of each renamed class. An empty name drops the label."""
    cells = read_class_columns(path)
    if len(cells) < 2:
        raise DataError(f"{path} has only one column", remedy="write label,new name in each row")
    new = dict(zip(*cells[:2], strict=True))
    unknown = {*new} - {*names, "label"}
    missing = f"; no row has {listed(sorted(unknown))}" if unknown else ""
    new = {name: new[name] for name in names if name in new}
    empty = [name for name in new if not new[name]]
    emptied = f", and rows lose the label {listed(empty)}" if empty else ""
    emit(Info(f"{path}: {len(new) - len(empty):,} classes renamed{emptied}{missing}"))
    return new


def read_decisions(path: Path, classes: Collection[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a suspects file with a decision, with ``KEEP`` in any case."""
    with muted():
        table = read_file(path, DataConfig()).columns
    if missing := [name for name in ("decision", "row", "text") if name not in table.column_names]:
        raise DataError(
            f"{path} has no column {missing[0]!r}",
            remedy="use suspects.csv from finetune data audit, and fill in its `decision` column",
        )
    rows = [row | {"decision": row["decision"].strip()} for row in table.to_pylist()]
    for row in rows:
        if row["decision"].casefold() in (KEEP, DROP) and row["decision"] not in classes:
            row["decision"] = row["decision"].casefold()
    return [row for row in rows if row["decision"]]


def decision_key(text: str, label: Any) -> tuple[str, str]:
    """Return a key for a labeled text that is the same in a table and in a suspects file."""
    return " ".join(text.split()), format_cell(label).casefold()


def _parse_decisions(rows: Sequence[Mapping[str, str]], task: Task) -> list[Any]:
    """Parse the decided labels, None for rows to drop. Class names are case-insensitive."""
    changed = [row["decision"] for row in rows if row["decision"] != DROP]
    [parsed] = task.parse([pyarrow.chunked_array([changed], "string")])
    if known := task.class_names:
        in_lower_case = {name.casefold(): name for name in known}
        spelled = {name: name for name in known}
        parsed = map_values(
            parsed, lambda name: spelled.get(name, in_lower_case.get(name.casefold(), name))
        )
    labels = iter(parsed.to_pylist())
    return [None if row["decision"] == DROP else next(labels) for row in rows]


def _decide(loaded: LoadedData, path: Path, columns: Labels, *, is_other: bool) -> Labels:
    """Apply the decisions of a file to labels. The label of a dropped row becomes null.

    In data other than the audited data, rows may be missing.
    """
    task = loaded.task
    rows = [row for row in read_decisions(path, task.class_names) if row["decision"] != KEEP]
    decided = _parse_decisions(rows, task)
    names = {name for label in decided for name in np.atleast_1d(label).tolist()} - {None}
    if not is_other and task.class_names and (unknown := names - {*task.class_names}):
        raise DataError(
            f"{path}: the decision {min(unknown)!r} is not a class in the data",
            remedy=f"write {KEEP}, {DROP} or a class: {listed(task.class_names)}",
        )
    labels = {split: column.to_pylist() for split, column in columns.items()}
    changed = {True: 0, False: 0}
    found = [*_find(loaded, rows, labels)]
    for row, label, places in zip(rows, decided, found, strict=True):
        if not places and not is_other:
            decision = f"row {row['row']} of {row.get('split', 'train')} ({row['text'][:60]!r})"
            raise DataError(
                f"{path} contains a decision on {decision}, but the data has no row with this text",
                remedy="run finetune data audit again, and fill in the new suspects.csv",
            )
        for split, place in places:
            labels[split][place] = label
            changed[label is None] += 1
    counts = f"{changed[False]:,} rows changed, {changed[True]:,} rows dropped"
    emit(Info(f"{path}: {counts}"))
    return {
        split: pyarrow.chunked_array([labels[split]], column.type)
        for split, column in columns.items()
    }


def _find(
    loaded: LoadedData, rows: Sequence[Mapping[str, str]], labels: Mapping[str, list[Any]]
) -> Iterator[list[tuple[str, int]]]:
    """Yield the positions of each row with its text and label and, if possible, its number.

    Rows may have moved since the audit, and the audited run may have held out a split.
    """
    texts = {split: [texts_of(table).joined] for split, table in loaded.splits.items()}
    wanted = pyarrow.chunked_array([[row["text"] for row in rows]], "string")
    text_numbers = number_splits({"": [wanted], **texts})
    own = text_numbers.pop("").tolist()
    by_text: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for split, numbers in text_numbers.items():
        for place in np.flatnonzero(np.isin(numbers, own)).tolist():
            by_text[numbers[place]].append((split, place))
    row_numbers = {split: table["row"] for split, table in loaded.splits.items()}
    for row, text in zip(rows, own, strict=True):
        split_of_row, label = row.get("split"), row.get("label")
        places = defaultdict(list)
        for split, place in by_text[text]:
            is_split = split_of_row == split or split_of_row not in texts
            has_number = is_split and str(row_numbers[split][place]) == row["row"]
            has_label = label is not None and decision_key(
                "", labels[split][place]
            ) == decision_key("", label)
            places[has_label, has_number].append((split, place))
        best = ((True, True), (True, False), (False, True), (False, label is not None))
        yield next((places[match] for match in best if match in places), [])
