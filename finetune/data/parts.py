"""What belongs to a table beside its texts: a column that says the split, a file of class names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune.data.columns import plain_name
from finetune.data.encoding import find_text
from finetune.data.files import RawTable
from finetune.data.hub_tables import SPLIT_OF_WORD
from finetune.data.packed import unpack
from finetune.data.source import DataOptions
from finetune.errors import DataError, DataNotFound, UsageError
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.labels import distinct_values, map_values

Tables = Mapping[str, Sequence[RawTable]]
SPLIT_NAMES = ("split", "set", "partition", "subset", "fold")
NO_COLUMN = "none"
INTEGERS = r"\W*\d+(\W+\d+)*\W*"


def divide_tables(tables: Tables, options: DataOptions, *, emit: Emit) -> Tables:
    """Divide the files of one split by their column of splits, if they have one; it is left out.

    Without a name it is found by its own and its values; ``none`` stands for no column.

    Raises:
        UsageError: If the column is named, and there are files of several splits.
        DataError: If it is not there, or holds something else than the names of splits.
    """
    name = options.split_column
    if name == NO_COLUMN or (len(tables) > 1 and name is None):
        return tables
    if len(tables) > 1:
        raise UsageError("--split-column goes with one file", remedy="leave it out")
    [parts] = tables.values()
    path, names = parts[0].path, parts[0].columns.column_names
    if name not in (None, *names):
        listed = ", ".join(map(repr, names))
        raise DataNotFound(f"{path} has no column {name!r}", remedy=f"there are: {listed}")
    for one in [name] if name else filter(_is_named_as_split, names):
        splits = _splits_in(parts, one)
        if all(splits.values()) and "train" in splits.values() and len(splits) > 1:
            emit(Info(f"splits from column {one!r}; --split-column none ignores it"))
            return _divide(parts, one, splits)
        words = ", ".join(map(repr, sorted(splits)[:5]))
        complaint = f"{one!r} of {path} does not say the split of each row: {words}"
        remedy = "write train, validation or test, or name another --split-column, or none"
        if name:
            raise DataError(complaint, remedy=remedy)
        if any(splits.values()):
            emit(WarningMessage(f"{complaint}; it is ignored", remedy=remedy))
    return tables


def name_labels(tables: Tables, label: str, options: DataOptions, *, emit: Emit) -> Tables:
    """Replace numbers of classes, alone or in lists, by the names in a file of the user's.

    They count its lines from 0, or from 1 if no label is 0 and one is the number of lines; -1 is
    no label.

    Raises:
        DataError: If the file can't be read, or a label is no number of a line.
    """
    if options.label_names is None:
        return tables
    path = Path(options.label_names).expanduser()
    names = _read_names(path, options)
    parts = [one.columns for own in tables.values() for one in own]
    given = distinct_values(one[label] for one in parts if label in one.column_names)
    named = _name_all(given, names, path=path)
    first = next(iter(sorted(named, key=len)), "")
    emit(Info(f"names of labels from {path}: {first} is {named.get(first)}"))
    return {
        split: [_with_names(one, label, named, names) for one in own]
        for split, own in tables.items()
    }


def _is_named_as_split(name: str) -> bool:
    return plain_name(name) in SPLIT_NAMES


def _splits_in(parts: Sequence[RawTable], name: str) -> dict[str, str]:
    """Return the split of each value of a column, an empty text if it is none."""
    columns = [part.columns[name] for part in parts if name in part.columns.column_names]
    words = distinct_values(columns) + [""] * (len(columns) < len(parts))
    return {word: SPLIT_OF_WORD.get(word.strip().casefold(), "") for word in words}


def _divide(parts: Sequence[RawTable], name: str, splits: Mapping[str, str]) -> Tables:
    divided: dict[str, list[RawTable]] = {split: [] for split in splits.values()}
    for part in parts:
        rest = replace(part, columns=part.columns.drop_columns([name]))
        for split, own in divided.items():
            words = pyarrow.array([word for word in splits if splits[word] == split], "string")
            is_own = pc.is_in(part.columns[name], value_set=words)
            if pc.any(is_own).as_py():
                own.append(rest.where(is_own))
    return divided


def _read_names(path: Path, options: DataOptions) -> list[str]:
    text = "".join(find_text(unpack(path), encoding=options.encoding).pieces())
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(set(names)) < len(names) or not names:
        raise DataError(
            f"{path} has {'a name twice' if names else 'no names'}",
            remedy="write the name of one class on each line",
        )
    return names


def _name_all(values: Iterable[str], names: Sequence[str], *, path: Path) -> dict[str, str]:
    """Return the names for each value that is an integer, or a list of integers."""
    plain = {value: re.sub(r"\.0+$", "", value.strip()) for value in values}
    labels = {value: one for value, one in plain.items() if one not in ("", "-1")}
    wrong = sorted(one for one in labels.values() if not re.fullmatch(INTEGERS, one))
    numbers = {int(number) for one in labels.values() for number in re.findall(r"\d+", one)}
    first = int(0 not in numbers and len(names) in numbers)
    wrong += [str(number) for number in sorted(numbers) if number - first >= len(names)]
    if wrong:
        raise DataError(
            f"{path} names {len(names)} classes, and {wrong[0]!r} is no number of one",
            remedy="leave out --label-names, or write a name on each line for all of them",
        )
    return {
        value: re.sub(r"\d+", lambda number: names[int(number[0]) - first], one)
        for value, one in labels.items()
    }


def _with_names(
    table: RawTable, label: str, named: Mapping[str, str], names: Sequence[str]
) -> RawTable:
    if label not in table.columns.column_names:
        return table
    place = table.columns.column_names.index(label)
    texts = map_values(table.columns[label], lambda value: named.get(value, ""))
    columns = table.columns.set_column(place, label, texts)
    return replace(table, columns=columns, class_names={**table.class_names, label: names})
