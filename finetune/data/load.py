"""Loads the splits of a data source.

Files become tables of text (read.py). Then the columns are chosen and labels are parsed
(columns.py, tables.py). The result is a ``Dataset`` of texts and labels (dataset.py). Missing
splits are held out (split.py).
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import reduce
from pathlib import Path

import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict

from finetune.config.schema import HUB_PREFIX, OPTIONS, DataConfig
from finetune.data.columns import NO_COLUMN, OtherData
from finetune.data.corrections import apply_corrections
from finetune.data.dataset import (
    DataSource,
    LoadedData,
    TextColumns,
    column_of,
    make_dataset,
    return_freed_memory,
    texts_of,
)
from finetune.data.folders import digest_folder
from finetune.data.hub_tables import load_from_hub
from finetune.data.read import SUFFIXES, TABLE_SUFFIXES
from finetune.data.split import pool_rows, split_table
from finetune.data.stream import read_texts
from finetune.data.tables import read_tables
from finetune.data.trec import load_questions, load_trec
from finetune.errors import DataError, UsageError
from finetune.events import Info, emit
from finetune.files import file_sha256, is_there
from finetune.tasks.base import Task
from finetune.tasks.choose import AUTO
from finetune.tasks.labels import MAX_LISTED
from finetune.tasks.single import Single


def load_files(options: DataConfig) -> LoadedData:
    """Load files, or a folder of texts, of the user."""
    path = Path(options.data).expanduser()
    if path.suffix.lower() not in TABLE_SUFFIXES and not is_there(path):
        guesses = get_close_matches(options.data.casefold(), KNOWN_BY_NAME, n=1)
        if re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", options.data) and not guesses:
            guesses = [HUB_PREFIX + options.data]
        kinds = (*KNOWN_BY_NAME, f"a file ({', '.join(SUFFIXES)})", "a folder of texts")
        raise UsageError(
            f"there is no data {options.data!r}",
            remedy="".join(f"did you mean {guess}? " for guess in guesses)
            + f"--data takes {', '.join(kinds)} or {HUB_PREFIX}OWNER/NAME",
        )
    named = (options.data, options.validation_file, options.test_file)
    splits = zip(("train", "validation", "test"), named, strict=True)
    files = {split: Path(name).expanduser() for split, name in splits if name}
    if len(set(map(os.path.realpath, files.values()))) < len(files):
        raise UsageError(
            "the same file is named for two splits",
            remedy="leave out --validation-file or --test-file: rows of --data are held out then",
        )
    loaded = read_tables({split: [file] for split, file in files.items()}, options)
    sources = [
        DataSource(str(path), digest_folder(path) if path.is_dir() else file_sha256(path))
        for path in files.values()
    ]
    return replace(loaded, sources=sources)


# By the names that the options' ``goes_with`` has.
LOADERS: dict[str, Callable[..., LoadedData]] = {
    "trec": load_trec,
    "questions": load_questions,
    "a file": load_files,
    "a dataset of the Hub": load_from_hub,
}
KNOWN_BY_NAME = ("trec", "questions")


def load_data(options: DataConfig) -> LoadedData:
    """Load the splits of a source and report their files or their commit."""
    is_of_hub = options.data.startswith(HUB_PREFIX)
    source = "a dataset of the Hub" if is_of_hub else "a file"
    source = options.data if options.data in KNOWN_BY_NAME else source
    _check_options(options, source)
    return apply_corrections(LOADERS[source](options), options)


def load_splits(options: DataConfig, *, folds: int | None = None) -> LoadedData:
    """Load data and split it; the same options always give the same rows.

    In a cross-validation, ``train`` has all rows outside the test split, with their folds.
    """
    before = load_data(options)
    if folds is None:
        splits = split_table(before.splits, options, task=before.task)
    else:
        seed = options.split_seed
        splits = pool_rows(before.splits, folds=folds, task=before.task, seed=seed)
    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    emit(Info(f"data: {options.data}, {counts} rows, {before.task.label_summary}"))
    loaded = replace(before, splits=splits, unlabeled=_find_unlabeled(before, splits, options))
    del before  # the rows before they were split
    return_freed_memory()
    return loaded


def _find_unlabeled(
    loaded: LoadedData, splits: DatasetDict, options: DataConfig
) -> pyarrow.Table | None:
    """Return distinct texts without a label, from a file or from the table itself.

    Texts of the table that are also in a split are left out. A file is read as it is.
    """
    table = loaded.unlabeled
    if options.unlabeled not in (None, "none"):
        path = Path(options.unlabeled or "").expanduser()
        pairs = "text_pair" in splits["train"].column_names
        other = OtherData(data=str(path), earlier_columns=loaded.columns)
        pieces = [piece[:] for piece in read_texts(path, other, as_lines=False, reads_pairs=pairs)]
        columns = [[text or "" for piece in pieces for text in piece.texts]]
        if pairs:
            columns += [[text or "" for piece in pieces for text in piece.pairs or ()]]
        table = pyarrow.table(columns, names=["text", "text_pair"][: len(columns)])
        trimmed = map(pc.utf8_trim_whitespace, table.columns)
        is_blank = reduce(pc.or_, [pc.equal(column, "") for column in trimmed])
        table = table.filter(pc.invert(is_blank))
    elif table is not None:
        known = pyarrow.chunked_array(
            [chunk for rows in splits.values() for chunk in texts_of(rows).joined.chunks], "string"
        )
        is_known = pc.is_in(TextColumns(*table.columns).joined, value_set=known)
        table = table.filter(pc.invert(is_known))
    if table is None or options.unlabeled == "none" or not len(table):
        return None
    return table.group_by(table.column_names, use_threads=False).aggregate([])


def load_rows(options: OtherData, *, task: Task) -> Dataset:
    """Load all rows of other data, with the labels of the task of a run."""
    wanted = replace(
        options, validation_file=None, test_file=None, data_dir=None, split_column=NO_COLUMN,
        corrections=None,
        task=task.name,
    )  # fmt: skip
    loaded = load_data(wanted)
    rows, names = loaded.splits["train"], task.class_names
    if unknown := [name for name in loaded.task.class_names if name not in names]:
        raise DataError(
            f"{options.data} has labels that the model does not know: {_listed(unknown)}",
            remedy="write them as the model does, or leave these rows out; its classes are"
            f" {_listed(names)}",
        )
    labels = loaded.task.decode(column_of(rows, "label"))
    texts = texts_of(rows)
    return make_dataset(texts.texts, labels, task=task, pairs=texts.pairs)


def _check_options(options: DataConfig, source: str) -> None:
    """Raise an error for an option that does not go with the source."""
    for known_field in fields(DataConfig):
        option, value = OPTIONS[known_field.name], getattr(options, known_field.name)
        text = str(value)
        if "\0" in text or text != text.encode(errors="replace").decode():
            raise UsageError(f"the name {value!r} is not UTF-8", remedy="rename it")
        is_foreign = option.goes_with and source not in option.goes_with and value != option.default
        if is_foreign and not isinstance(options, OtherData):
            raise UsageError(
                f"--data {options.data} takes no {option.flag} (here {value})",
                remedy=f"leave it out: it goes with {' or '.join(option.goes_with)}",
            )
    if source in KNOWN_BY_NAME and options.task not in (AUTO, Single.name):
        raise UsageError(
            f"--data {source} has classes, which --task {options.task} does not fit",
            remedy="leave --task out",
        )


def source_name(source: str) -> str:
    """Return a short name for a source, fit for a folder.

    >>> source_name("data/reviews.csv"), source_name("hub:owner/name:part@refs/pr/1")
    ('reviews', 'name-part')
    """
    if source.startswith(HUB_PREFIX):
        return Path(source.removeprefix(HUB_PREFIX).partition("@")[0]).name.replace(":", "-")
    return Path(source).stem


def _listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - MAX_LISTED:,} others" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others
