"""The name of a source becomes its splits.

A row comes from a file (formats.py: a reader for each format), as text in the columns of a table.
Columns are chosen and labels parsed (columns.py, tables.py), which gives a ``Dataset`` of texts and
labels (dataset.py), and splits that are missing are held out (split.py).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import reduce
from pathlib import Path

import pyarrow.compute as pc
from datasets import Dataset

from finetune.data.columns import choose_columns, read_texts
from finetune.data.dataset import column_of, make_dataset, return_freed_memory, texts_of
from finetune.data.folders import digest_folder
from finetune.data.formats import PACKED_SUFFIXES, SUFFIXES, read_file
from finetune.data.hub_tables import fetch_splits
from finetune.data.source import HUB_PREFIX, NO_COLUMN, DataOptions, DataSource, LoadedData
from finetune.data.split import SplitOptions, split_table
from finetune.data.tables import read_tables
from finetune.data.trec import load_questions, load_trec
from finetune.errors import DataError, UsageError
from finetune.events import Emit, Info, ignore
from finetune.files import file_sha256
from finetune.tasks.base import Task
from finetune.tasks.choose import AUTO, find_task_type
from finetune.tasks.labels import MAX_LISTED
from finetune.tasks.single import Single

SOURCES = ("trec", "questions")
_OF_TREC = {"data_dir", "label"}
_OF_FILES = {"validation_file", "test_file"}
_OF_ALL = {"data", "task", "earlier_columns"}
_OF_TABLES = {field.name for field in fields(DataOptions)} - _OF_TREC - _OF_FILES - _OF_ALL
OPTIONS_OF_SOURCE = {
    "trec": _OF_TREC,
    "questions": set[str](),
    "a file": _OF_FILES | _OF_TABLES,
    "a dataset of the Hub": _OF_TABLES,
}


def load_data(options: DataOptions, *, emit: Emit) -> LoadedData:
    """Load the splits of a source and say which files, or which commit, they are from."""
    kind = _check_source(options)
    match kind:
        case "trec":
            return load_trec(folder=_expand(options.data_dir), label=options.label, emit=emit)
        case "questions":
            emit(Info("reading the questions that come with the package"))
            return load_questions()
        case "a file":
            files = _files_of(options)
            loaded = read_tables(files, options, emit=emit)
            paths = [path for [path] in files.values()]
            digests = [digest_folder(p) if p.is_dir() else file_sha256(p) for p in paths]
            sources = [DataSource(str(p), one) for p, one in zip(paths, digests, strict=True)]
            return replace(loaded, sources=tuple(sources))
    name, _, revision = options.data.removeprefix(HUB_PREFIX).partition("@")
    repository, _, part = name.partition(":")
    files, commit = fetch_splits(repository, part or None, revision=revision or None, emit=emit)
    loaded = read_tables(files, options, emit=emit)
    return replace(loaded, sources=(DataSource(HUB_PREFIX + name, commit=commit),))


def load_splits(options: DataOptions, splitting: SplitOptions, *, emit: Emit) -> LoadedData:
    """Load data and split it: the same rows for the same options, every time."""
    given = load_data(options, emit=emit)
    splits = split_table(
        given.splits,
        splitting,
        task=given.task,
        takes_first=options.data == "trec",
        emit=emit,
    )
    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    emit(Info(f"data: {options.data}, {counts} rows, {given.task.label_summary}"))
    loaded = replace(given, splits=splits)
    del given  # the rows before they were split
    return_freed_memory()
    return loaded


def load_rows(options: DataOptions, *, task: Task, emit: Emit) -> Dataset:
    """Load all rows of other data than a run's, with the labels of the run's task."""
    wanted = replace(
        options, validation_file=None, test_file=None, data_dir=None, split_column=NO_COLUMN,
        task=task.name,
    )  # fmt: skip
    loaded = load_data(wanted, emit=emit)
    rows, names = loaded.splits["train"], task.class_names
    if loaded.task.name != task.name:
        raise DataError(
            f"{options.data} has {loaded.task.label_summary}, but the model's task is {task.name}",
            remedy="name data with labels of the same kind",
        )
    if unknown := [name for name in loaded.task.class_names if name not in names]:
        raise DataError(
            f"{options.data} has labels that the model does not know: {_listed(unknown)}",
            remedy="write them as the model does, or leave these rows out; its classes are"
            f" {_listed(names)}",
        )
    labels = loaded.task.decode(column_of(rows, "label"))
    texts = texts_of(rows)
    return make_dataset(texts.texts, labels, task=task, pairs=texts.pairs)


def find_places(options: DataOptions, rows: Dataset) -> list[str]:
    """Return where each training text, or pair, is first found: ``line 7 of reviews.csv``.

    It is an empty text where the data is no file.
    """
    path = Path(options.data).expanduser()
    if not os.path.isfile(path):
        return [""] * len(rows)
    table = read_file(path, options, emit=ignore)
    columns = choose_columns(table.columns, options, table=str(path))
    given = [read_texts(table.columns, one.name) for one in (columns.text, columns.pair) if one]
    places = []
    for wanted in zip(*texts_of(rows).columns, strict=True):
        same = [pc.equal(column, text) for column, text in zip(given, wanted, strict=True)]
        row = pc.index(reduce(pc.and_, same), True).as_py()
        places.append(table.place(row) if row >= 0 else "")
    return places


def source_name(source: str) -> str:
    """Return a short name for a source, fit for a folder.

    >>> source_name("data/reviews.csv"), source_name("hub:owner/name:part@refs/pr/1")
    ('reviews', 'name-part')
    """
    if source.startswith(HUB_PREFIX):
        return Path(source.removeprefix(HUB_PREFIX).partition("@")[0]).name.replace(":", "-")
    return Path(source).stem


def _check_source(options: DataOptions) -> str:
    """Return the key of ``OPTIONS_OF_SOURCE``, or raise an error if options do not go with it."""
    kind = _kind_of(options.data)
    if kind in SOURCES and options.task not in (AUTO, Single.name):
        find_task_type(options.task)
        raise UsageError(
            f"--data {options.data} has classes, and --task is {options.task}",
            remedy="leave --task out",
        )
    for name, value in vars(options).items():
        owners = [owner for owner, taken in OPTIONS_OF_SOURCE.items() if name in taken]
        if owners and value not in (None, False, "label-coarse", NO_COLUMN) and kind not in owners:
            raise UsageError(
                f"--data {options.data} takes no --{name.replace('_', '-')} (here {value})",
                remedy=f"leave it out: it goes with {' or '.join(owners)}",
            )
    return kind


def _kind_of(source: str) -> str:
    if source in SOURCES:
        return source
    if source.startswith(HUB_PREFIX):
        return "a dataset of the Hub"
    path = Path(source).expanduser()
    if path.suffix.lower() in (*SUFFIXES, *PACKED_SUFFIXES) or os.path.exists(path):
        return "a file"
    guesses = get_close_matches(source.casefold(), SOURCES, n=1)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", source) and not guesses:
        guesses = [HUB_PREFIX + source]
    files = f"a file ({', '.join(SUFFIXES)}), a folder of texts"
    kinds = f"{', '.join(SOURCES)}, {files} or {HUB_PREFIX}OWNER/NAME"
    raise UsageError(
        f"there is no data {source!r}",
        remedy=(f"did you mean {guesses[0]}? " if guesses else "") + f"--data takes {kinds}",
    )


def _files_of(options: DataOptions) -> dict[str, list[Path]]:
    given = {
        "train": options.data,
        "validation": options.validation_file,
        "test": options.test_file,
    }
    files = {split: [path] for split, name in given.items() if (path := _expand(name))}
    if len({os.path.realpath(path) for [path] in files.values()}) < len(files):
        raise UsageError(
            "one file is named for two splits",
            remedy="leave out --validation-file or --test-file: rows of --data are held out then",
        )
    return files


def _expand(name: str | None) -> Path | None:
    return Path(name).expanduser() if name else None


def _listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - MAX_LISTED:,} others" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others
