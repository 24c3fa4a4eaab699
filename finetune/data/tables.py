"""Tables of files become splits: columns chosen, labels parsed, rows without either left out.

The steps are in :func:`read_tables`, in the order in which a row takes them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from datasets import DatasetDict

from finetune.config.schema import HUB_PREFIX, DataConfig
from finetune.data.columns import (
    LABEL,
    NO_COLUMN,
    PAIR,
    TEXT,
    Columns,
    choose_columns,
    plain_name,
    read_labels,
    read_texts,
)
from finetune.data.dataset import LoadedData, make_dataset, return_freed_memory
from finetune.data.delimited import ADD_LABELS
from finetune.data.encoding import find_text
from finetune.data.folders import read_splits
from finetune.data.packed import SPLIT_OF_WORD, unpack
from finetune.data.read import RawTable
from finetune.errors import DataError, DataNotFound, UsageError
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.choose import choose_task_type
from finetune.tasks.labels import (
    MAX_LABEL_LENGTH,
    distinct_values,
    find_missing_names,
    listed_counts,
    map_values,
)

FEW_ROWS = 10
SPLIT_NAMES = ("split", "set", "partition", "subset", "fold")
INTEGERS = r"\W*\d+(\W+\d+)*\W*"
# As which UTF-8 is read by mistake, and characters that such texts then are of. A few words read so
# by chance, in Russian of cp866 many.
CODE_PAGES = (
    *("cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "latin_1"),
    *("cp437", "cp850", "mac_roman", "koi8_r"),
)
COMMON = re.compile(
    r"[\0-\u017f\u0386-\u03ce\u0400-\u045f\u0490\u0491\u05b0-\u05f4\u060c-\u0652\u0900-\u0e7f"
    r"\u1e00-\u1fff\u2000-\u2122\u3000-\u30ff\u4e00-\u9fff\uac00-\ud7a3\ufe0f\uff00-\uffef"
    r"\U0001f000-\U0001faff]*"
)
# What is left where a part of a text was read as Windows-1252.
MOJIBAKE = re.compile("[ÃÂâðÐÑ][\u0080-\u00bf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]")  # noqa: RUF001
SAMPLE_ROWS = 4_000


def is_garbled(text: str) -> bool:
    """Return whether a text with more than ASCII looks like UTF-8 read as another encoding."""
    for page in CODE_PAGES:
        with suppress(UnicodeError):
            if COMMON.fullmatch(text.encode(page).decode()):
                return True
    return MOJIBAKE.search(text) is not None


def read_tables(
    files: Mapping[str, Sequence[Path]], options: DataConfig, *, emit: Emit
) -> LoadedData:
    """Read each split from its files; one file may hold several splits, and so may a folder."""
    tables = read_splits(files["train"], options, emit=emit)
    has_published_splits = len(tables) > 1 or options.data.startswith(HUB_PREFIX)
    rest = replace(options, member=None)
    for split, paths in files.items():
        if split != "train":
            read = read_splits(paths, rest, emit=emit)
            tables[split] = read.get(split, read["train"])
    return_freed_memory()
    tables = {split: _without_repeated_headers(table, emit=emit) for split, table in tables.items()}
    tables = _divide_by_column(tables, options, emit=emit)
    train = tables["train"]
    if len(names := train.columns.column_names) < 2:
        found = f"one column, {names[0]!r}, and no labels" if names else "no columns of text"
        objects = "; of objects inside rows, write each value into a column of its own"
        has_objects = train.path.suffix not in (".csv", ".tsv", ".txt", "")
        remedy = ADD_LABELS + (objects if has_objects else "")
        raise DataError(f"{train.path} has {found}", remedy=remedy)
    try:
        columns = choose_columns(train.columns, options, table=str(train.path))
    except (DataError, UsageError) as error:
        if len(train.columns) >= FEW_ROWS:
            raise
        few = f"{train.path} has {len(train.columns)} rows, too few to train on; {error.message}"
        raise DataError(few, remedy=f"add rows; {error.remedy}") from error
    label = columns[LABEL].names
    second = f", second texts from {columns[PAIR].name!r}" if PAIR in columns else ""
    if any(getattr(options, option) is None for option in columns):
        emit(Info(f"texts from column {columns[TEXT]}{second}, labels from {columns[LABEL]}"))
    for split, table in list(tables.items()):
        if has_published_splits and split != "train" and not _has_labels(table, label):
            remedy = "rows of the training split are held out instead"
            emit(WarningMessage(f"the {split} split has no labels and is left out", remedy=remedy))
            del tables[split]
        else:
            _check_split(split, table, columns, train=train)
    labels = [read_labels(table.columns, label) for table in tables.values()]
    names = train.class_names.get(columns[LABEL].name)
    if options.label_names is not None:
        labels, names = _name_labels(labels, options, emit=emit)
    training = labels[list(tables).index("train")]
    kind, reason = choose_task_type(options.task, distinct_values([training]), names=names)
    emit(Info(f"task: {kind.name}, {reason}"))
    rows = {
        split: _labelled_rows(table, columns, own, emit=emit)
        for (split, table), own in zip(tables.items(), kind.parse(labels), strict=True)
    }
    task = kind.of_labels(rows["train"]["label"], names=names)
    for finding, remedy in find_missing_names(task.class_names):
        emit(WarningMessage(finding, remedy=remedy))
    _report_garbled(rows["train"]["text"], path=train.path, emit=emit)
    splits, row_numbers = DatasetDict(), {}
    for split, own in rows.items():
        unknown = task.find_unknown(own["label"], training=rows["train"]["label"])
        if unknown.null_count < len(unknown):
            numbered = own.append_column("unknown", unknown)
            _report_unknown(split, tables[split], numbered, options, emit=emit)
        known = own.filter(unknown.is_null())
        pairs = known["text_pair"] if PAIR in columns else None
        splits[split] = make_dataset(known["text"], known["label"], task=task, pairs=pairs)
        row_numbers[split] = known["row"].to_numpy()
    names = train.columns.column_names
    return LoadedData(splits, task, chosen=columns, column_names=names, row_numbers=row_numbers)


def _report_garbled(texts: pyarrow.ChunkedArray, *, path: Path, emit: Emit) -> None:
    others = texts.filter(pc.invert(pc.string_is_ascii(texts)))
    sample = others.slice(0, SAMPLE_ROWS).to_pylist()
    if garbled := list(filter(is_garbled, sample)):
        found = f"{len(garbled):,} texts of {path} look like UTF-8 that was decoded as another"
        remedy = "export the file again as UTF-8, or name its encoding with --encoding"
        emit(WarningMessage(f"{found} encoding, such as {garbled[0][:60]!r}", remedy=remedy))


def _check_split(split: str, table: RawTable, columns: Columns, *, train: RawTable) -> None:
    """Make sure that the table of a split has the columns of the training split, and labels."""
    names, known = table.columns.column_names, train.columns.column_names
    missing = [one for own in columns.values() for one in own.names if one not in names]
    label = columns[LABEL].names
    listed = ", ".join(repr(name[:MAX_LABEL_LENGTH]) for name in names)
    predict = f"texts without labels are for finetune predict RUN {table.path}"
    if not missing and (split == "train" or _has_labels(table, label)):
        return
    if not missing:
        complaint, remedy = f"has no labels: {', '.join(label)} is empty in all rows", predict
    elif len(names) == len(known) and (
        names[0] == "column1" or set(names) & {*distinct_values([train.columns[label[0]]])}
    ):
        complaint = f"has no header row, but {listed} in its first row"
        remedy = f"write the names of the columns of {train.path} above it"
    elif set(missing) == set(label) and len(names) < len(known):
        complaint = f"has no labels: no column {missing[0]!r}, but {listed}"
        remedy = f"add it, or leave the file out; {predict}"
    else:
        complaint = f"has no column {missing[0]!r} as {train.path} has, but {listed}"
        remedy = f"give its columns the same names; {predict}"
    raise DataNotFound(f"the {split} table {table.path} {complaint}", remedy=remedy)


def _without_repeated_headers(table: RawTable, *, emit: Emit) -> RawTable:
    """Leave out rows that repeat the names of the columns, as joined files have them."""
    columns = table.columns
    same = (pc.equal(columns[name], name) for name in columns.column_names)
    is_header = reduce(pc.and_, same, pyarrow.scalar(bool(columns.num_columns)))
    count = pc.sum(is_header).as_py()
    if count in (0, len(columns)):
        return table
    first = table.first(is_header)
    emit(Info(f"{count:,} rows left out that repeat the header, the first in {first}"))
    return table.where(pc.invert(is_header))


def _divide_by_column(
    tables: dict[str, RawTable], options: DataConfig, *, emit: Emit
) -> dict[str, RawTable]:
    """Divide the only table by its column of splits, which is named or found."""
    name, table = options.split_column, tables["train"]
    if name == NO_COLUMN or (len(tables) > 1 and name is None):
        return tables
    if len(tables) > 1:
        raise UsageError("--split-column goes with one file", remedy="leave it out")
    names = table.columns.column_names
    if name not in (None, *names):
        listed = ", ".join(map(repr, names))
        raise DataNotFound(f"{table.path} has no column {name!r}", remedy=f"there are: {listed}")
    for one in [name] if name else [own for own in names if plain_name(own) in SPLIT_NAMES]:
        column = table.columns[one]
        words = distinct_values([column])
        splits = [SPLIT_OF_WORD.get(word.strip().casefold(), "") for word in words]
        if all(splits) and "train" in splits and len(splits) > 1:
            emit(Info(f"splits from column {one!r}; --split-column none ignores it"))
            rest = replace(table, columns=table.columns.drop_columns([one]))
            own = map_values(column, dict(zip(words, splits, strict=True)).__getitem__)
            return {split: rest.where(pc.equal(own, split)) for split in dict.fromkeys(splits)}
        listed = ", ".join(map(repr, sorted(words)[:5]))
        complaint = f"column {one!r} of {table.path} does not name the split of each row: {listed}"
        remedy = "write train, validation or test, or name another --split-column, or none"
        if name:
            raise DataError(complaint, remedy=remedy)
        if any(splits):
            emit(WarningMessage(f"{complaint}; it is ignored", remedy=remedy))
    return tables


def _has_labels(table: RawTable, label: Sequence[str]) -> bool:
    columns = [table.columns[name] for name in label if name in table.columns.column_names]
    return any(pc.any(pc.not_equal(column, "")).as_py() for column in columns)


def _name_labels(
    labels: Sequence[pyarrow.ChunkedArray], options: DataConfig, *, emit: Emit
) -> tuple[list[pyarrow.ChunkedArray], list[str]]:
    """Replace numbers of classes, alone or in lists, by the names in a file; return these too.

    They count its lines from 0, or from 1 if none is 0 and one is the number of lines; -1 is none.
    """
    path = Path(options.label_names or "").expanduser()
    text = find_text(unpack(path), encoding=options.encoding).open().read()
    names = [line.strip() for line in text.splitlines() if line.strip()]
    if len(set(names)) < len(names) or not names:
        raise DataError(
            f"{path} has {'a name twice' if names else 'no names'}",
            remedy="write one class name per line",
        )
    plain = {value: re.sub(r"\.0+$", "", value.strip()) for value in distinct_values(labels)}
    given = {value: one for value, one in plain.items() if one not in ("", "-1")}
    wrong = sorted(one for one in given.values() if not re.fullmatch(INTEGERS, one))
    numbers = {int(number) for one in given.values() for number in re.findall(r"\d+", one)}
    first = int(0 not in numbers and len(names) in numbers)
    wrong += [str(number) for number in sorted(numbers) if number - first >= len(names)]
    if wrong:
        raise DataError(
            f"the label {wrong[0]!r} is not the number of one of {len(names)} classes in {path}",
            remedy="leave out --label-names, or list all classes in the file, one per line",
        )
    named = {
        value: re.sub(r"\d+", lambda number: names[int(number[0]) - first], one)
        for value, one in given.items()
    }
    shortest = min(named, key=len, default="")
    emit(Info(f"names of labels from {path}: {shortest} is {named.get(shortest)}"))
    return [map_values(own, lambda value: named.get(value, "")) for own in labels], names


def _labelled_rows(
    table: RawTable, columns: Columns, labels: pyarrow.ChunkedArray, *, emit: Emit
) -> pyarrow.Table:
    """Return the rows that have their texts and a label, and ``row``, their number in the file."""
    chosen = [columns[option] for option in (TEXT, PAIR) if option in columns]
    texts = {
        name: read_texts(table.columns, own.names)
        for name, own in zip(("text", "text_pair"), chosen, strict=False)
    }
    is_kept = pc.is_valid(labels)
    empty = {columns[LABEL].name: labels.null_count}
    for own, column in zip(chosen, texts.values(), strict=True):
        is_blank = pc.or_(pc.equal(column, ""), pc.utf8_is_space(column))
        is_kept = pc.and_not(is_kept, is_blank)
        empty[own.name] = pc.sum(is_blank).as_py()
    numbered = {**texts, "label": labels, "row": pyarrow.array(table.numbers)}
    rows = pyarrow.table(numbered).filter(is_kept)
    if not len(rows):
        named = " and in ".join(repr(one.name) for one in chosen)
        raise DataError(
            f"no row of {table.path} has a text in {named} and a label in {columns[LABEL].name!r}",
            remedy="name the right columns with --text-column and --label-column",
        )
    if len(rows) < len(labels):
        first = table.first(pc.invert(is_kept))
        name = max(empty, key=empty.__getitem__)
        is_most = 2 * empty[name] > len(labels)
        named = f" (column {name!r} is empty in {empty[name]:,})" if is_most else ""
        emit(
            WarningMessage(
                f"{len(labels) - len(rows):,} of {len(labels):,} rows skipped: empty text or label"
                f"{named}, the first in {first}"
            )
        )
    return rows


def _report_unknown(
    split: str, table: RawTable, rows: pyarrow.Table, options: DataConfig, *, emit: Emit
) -> None:
    """Raise an error for labels that no training row has, or report that their rows are skipped."""
    others = rows.filter(rows["unknown"].is_valid())
    unknown = others["unknown"].to_pylist()
    counts = listed_counts(Counter(unknown))
    if options.skip_unknown_labels and len(others) < len(rows):
        skipped = f"{len(unknown):,} rows of the {split} split skipped"
        emit(WarningMessage(f"{skipped}: no training row has {counts}"))
        return
    raise DataError(
        f"no training row has these labels of the {split} split: {counts}; the first is"
        f" {unknown[0]!r} in {table.place(others['row'][0].as_py())}",
        remedy="correct them, also in upper and lower case, add training rows of these classes, or"
        " skip the rows with --skip-unknown-labels",
    )
