"""Reads folders and archives of tables, or of text files with one folder per class."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow

from finetune.config.schema import DataConfig
from finetune.data import packed
from finetune.data.columns import OtherData
from finetune.data.encoding import find_text
from finetune.data.read import TABLE_SUFFIXES, RawTable, join_tables, read_file
from finetune.errors import DataError, DataNotFoundError, DataUnreadableError, SeveralTablesError
from finetune.events import Info, emit
from finetune.files import read_bytes

# Class by file name, per split.
Classes = dict[str, dict[str, str]]
TEXT_SUFFIXES = (".txt", "")
WITHOUT_CLASS = frozenset(("unsup", "unsupervised", "unlabeled", "unlabelled"))


def read_splits(paths: Sequence[Path], options: DataConfig) -> dict[str, RawTable]:
    """Return all splits of a folder, archive or file. Several files become ``train``."""
    path, may_be_several = paths[0], not isinstance(options, OtherData)
    try:
        if options.table is not None or not packed.holds_files(path):
            return {"train": join_tables([read_file(path, options) for path in paths])}
        tables = _read_folder(path, options)
        if len(tables) > 1 and not may_be_several:
            message = f"{path} contains several splits: {', '.join(tables)}"
            raise DataError(message, remedy="choose the folder or file of one of them")
        packed.report_ignored(path, [], [t.path for t in tables.values()], TABLE_SUFFIXES)
        return tables
    except SeveralTablesError as error:
        names, splits = error.names, packed.splits_named(error.names)
        if "train" not in splits or len(paths) > 1 or not may_be_several:
            raise
    used = [name for group in splits.values() for name in group]
    emit(Info(f"splits from the tables in {path}: {', '.join(used)}; --table reads only one"))
    packed.report_ignored(path, names, [path / name for name in used], TABLE_SUFFIXES)
    return {
        split: join_tables([read_file(path, replace(options, table=name)) for name in group])
        for split, group in splits.items()
    }


def _read_folder(path: Path, options: DataConfig) -> dict[str, RawTable]:
    """Return the splits of a folder or archive."""
    packed.reject_document(path, path.suffix.lower())  # such as a Numbers document
    names = packed.names_in(path)
    packed.reject_parts(path, names)
    if folders := find_class_folders(names):
        return {split: _read_text_files(path, texts, options) for split, texts in folders.items()}
    if packed.find_tables(names, TABLE_SUFFIXES):
        return {"train": read_file(path, options)}
    raise DataNotFoundError(
        f"{path} contains no tables, and no .txt files in folders named after their class",
        remedy="pass a file as --data, or a folder with texts such as pos/1.txt and neg/2.txt;"
        " choose one of several files with --table, or join one file per class into one table",
    )


def find_class_folders(names: Iterable[str]) -> Classes:
    """Find files in folders named after classes, optionally within folders named after splits.

    >>> find_class_folders(["x-train/a/1.txt", "x-train/b/2", "x-test/b/3", "urls.txt"])
    {'train': {'x-train/a/1.txt': 'a', 'x-train/b/2': 'b'}, 'test': {'x-test/b/3': 'b'}}
    """
    folders = {name: PurePosixPath(name).parts[:-1] for name in names}
    classes: dict[str, str] = {}
    for name, parts in folders.items():
        label = next(
            (folder for folder in reversed(parts) if folder not in packed.SPLIT_BY_WORD), ""
        )
        is_text = PurePosixPath(name).suffix.lower() in TEXT_SUFFIXES
        if is_text and label not in ("", *WITHOUT_CLASS):
            classes[name] = label
    depths = Counter(len(folders[name]) for name in classes).most_common(1)
    classes = {name: classes[name] for name in classes if len(folders[name]) == depths[0][0]}
    if len(set(classes.values())) < 2:
        return {}
    splits: Classes = {}
    for name, label in classes.items():
        split = packed.find_split(" ".join(folder for folder in folders[name] if folder != label))
        splits.setdefault(split or "train", {})[name] = label
    return splits if "train" in splits else {}


def digest_folder(path: Path) -> str:
    """Return the sha256 of the names and contents of all files read from a folder."""
    digest, names = hashlib.sha256(), packed.names_in(path)
    texts = [name for classes in find_class_folders(names).values() for name in classes]
    others = packed.without_about(names)
    for name in sorted(texts) or packed.find_tables(names, TABLE_SUFFIXES) or others:
        content = read_bytes(path / name)
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_text_files(path: Path, classes: Mapping[str, str], options: DataConfig) -> RawTable:
    """Return a table with one text per file. All files have the same encoding."""
    names = list(classes)
    contents = packed.read_members(path, names)
    texts = [content.open().read() for content in contents]
    try:
        encoding = find_text(
            packed.Content(path, b"\n".join(texts)), encoding=options.encoding
        ).encoding
    except DataUnreadableError:
        for content in contents:  # so that an error reports the file
            find_text(content, encoding=options.encoding or "utf-8")
        raise
    count = len(set(classes.values()))
    emit(Info(f"reading {path}: {len(texts):,} texts in {count} folders, encoding {encoding}"))
    decoded = [text.decode(encoding).removeprefix("\ufeff") for text in texts]
    columns = pyarrow.table({"text": decoded, "label": [*classes.values()]})
    numbers = 1 + np.arange(len(columns))
    return RawTable(path, columns, lambda number: str(path / names[number - 1]), numbers)
