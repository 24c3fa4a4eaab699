"""Turns tables into splits: chooses columns, parses labels, drops incomplete rows.

:func:`read_tables` lists the steps in the order in which they apply to a row.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.config.schema import HUB_PREFIX, DataConfig
from finetune.data.classes import declared_classes
from finetune.data.columns import (
    LABEL,
    NAMES,
    NO,
    NO_COLUMN,
    PAIR,
    TEXT,
    YES,
    Columns,
    OtherData,
    choose_columns,
    describing,
    find_ids,
    join_texts,
    plain_name,
    read_labels,
    say_no,
)
from finetune.data.dataset import LoadedData, return_freed_memory, with_labels
from finetune.data.encoding import find_text
from finetune.data.folders import read_splits
from finetune.data.labeling_tools import How
from finetune.data.packed import SPLIT_BY_WORD, WORDS, unpack
from finetune.data.read import RawTable
from finetune.errors import DataError, DataNotFoundError, UsageError
from finetune.events import Guess, Info, WarningMessage, emit
from finetune.tasks.base import Task
from finetune.tasks.choose import AUTO, choose_task_type
from finetune.tasks.labels import (
    MAX_LABEL_LENGTH,
    MISSING,
    MISSING_CLASSES,
    are_lists,
    distinct_values,
    flat_values,
    is_list,
    listed,
    listed_counts,
    map_values,
    name_classes,
    split_labels,
)
from finetune.tasks.metrics import MULTI
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression

FEW_ROWS = 10
# If more multi-label rows than this fraction have no label, the user has to decide.
MANY_EMPTY = 0.05
# In a table with one row per text and label, at least 20% of the rows repeat a text, but hardly any
# text with the same label.
LONG_FORMAT_ROWS, LONG_FORMAT_REPEATS, LONG_FORMAT_SAMPLE = 0.2, 0.05, 20_000
SPLIT_NAMES = NAMES["split"]
SPLIT_BY_VALUE: dict[str, str] = SPLIT_BY_WORD | {
    word: name for name, words in WORDS["splits_in_columns"].items() for word in words.split()
}
HELD_OUT = "training rows are held out instead"
# Bytes of quotes, spaces and byte order marks around a name.
MAX_PADDING = 10
MAX_SPLITS, MAX_SPLIT_LENGTH, MAX_UNUSED = 20, 30, 12
FILL_DOWN = (
    "write each label into all rows of its group: in Excel choose Go To Special, Blanks, type = and"
    " the cell above, and press Ctrl+Enter; in pandas, frame[column].ffill()"
)
INTEGER, INTEGERS = re.compile(r"\d+"), r"\W*\d+(\W+\d+)*\W*"


def read_tables(files: Mapping[str, Sequence[Path]], options: DataConfig) -> LoadedData:
    """Read each split from its files. A file or a folder can contain several splits."""
    tables = read_splits(files["train"], options)
    are_published = len(tables) > 1 or options.data.startswith(HUB_PREFIX)
    rest = replace(options, table=None)
    for split, paths in files.items():
        if split != "train":
            read = read_splits(paths, rest)
            tables[split] = read.get(split, read["train"])
    return_freed_memory()
    tables = {split: _without_repeated_headers(table) for split, table in tables.items()}
    names, drawn = tables["train"].columns.column_names, _find_drawn(tables["train"])
    tables = _divide_by_column(tables, options)
    columns = _choose_columns(tables["train"], options)
    tables = _with_labels(tables, columns, are_published=are_published)
    used = [name for column in columns.values() for name in column.names]
    ids = find_ids(tables["train"].columns.drop_columns(used))
    task, rows, unlabeled = _read_rows(tables, columns, options, ids=ids)
    _report_missing(rows["train"]["text"], path=tables["train"].path)
    splits = dict[str, pyarrow.Table]()
    for split, known in rows.items():
        if split != "train":
            known = _known_rows(split, tables[split], rows, task, options)
        if not len(known):
            emit(WarningMessage(f"the {split} split is ignored: no rows are left", remedy=HELD_OUT))
            continue
        splits[split] = with_labels(known, known["label"], task=task)
    return LoadedData(
        splits,
        task,
        chosen=columns,
        column_names=names,
        places={split: partial(place_of, _only(tables[split], ids)) for split in splits},
        unlabeled=unlabeled,
        drawn=drawn,
    )


def _find_drawn(table: RawTable) -> NDArray[np.int64] | None:
    """Return the row numbers that ``finetune label`` drew at random, or None for other tables."""
    if not {"how", "row"} <= {*table.columns.column_names}:
        return None
    how = table.columns["how"]
    is_labeled = {*distinct_values([how])} - {""} <= {*get_args(How)}
    return table.numbers[pc.equal(how, "random")] if is_labeled else None


def _only(table: RawTable, name: str | None) -> RawTable:
    """Return a table without texts, which can be large, for describing rows."""
    names = [name] if name in table.columns.column_names else []
    return replace(table, columns=table.columns.select(names))


def place_of(table: RawTable, number: int) -> str:
    """Describe the position of a row in its file, with its ID."""
    place, name = table.place(number), find_ids(table.columns)
    if name is None:
        return place
    return f"{place} ({name} {table.columns[name][int(np.searchsorted(table.numbers, number))]})"


def _choose_columns(train: RawTable, options: DataConfig) -> Columns:
    """Choose the text and label columns, and report guesses."""
    with describing(train.left_out):
        columns = choose_columns(train.columns, options, table=str(train.path))
    second = f", second texts from {columns[PAIR].name!r}" if PAIR in columns else ""
    if any(getattr(options, option) is None for option in columns):
        emit(Guess(f"texts from column {columns[TEXT]}{second}, labels from {columns[LABEL]}"))
    used = {name for column in columns.values() for name in column.names}
    unused = [name for name in train.columns.column_names if name not in used]
    if unused and not isinstance(options, OtherData):
        others = f" and {len(unused) - MAX_UNUSED:,} others" if len(unused) > MAX_UNUSED else ""
        emit(Info(f"columns not used: {', '.join(map(repr, unused[:MAX_UNUSED]))}{others}"))
    return columns


def _read_rows(
    tables: Mapping[str, RawTable], columns: Columns, options: DataConfig, *, ids: str | None
) -> tuple[Task, dict[str, pyarrow.Table], pyarrow.Table]:
    """Return the task, the labeled rows of each split, and unlabeled texts."""
    train, label = tables["train"], columns[LABEL].names
    labels = [read_labels(table.columns, label) for table in tables.values()]
    if len(label) == 1:
        _check_filled_down(train, label[0])
    names = train.class_names.get(columns[LABEL].name)
    if options.label_names is not None:
        labels, names = _name_labels(labels, options)
    names = names and [*name_classes(names).values()]
    if options.classes is not None and not isinstance(options, OtherData):
        names = declared_classes(options)
    training = labels[list(tables).index("train")]
    count = len(training) - (pc.sum(pc.equal(training, "")).as_py() or 0)
    distinct = distinct_values([training])
    # Without marks for no, a row of blank cells can mean none of the classes.
    may_be_none = len(label) > 1 and "" in distinct and not say_no(train.columns, label)
    if options.task == AUTO and may_be_none and options.empty_labels != "unlabeled":
        options = replace(options, task=Multi.name)
    kind, reason = choose_task_type(options.task, distinct, names=names, rows=count)
    emit(Info(f"task: {kind.name}{f', {reason}' if reason else ''}"))
    if kind.problem_type == MULTI:
        # A row without classes is [] in lists, and 0 in all indicator columns.
        has_lists = len(label) == 1 and are_lists({*distinct} - {""})
        has_missing = has_lists or (len(label) > 1 and say_no(train.columns, label))
        labels = _read_empty(labels, options, has_missing=has_missing, path=train.path)
    read = {
        split: _labeled_rows(table, columns, column, ids=ids)
        for (split, table), column in zip(tables.items(), kind.parse(labels), strict=True)
    }
    rows = {split: labeled for split, (labeled, _) in read.items()}
    _, unlabeled = read["train"]
    if options.task in (AUTO, Multi.name) and kind is not Regression:
        rows = _join_long_format(rows, options, path=train.path)
    task = kind.of_labels(rows["train"]["label"], names=names)
    _check_declared(rows["train"]["label"], task, path=train.path)
    if kind.problem_type == MULTI and not (task.class_names or isinstance(options, OtherData)):
        raise DataError(
            f"no row of {train.path} has a class in {columns[LABEL].name!r}: all lists are empty",
            remedy="label some rows, or set the correct column with --label-column",
        )
    return task, rows, unlabeled


def _check_declared(labels: pyarrow.ChunkedArray, task: Task, *, path: Path) -> None:
    """Raise ``DataError`` for labels that are not among the declared classes."""
    distinct = distinct_values([flat_values(labels)]) if task.class_names else []
    if unknown := [name for name in distinct if name not in task.class_numbers]:
        raise DataError(
            f"{path} contains labels that are not declared as classes: {listed(unknown)}",
            remedy="add them to --classes, or fix the rows",
        )


def _first_place(table: RawTable, is_wanted: pyarrow.ChunkedArray) -> str:
    return place_of(table, int(table.numbers[pc.index(is_wanted, True).as_py()]))


def _check_filled_down(table: RawTable, label: str) -> None:
    """Report labels that are only in the first row of each group, like merged cells."""
    column = table.columns[label]
    filled = column.filter(pc.not_equal(column, "")).combine_chunks()
    if not (2 <= len(filled) <= len(column) // 2 and column[0].as_py()):
        return
    if pc.any(pc.equal(filled[1:], filled[:-1])).as_py():
        return
    counts = f"has a label in {len(filled):,} of {len(column):,} rows"
    finding = (
        f"column {label!r} of {table.path} {counts}, apparently only in the first row of each group"
    )
    if len(filled.unique()) == len(filled):
        raise DataError(finding, remedy=FILL_DOWN)
    emit(WarningMessage(finding, remedy=FILL_DOWN))


def _read_empty(
    labels: list[pyarrow.ChunkedArray], options: DataConfig, *, has_missing: bool, path: Path
) -> list[pyarrow.ChunkedArray]:
    """Return labels. An empty cell means unlabeled or, if this option is set, no class."""
    is_empty = [pc.equal(pc.utf8_trim_whitespace(column), "") for column in labels]
    if options.empty_labels == "none":
        columns = zip(is_empty, labels, strict=True)
        return [pc.if_else(empty, "[]", column) for empty, column in columns]
    is_decided = isinstance(options, OtherData) or options.empty_labels is not None
    count, rows = sum(pc.sum(column).as_py() or 0 for column in is_empty), sum(map(len, labels))
    says_none = any(
        not split_labels(label, None) if is_list(label) else label.casefold() in MISSING_CLASSES
        for label in {*distinct_values(labels)} - {""}
    )
    if count > max(1, MANY_EMPTY * rows) and not (says_none or has_missing or is_decided):
        raise UsageError(
            f"{count:,} of {rows:,} rows of {path} have no label: they could be unlabeled, or"
            " have none of the classes",
            remedy="choose --empty-labels unlabeled, which skips them, or --empty-labels none,"
            " which trains on them",
        )
    return labels


def _is_long_format(rows: pyarrow.Table, keys: Sequence[str]) -> bool:
    """Return whether many texts appear in several rows, each time with another label."""
    if (every := len(rows) // LONG_FORMAT_SAMPLE) > 1:  # all rows of texts with some lengths
        lengths = pc.binary_length(rows["text"]).to_numpy() % every
        rows = rows.filter(pyarrow.array(lengths == lengths[0]))
    if pyarrow.types.is_list(rows["label"].type):
        lengths = pc.list_value_length(rows["label"])
        if not pc.all(pc.equal(lengths, 1)).as_py():
            return False
    counted = [("label", "count"), ("label", "count_distinct")]
    texts = _with_flat_labels(rows).group_by(keys).aggregate(counted)
    repeated = texts.filter(pc.greater(texts["label_count"], 1))
    repeats, labels = (pc.sum(repeated[f"label_{name}"]).as_py() or 0 for _, name in counted)
    is_often = repeats >= max(FEW_ROWS, LONG_FORMAT_ROWS * len(rows))
    return is_often and labels >= (1 - LONG_FORMAT_REPEATS) * repeats


def _join_long_format(
    rows: dict[str, pyarrow.Table], options: DataConfig, *, path: Path
) -> dict[str, pyarrow.Table]:
    """Convert one row per text and label to one row per text with all its labels."""
    train, joined = rows["train"], {}
    keys = [name for name in ("text", "text_pair") if name in train.column_names]
    if not _is_long_format(train, keys):
        return rows
    texts = train.group_by(keys).aggregate([]).num_rows
    finding = f"{len(train):,} rows of {path} contain {texts:,} texts: many are in several rows"
    if options.task == AUTO:
        raise UsageError(
            f"{finding}, each time with another label",
            remedy="choose --task multi, which joins the labels of a text, or --task single, for"
            " which all but one of them is wrong",
        )
    emit(Info(f"{finding}, whose labels are joined"))
    for split, table in rows.items():
        groups = _with_flat_labels(table).group_by(keys, use_threads=False)
        others = [name for name in ("row", "id") if name in table.column_names]
        grouped = groups.aggregate([("label", "distinct"), *((name, "first") for name in others)])
        joined[split] = grouped.rename_columns([*keys, "label", *others])
    return joined


def _with_flat_labels(rows: pyarrow.Table) -> pyarrow.Table:
    place = rows.column_names.index("label")
    return rows.set_column(place, "label", flat_values(rows["label"]))


def _report_missing(texts: pyarrow.ChunkedArray, *, path: Path) -> None:
    """Warn about words that mean a missing text."""
    short = texts.filter(pc.less_equal(pc.binary_length(texts), max(map(len, MISSING))))
    words = short.filter(pc.is_in(pc.utf8_lower(short), value_set=pyarrow.array(MISSING)))
    if len(words):
        finding = f"{len(words):,} texts of {path} look like a missing text, such as"
        remedy = "leave these cells empty if the text is missing"
        emit(WarningMessage(f"{finding} {words[0].as_py()!r}", remedy=remedy))


def _with_labels(
    tables: Mapping[str, RawTable], columns: Columns, *, are_published: bool
) -> dict[str, RawTable]:
    """Return the splits that have labels and the columns of the training split.

    Published splits without them are ignored; for user files, raise an error.
    """
    kept, train = {}, tables["train"]
    for split, table in tables.items():
        names, label = table.columns.column_names, columns[LABEL].names
        wanted = [name for column in columns.values() for name in column.names]
        missing = [name for name in wanted if name not in names]
        has_labels = not missing and any(
            pc.any(pc.not_equal(table.columns[name], "")).as_py() for name in label
        )
        if has_labels or split == "train":
            kept[split] = table
            continue
        complaint = f"has no labels: {', '.join(label)} is empty in all rows"
        if missing:
            listed = ", ".join(repr(name[:MAX_LABEL_LENGTH]) for name in names)
            complaint = f"has no column {missing[0]!r}, unlike {train.path}, but {listed}"
        if are_published:
            finding = f"the {split} split is ignored: it {complaint}"
            emit(WarningMessage(finding, remedy=HELD_OUT))
        else:
            raise DataNotFoundError(
                f"the {split} table {table.path} {complaint}",
                remedy="use the same columns in both, with their names in the first row; texts"
                f" without labels can be classified with finetune predict RUN {table.path}",
            )
    return kept


def _without_repeated_headers(table: RawTable) -> RawTable:
    """Drop rows that repeat the column names, as in concatenated files."""
    columns, rows = table.columns, np.arange(len(table.columns))
    for name in columns.column_names:
        sizes = pc.binary_length(columns[name]).to_numpy()
        rows = rows[sizes[rows] < len(name.encode()) + MAX_PADDING]
    for name in columns.column_names:  # a byte-order mark can precede the first
        plain = pc.utf8_lower(pc.utf8_trim(columns[name].take(rows), '\ufeff" '))
        rows = rows[pc.equal(plain, name.strip().lower()).to_numpy()]
    if len(rows) in (0, len(columns)):
        return table
    is_header = pyarrow.chunked_array([np.isin(np.arange(len(columns)), rows)])
    first = _first_place(table, is_header)
    emit(Info(f"skipping {len(rows):,} rows that repeat the header, the first in {first}"))
    return table.where(pc.invert(is_header))


def _divide_by_column(tables: dict[str, RawTable], options: DataConfig) -> dict[str, RawTable]:
    """Divide the only table by its split column, which is set by an option or guessed."""
    name, table = options.split_column, tables["train"]
    if name == NO_COLUMN or (len(tables) > 1 and name is None):
        return tables
    if len(tables) > 1:
        raise UsageError("--split-column only works with one file", remedy="drop it")
    names = table.columns.column_names
    if name not in (None, *names):
        remedy = f"choose one of: {', '.join(map(repr, names))}"
        raise DataNotFoundError(f"{table.path} has no column {name!r}", remedy=remedy)
    for column_name in [name] if name else names:
        column = table.columns[column_name]
        words = [] if name is None and _has_many(column) else distinct_values([column])
        splits = [_split_of(word, column=column_name) for word in words]
        if all(splits) and "train" in splits and len({*splits}) > 1:
            emit(Info(f"splits from column {column_name!r}; --split-column none ignores it"))
            rest = replace(table, columns=table.columns.drop_columns([column_name]))
            split = map_values(column, dict(zip(words, splits, strict=True)).__getitem__)
            return {name: rest.where(pc.equal(split, name)) for name in dict.fromkeys(splits)}
        is_numbered = len(words) > 1 and all(word.strip().isdecimal() for word in words)
        is_known = plain_name(column_name).endswith(SPLIT_NAMES)
        if name or (is_known and (any(splits) or is_numbered)):
            listed = ", ".join(map(repr, sorted(words)[:5]))
            raise (DataError if name else UsageError)(
                f"column {column_name!r} of {table.path} doesn't contain a split in each row:"
                f" {listed}",
                remedy="write train, validation or test in each row, or set"
                " --split-column to another column or none",
            )
    return tables


def _has_many(column: pyarrow.ChunkedArray) -> bool:
    """Return whether a column has too many or too long values for split names."""
    values = distinct_values([column.slice(0, 1_000)])
    is_short = len(values) <= MAX_SPLITS and max(map(len, values), default=0) <= MAX_SPLIT_LENGTH
    return not is_short or pc.count_distinct(column).as_py() > MAX_SPLITS


def _split_of(value: str, *, column: str) -> str:
    """Return the split for a value of a column such as split or is_valid, or "" for none."""
    first, *marks = re.findall(r"[^\W\d_]+", column.casefold()) or [""]
    split = next((SPLIT_BY_VALUE[mark] for mark in marks if mark in SPLIT_BY_VALUE), "")
    if split and first == "is" and value.casefold() in YES | NO:
        other = "test" if split == "train" else "train"
        return split if value.casefold() in YES else other
    word = re.search(r"[^\W\d_]+", value.casefold())
    return SPLIT_BY_VALUE.get(word[0], "") if word else ""


def _name_labels(
    labels: Sequence[pyarrow.ChunkedArray], options: DataConfig
) -> tuple[list[pyarrow.ChunkedArray], list[str]]:
    """Replace class numbers, single or in lists, by the names in a file. Also return the names.

    Numbers count lines from 0, or from 1 if none is 0 and one is the number of lines. -1 is none.
    """
    path = Path(options.label_names or "").expanduser()
    names = [name for _, name in find_text(unpack(path), encoding=options.encoding).lines()]
    plain = {value: re.sub(r"\.0+$", "", value.strip()) for value in distinct_values(labels)}
    known = {value: label for value, label in plain.items() if label not in ("", "-1")}
    numbers = {number for label in known.values() for number in INTEGER.findall(label)}
    first = int("0" not in numbers and str(len(names)) in numbers)
    by_number = {str(number): name for number, name in enumerate(names, start=first)}
    wrong = [
        label
        for label in known.values()
        if not re.fullmatch(INTEGERS, label) or not by_number.keys() >= {*INTEGER.findall(label)}
    ]
    if wrong or len(set(names)) < len(names):
        raise DataError(
            f"the {len(names)} lines of {path} don't match the classes in the table, such"
            f" as {next(iter(wrong or known), names)!r}",
            remedy="list all classes in the file, one per line, or drop --label-names",
        )
    known = {
        value: INTEGER.sub(lambda number: by_number[number[0]], label)
        for value, label in known.items()
    }
    shortest = min(known, key=len, default="")
    emit(Info(f"label names from {path}: {shortest} is {known.get(shortest)}"))
    return [map_values(column, lambda value: known.get(value, "")) for column in labels], names


def _labeled_rows(
    table: RawTable, columns: Columns, labels: pyarrow.ChunkedArray, *, ids: str | None
) -> tuple[pyarrow.Table, pyarrow.Table]:
    """Return the rows with texts and a label, and the texts without a label.

    The ``row`` column contains row numbers in the file, ``id`` the values of the ID column.
    """
    chosen = [columns[option] for option in (TEXT, PAIR) if option in columns]
    texts = [join_texts(table.columns, column.names) for column in chosen]
    is_blank = [pc.or_(pc.equal(column, ""), pc.utf8_is_space(column)) for column in texts]
    is_labeled, has_texts = pc.is_valid(labels), pc.invert(reduce(pc.or_, is_blank))
    is_kept = pc.and_(is_labeled, has_texts)
    text_table = pyarrow.table(dict(zip(("text", "text_pair"), texts, strict=False)))
    rows = text_table.append_column("label", labels).append_column("row", [table.numbers])
    if ids is not None:
        known = ids in table.columns.column_names
        rows = rows.append_column("id", table.columns[ids] if known else [[""] * len(rows)])
    rows = rows.filter(is_kept)
    if not len(rows):
        names = " and in ".join(repr(column.name) for column in chosen)
        raise DataError(
            f"no row of {table.path} has a text in {names} and a label in {columns[LABEL].name!r}",
            remedy="set the correct columns with --text-column and --label-column, or label the"
            " texts with finetune label",
        )
    if skipped := len(labels) - len(rows):
        empty = dict(zip((column.name for column in chosen), map(pc.sum, is_blank), strict=True))
        empty[columns[LABEL].name] = pyarrow.scalar(labels.null_count)
        most = max(empty, key=lambda name: empty[name].as_py())
        reason = f"empty text or label, most of them in column {most!r}"
        finding = f"{skipped:,} of {len(labels):,} rows skipped: {reason}"
        first = _first_place(table, pc.invert(is_kept))
        emit(WarningMessage(f"{finding}, the first in {first}"))
    return rows, text_table.filter(pc.and_not(has_texts, is_labeled))


def _known_rows(
    split: str, table: RawTable, rows: Mapping[str, pyarrow.Table], task: Task, options: DataConfig
) -> pyarrow.Table:
    """Return the rows whose labels occur in training. Raise an error for other labels."""
    known = rows["train"]["label"]
    if options.classes is not None:
        known = pyarrow.chunked_array([[*task.class_names]], "string")
    unknown = task.find_unknown(rows[split]["label"], training=known)
    is_unknown = unknown.is_valid()
    labels = unknown.drop_null().to_pylist()
    if not labels:
        return rows[split]
    counts = listed_counts(Counter(labels))
    if options.skip_unknown_labels:
        skipped = f"{len(labels):,} rows of the {split} split skipped"
        emit(WarningMessage(f"{skipped}: no training row has {counts}"))
        return rows[split].filter(unknown.is_null())
    first = rows[split]["row"][pc.index(is_unknown, True).as_py()].as_py()
    raise DataError(
        f"the {split} split has labels that never occur in training: {counts}; the first is"
        f" {labels[0]!r} in {place_of(table, first)}",
        remedy="fix them (case matters), add training rows of these classes, or"
        " use --skip-unknown-labels",
    )
