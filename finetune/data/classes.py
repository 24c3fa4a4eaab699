"""Classes declared by options: names and descriptions, and whether a table has labels."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune.config.schema import DataConfig
from finetune.data.columns import NAMES, columns_named, plain_name
from finetune.data.corrections import read_class_columns
from finetune.data.encoding import find_text
from finetune.data.packed import unpack
from finetune.data.read import SourceTable
from finetune.errors import DataError, DataUnreadableError, UsageError
from finetune.events import Info, emit
from finetune.tasks.labels import is_number, listed, name_as_text, name_classes

# Titles of the class column, besides those of label columns.
_CLASS_TITLES = frozenset((*NAMES["label"], "name", "class_name"))
_TEXT_TITLES = frozenset((*NAMES["text"], "description", "descriptions", "example", "examples"))
# A column that contains at least this fraction of the --classes is the label column.
MIN_SHARE = 0.5


def declared_classes(options: DataConfig) -> list[str]:
    """Return the classes from ``--classes`` or ``--class-descriptions``, in this order."""
    path, names = options.class_descriptions, list[str]()
    if options.classes is not None:
        names = [*filter(None, name_classes(options.classes.split(",")).values())]
    elif path is not None:
        names = [name for name, _ in _read(path, ())]
    else:
        return []
    if len({*names}) < 2:
        remedy = "list all classes, such as --classes billing,refund"
        raise UsageError(f"{options.classes or path!r} has fewer than two classes", remedy=remedy)
    return [*dict.fromkeys(names)]


def describe_classes(classes: Sequence[str], options: DataConfig) -> tuple[list[str], list[str]]:
    """Return class descriptions, and the class of each.

    They come from a file, which can contain several per class. Other classes are described by their
    name.
    """
    path = options.class_descriptions
    rows = _read(path, classes) if path is not None else []
    if wrong := [name for name in dict.fromkeys(name for name, _ in rows) if name not in classes]:
        raise DataError(
            f"each row of {path} should contain a class and its description; these are not classes"
            f" in the data: {listed(wrong)}",
            remedy=f"fix these rows, or declare all classes with --classes; the classes are"
            f" {listed(classes)}",
        )
    rows = [(name, text) for name, text in rows if text]
    others = [name for name in classes if name not in dict(rows)]
    if path is not None and others:
        emit(Info(f"classes without a description, described by their name: {listed(others)}"))
    rows += [(name, name_as_text(name)) for name in others]
    rows.sort(key=lambda row: classes.index(row[0]))
    return [text for _, text in rows], [name for name, _ in rows]


def _read(path: str, classes: Sequence[str]) -> list[tuple[str, str]]:
    """Read the rows of a file: a class, and a description, which can be empty.

    The class column is the column with most of ``classes``, else by its title, else the first.
    """
    columns = _read_columns(path)
    titles = [plain_name(column[0]) if column else "" for column in columns]

    def order(number: int) -> tuple[int, bool]:
        known = sum(cell in classes for cell in columns[number])
        return known, titles[number] in _CLASS_TITLES and bool(_TEXT_TITLES & {*titles})

    place = max(range(len(columns)), key=order, default=0)
    names = columns.pop(place) if columns else []
    has_titles = titles[place : place + 1] and titles[place] in _CLASS_TITLES
    has_titles = has_titles and (not columns or names[0] not in classes)
    rows = [*zip(names, *columns, strict=True)][bool(has_titles) :]
    described = [
        (name, text)
        for name, *texts in rows
        if name
        for text in [cell for cell in texts if cell and not is_number(cell)] or [""]
    ]
    if not described:
        remedy = "write a class and its description in each row"
        raise DataError(f"no classes in {path}", remedy=remedy)
    return [*dict.fromkeys(described)]


def _read_columns(name: str) -> list[list[str]]:
    """Return the columns of a table, including its header, or the lines of another file."""
    path = Path(name).expanduser()
    try:
        return read_class_columns(path)
    except DataUnreadableError:
        if path.suffix.lower() != ".txt":
            raise
    lines = [line for _, line in find_text(unpack(path), encoding=None).lines()]
    return [[*map(name_classes(lines).__getitem__, lines)]]


def has_labels(source: SourceTable, classes: Sequence[str], options: DataConfig) -> bool:
    """Return whether a table has labels. Raise DataError if they are not among ``--classes``."""
    columns, _ = source.texts()
    if options.label_column is not None:
        named = columns_named(options.label_column, [*columns])
        # A missing column is reported when the table is read.
        return any(n not in columns or pc.any(pc.not_equal(columns[n], "")).as_py() for n in named)
    names, least = [*classes], MIN_SHARE
    if options.classes is None:
        # The descriptions file may lack most classes of the table, in any of its columns.
        columns_of_file = _read_columns(options.class_descriptions or "")
        names += [cell for column in columns_of_file for cell in column if not is_number(cell)]
        least = 0.0
    # Labels with different case are reported when the table is read.
    known = pyarrow.array([name.lower() for name in names], "string")
    for name, column in columns.items():
        cells = pc.utf8_trim_whitespace(column)
        cells = cells.filter(pc.not_equal(cells, ""))
        is_class = pc.is_in(pc.utf8_lower(cells), value_set=known)
        if (pc.mean(is_class).as_py() or 0.0) > least:
            return True
        if plain_name(name) in NAMES["label"] and len(cells):
            if options.classes is None:
                return True
            others = listed(pc.unique(cells.filter(pc.invert(is_class))).to_pylist())
            raise DataError(
                f"column {name!r} of {source.path} contains classes that --classes doesn't list:"
                f" {others}",
                remedy="drop --classes to train on these labels, or remove the column",
            )
    return False
