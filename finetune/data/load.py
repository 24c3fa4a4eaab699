"""Loads the splits of files, Hub datasets and built-in data."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc

from finetune import hub
from finetune.config.schema import HUB_PREFIX, OPTIONS, DataConfig
from finetune.data.classes import declared_classes, describe_classes, has_labels
from finetune.data.columns import NO_COLUMN, OtherData
from finetune.data.corrections import correct_labels
from finetune.data.dataset import (
    DataSource,
    LoadedData,
    TextColumns,
    make_dataset,
    pool_rows,
    return_freed_memory,
    split_table,
    texts_of,
    with_labels,
)
from finetune.data.folders import digest_folder
from finetune.data.packed import SPLIT_BY_WORD
from finetune.data.read import SUFFIXES, TABLE_SUFFIXES
from finetune.data.stream import Texts, read_texts
from finetune.data.tables import read_tables
from finetune.data.trec import load_questions, load_trec
from finetune.errors import DataError, DataNotFoundError, HubNotReachableError, UsageError
from finetune.events import Info, WarningMessage, emit
from finetune.files import file_sha256, is_there
from finetune.tasks.base import Task
from finetune.tasks.choose import AUTO
from finetune.tasks.labels import HARD, find_odd_names, listed
from finetune.tasks.single import Single

KNOWN_BY_NAME = ("trec", "questions")
# The Hub keeps a Parquet copy of most datasets in this branch, including datasets with a script.
CONVERTED_BRANCH = "refs/convert/parquet"
# With fewer unlabeled texts, class means are meaningless.
MIN_UNLABELED = 10
# If several folders have the same splits, one of these names contains the whole dataset.
MAIN_FOLDERS = ("", "data", "default")


def load_files(options: DataConfig) -> LoadedData:
    """Load user files or a folder of texts."""
    path = Path(options.data).expanduser()
    if path.suffix.lower() not in TABLE_SUFFIXES and not is_there(path):
        kinds = (*KNOWN_BY_NAME, f"a file ({', '.join(SUFFIXES)})", "a folder of texts")
        remedy = f"--data accepts {', '.join(kinds)} or {HUB_PREFIX}OWNER/NAME"
        raise UsageError(f"file or dataset not found: {options.data!r}", remedy=remedy)
    file_names = {
        "train": options.data,
        "validation": options.validation_file,
        "test": options.test_file,
    }
    files = {split: Path(name).expanduser() for split, name in file_names.items() if name}
    if len(set(map(os.path.realpath, files.values()))) < len(files):
        raise UsageError(
            "the same file is set for two splits",
            remedy="drop --validation-file or --test-file; rows of --data are then held out",
        )
    loaded = _load_unlabeled(options)
    loaded = loaded or read_tables({split: [file] for split, file in files.items()}, options)
    return replace(loaded, sources=[*loaded.sources, *map(_source_of, files.values())])


def _load_unlabeled(options: DataConfig) -> LoadedData | None:
    """Return class descriptions as training rows, and the texts of a table or of lines.

    Other splits have labels. Return None if no classes are declared or the table has labels.
    """
    path, classes = Path(options.data).expanduser(), declared_classes(options)
    if not classes or isinstance(options, OtherData) or path.is_dir():
        return None
    pieces = [*read_texts(path, OtherData(**vars(options)), as_lines=False)]
    if (source := pieces[0].source) and has_labels(source, classes, options):
        return None
    if options.text_pair_column is not None or options.task not in (AUTO, Single.name):
        needs = "sentence pairs" if options.text_pair_column else f"--task {options.task}"
        remedy = "label some texts with finetune label, or classify single texts"
        raise UsageError(f"{path} has no labels, but {needs} needs them", remedy=remedy)
    texts, task = _distinct(_as_table(pieces)), Single(classes)
    if len(texts) < MIN_UNLABELED:
        raise DataError(
            f"{path} has no labels and only {len(texts)} different texts",
            remedy=f"add texts: at least {MIN_UNLABELED}, ideally thousands",
        )
    splits = {"train": make_dataset(*describe_classes(classes, options), task=task)}
    for split, file in (("validation", options.validation_file), ("test", options.test_file)):
        if file is not None:
            splits[split] = load_rows(OtherData(**{**vars(options), "data": file}), task=task)
    described = options.class_descriptions
    return LoadedData(
        splits,
        task,
        [_source_of(Path(described).expanduser())] if described else [],
        chosen=pieces[0].columns,
        column_names=source.frame.columns.tolist() if source else [],
        unlabeled=texts,
        has_labels=False,
    )


def load_from_hub(options: DataConfig) -> LoadedData:
    """Load a Hub dataset or a part of it: ``hub:OWNER/NAME:PART@REVISION``.

    Parquet files come first: original files, then files that the Hub converted.
    """
    source, _, revision = options.data.removeprefix(HUB_PREFIX).partition("@")
    name, _, part = source.partition(":")
    emit(Info(f"loading {name} from the Hub"))
    repositories, unreachable = [], None
    branches = [revision] if revision else [None, CONVERTED_BRANCH]
    for branch in branches:
        try:
            repositories.append(hub.resolve("dataset", name, revision=branch))
            unreachable = unreachable or repositories[-1].unreachable
        except HubNotReachableError as error:
            unreachable = error  # the cache may contain the files of another branch
        except DataNotFoundError:
            if branch == branches[0]:
                raise
    for suffix, repository in product((".parquet", *SUFFIXES), repositories):
        if splits := find_splits(repository.files, part or None, suffix=suffix):
            break
    else:
        raise unreachable or DataNotFoundError(
            f"the dataset {name!r} has no complete training split in one of the formats"
            f" {', '.join(SUFFIXES)}",
            remedy="choose another; if a script generates it, which is never run, save its rows"
            " as a file and pass that as --data",
        )
    # The training split comes last: if it is in the cache, the other splits are as well.
    repository.fetch(file for split in splits if split != "train" for file in splits[split])
    folder = repository.fetch(splits["train"])
    paths = {split: [folder / file for file in files] for split, files in splits.items()}
    loaded = read_tables(paths, options)
    return replace(loaded, sources=(DataSource(HUB_PREFIX + source, commit=repository.commit),))


def find_splits(
    names: Iterable[str], part: str | None = None, *, suffix: str
) -> dict[str, list[str]]:
    """Return the files of each split, in order, or nothing if ``train`` is incomplete.

    The name of the file or of its folder determines the split: ``train.csv``,
    ``data/train-00000-of-00002.parquet``, ``default/train/0000.parquet``.
    """
    pattern = re.compile(
        rf"(?:(.*)/)?({'|'.join(SPLIT_BY_WORD)})(?:[-_.]?\d[^/]*|/[^/]+)?{re.escape(suffix)}"
    )
    folders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            folders[match[1] or ""][SPLIT_BY_WORD[match[2]]].append(name)
    candidates = {}
    for folder, splits in folders.items():
        complete = {split: files for split, files in splits.items() if _is_complete(files)}
        if "train" in complete:
            candidates[folder] = complete
    parts = {Path(folder).name: folder for folder in candidates}
    if part in parts:
        return candidates[parts[part]]
    is_clear = len(candidates) < 2 or candidates.keys() & set(MAIN_FOLDERS)
    if candidates and (part is not None or not is_clear):
        problem = "several datasets:" if part is None else f"no dataset {part!r}, but"
        raise DataNotFoundError(
            f"the repository has {problem} {', '.join(parts)}",
            remedy=f"choose one, such as --data hub:OWNER/NAME:{min(parts)}",
        )
    main = min(candidates, key=lambda folder: folder not in MAIN_FOLDERS, default="")
    return candidates.get(main, {})


def _is_complete(files: Sequence[str]) -> bool:
    """Return whether all parts of a split are present, numbered from 0."""
    numbers = (re.search(r"(\d+)-of-(\d+)|/(\d+)\.\w+$", name) for name in files)
    parts = list(filter(None, numbers))
    counts = {int(part[2]) for part in parts if part[2]} or {len(files)}
    return not parts or {int(part[1] or part[3]) for part in parts} == set(range(max(counts)))


# Keys are the names in ``Option.goes_with``.
LOADERS: dict[str, Callable[..., LoadedData]] = {
    "trec": load_trec,
    "questions": load_questions,
    "a file": load_files,
    "a dataset of the Hub": load_from_hub,
}


def load_data(options: DataConfig, *, read: LoadedData | None = None) -> LoadedData:
    """Load the splits of a source, and report their files or commit.

    ``read`` is the data if it was already read to guess options.
    """
    if read is not None:
        for event in read.events:
            emit(event)
        return replace(read, events=())
    is_of_hub = options.data.startswith(HUB_PREFIX)
    source = "a dataset of the Hub" if is_of_hub else "a file"
    source = options.data if options.data in KNOWN_BY_NAME else source
    _check_options(options, source)
    loaded = LOADERS[source](options)
    paths = [Path(name).expanduser() for name in (options.corrections, options.label_map) if name]
    if paths and loaded.has_labels:
        loaded = correct_labels(loaded, options)
        loaded = replace(loaded, sources=[*loaded.sources, *map(_source_of, paths)])
    warn_of_odd_names(loaded.task)
    return loaded


def warn_of_odd_names(task: Task) -> None:
    """Warn about class names that usually mean a missing label."""
    for finding, remedy in find_odd_names(task.class_names):
        emit(WarningMessage(finding, remedy=remedy))


def load_splits(
    options: DataConfig, *, folds: int | None = None, read: LoadedData | None = None
) -> LoadedData:
    """Load and split data. The same options always give the same rows.

    In a cross-validation, ``train`` contains all rows outside the test split, with their folds. The
    rows in ``read`` are removed, so that they are not in memory twice.
    """
    before = load_data(options, read=read)
    if not before.has_labels:
        if folds is not None:
            raise DataError(
                f"{options.data} has no labels, but --folds needs them",
                remedy="drop --folds, or label some texts with finetune label",
            )
        assert before.unlabeled is not None
        counts = f"{len(before.unlabeled):,} different texts without labels"
        emit(Info(f"data: {options.data}, {counts}, {before.task.label_summary}"))
        return before
    if folds is None:
        splits = split_table(before.splits, options, task=before.task)
    else:
        splits = pool_rows(before, folds=folds, seed=options.split_seed)
    counts = ", ".join(f"{len(rows):,} {split}" for split, rows in splits.items())
    emit(Info(f"data: {options.data}, {counts} rows, {before.task.label_summary}"))
    loaded = replace(before, splits=splits)
    before.splits.clear()  # the rows before the split
    return_freed_memory()
    return loaded


def with_few_label_texts(loaded: LoadedData, options: DataConfig) -> LoadedData:
    """Add unlabeled texts and class names, which few-shot training uses."""
    files = [options.unlabeled, options.class_descriptions]
    paths = [Path(name).expanduser() for name in files if name not in (None, "none")]
    names = None
    if options.class_names == "auto" and "text_pair" in loaded.splits["train"].column_names:
        emit(Info("class names are not used, because the model reads sentence pairs"))
    elif options.class_names == "auto":
        texts, classes = describe_classes(loaded.task.class_names, options)
        names = make_dataset(texts, classes, task=loaded.task)
    unlabeled = _find_unlabeled(loaded, options)
    sources = dict.fromkeys([*loaded.sources, *map(_source_of, paths)])
    return replace(loaded, unlabeled=unlabeled, names=names, sources=[*sources])


def _source_of(path: Path) -> DataSource:
    return DataSource(str(path), digest_folder(path) if path.is_dir() else file_sha256(path))


def _find_unlabeled(loaded: LoadedData, options: DataConfig) -> pyarrow.Table | None:
    """Return distinct texts without a label, from a file or from the table itself.

    Texts of the table that are also in a split are dropped. A file is read unchanged.
    """
    table, splits = loaded.unlabeled, loaded.splits
    if options.unlabeled == "none":
        return None
    if options.unlabeled is not None:
        path = Path(options.unlabeled).expanduser()
        pairs = "text_pair" in splits["train"].column_names
        other = OtherData(data=str(path), earlier_columns=loaded.columns)
        table = _as_table([*read_texts(path, other, as_lines=False, reads_pairs=pairs)])
    elif table is not None:
        known = pyarrow.chunked_array(
            [chunk for rows in splits.values() for chunk in texts_of(rows).joined.chunks], "string"
        )
        is_known = pc.is_in(TextColumns(*table.columns).joined, value_set=known)
        table = table.filter(pc.invert(is_known))
    return _distinct(table) if table is not None and len(table) else None


def _as_table(pieces: Sequence[Texts]) -> pyarrow.Table:
    """Return a table of the non-blank texts or pairs."""
    lists = [piece[:] for piece in pieces]
    columns = [[text or "" for piece in lists for text in piece.texts]]
    if lists and lists[0].pairs is not None:
        columns.append([text or "" for piece in lists for text in piece.pairs])
    table = pyarrow.table(columns, names=["text", "text_pair"][: len(columns)])
    is_blank = (pc.equal(pc.utf8_trim_whitespace(column), "") for column in table.columns)
    return table.filter(pc.invert(reduce(pc.or_, is_blank)))


def _distinct(table: pyarrow.Table) -> pyarrow.Table:
    return table.group_by(table.column_names, use_threads=False).aggregate([])


def load_rows(options: OtherData, *, task: Task) -> pyarrow.Table:
    """Load all rows of new data, with labels for the task of a run."""
    no_files: dict[str, Any] = dict.fromkeys(("validation_file", "test_file", "data_dir"))
    no_files |= {"split_column": NO_COLUMN, "task": task.name}
    if options.corrections and not is_there(Path(options.corrections)):
        message = f"{options.corrections} is missing, so its decisions are not applied"
        emit(WarningMessage(message, remedy="restore it, if it contains decisions on these rows"))
        no_files["corrections"] = None
    wanted = replace(options, **no_files)
    loaded = load_data(wanted)
    rows, names = loaded.splits["train"], task.class_names
    if unknown := [name for name in loaded.task.class_names if name not in names]:
        raise DataError(
            f"{options.data} has labels that the model was not trained on: {listed(unknown)}",
            remedy="rename them to classes of the model, or remove these rows; the classes are"
            f" {listed(names)}",
        )
    if loaded.drawn is not None:
        rows = rows.filter(np.isin(rows["row"], loaded.drawn))
        counts = f"{len(rows):,} rows of {options.data} were drawn at random"
        emit(Info(f"{counts}; only these are scored, because the others were chosen {HARD}"))
        if not len(rows):
            remedy = "label more texts: finetune label draws a quarter of them at random"
            raise DataError(f"{counts}; only random rows can be scored", remedy=remedy)
    return with_labels(rows, loaded.task.decode(rows["label"]), task=task)


def _check_options(options: DataConfig, source: str) -> None:
    """Raise an error for options that have no effect on the source."""
    for known_field in fields(DataConfig):
        option, value = OPTIONS[known_field.name], getattr(options, known_field.name)
        text = str(value)
        if "\0" in text or text != text.encode(errors="replace").decode():
            raise UsageError(f"the name {value!r} is not UTF-8", remedy="rename it")
        is_foreign = option.goes_with and source not in option.goes_with and value != option.default
        if is_foreign and not isinstance(options, OtherData):
            raise UsageError(
                f"--data {options.data} can't be used with {option.flag} (here {value})",
                remedy=f"drop it; it applies to {' or '.join(option.goes_with)}",
            )
    if source in KNOWN_BY_NAME and options.task not in (AUTO, Single.name):
        message = f"--task {options.task} can't be used with the classes of --data {source}"
        raise UsageError(message, remedy="drop --task")


def source_name(source: str) -> str:
    """Return a short name for a source, suitable for a folder.

    >>> source_name("data/reviews.csv"), source_name("hub:owner/name:part@refs/pr/1")
    ('reviews', 'name-part')
    """
    if source.startswith(HUB_PREFIX):
        return Path(source.removeprefix(HUB_PREFIX).partition("@")[0]).name.replace(":", "-")
    return Path(source).stem
