"""Folders: of texts in folders of classes, of tables, and of files with the texts of a class."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.formats import PACKED_SUFFIXES, SUFFIXES, read_file
from finetune.data.packed import Content, choose_member, reading_explained
from finetune.data.parallel import read_class_files, read_parallel
from finetune.data.reader import RawTable, join_tables
from finetune.data.source import SPLIT_OF_WORD, OtherData
from finetune.errors import DataNotFound, DataUnreadable, SeveralTables
from finetune.events import Emit, Info

TEXT_SUFFIXES = (".txt", "")
SAVED_BY_DATASETS = "state.json"
WITHOUT_CLASS = frozenset(("unsup", "unsupervised", "unlabeled", "unlabelled"))
ABOUT = re.compile(r"[._]|readme|licen[cs]e|citation|requirements|dataset_info", re.IGNORECASE)


def read_training(paths: Sequence[Path], options: DataConfig, *, emit: Emit) -> dict[str, RawTable]:
    """Return the training split of files, or all splits of a folder, or of tables in a file."""
    path = paths[0]
    if options.labels_file is not None:
        labels = Path(options.labels_file).expanduser()
        return {"train": read_parallel(path, labels, options, emit=emit)}
    try:
        if os.path.isdir(path):  # no error where a name is too long
            return _read_folder(path, options, emit=emit)
        return {"train": join_tables([read_file(one, options, emit=emit) for one in paths])}
    except SeveralTables as error:
        splits = splits_named(error.names)
        if "train" not in splits or len(paths) > 1 or isinstance(options, OtherData):
            raise

        def read(member: str) -> RawTable:
            return read_training(paths, replace(options, member=member), emit=emit)["train"]

        named = ", ".join(name for names in splits.values() for name in names)
        emit(Info(f"splits from the tables in {path}: {named}; --member reads one alone"))
        return {split: join_tables(list(map(read, own))) for split, own in splits.items()}


@reading_explained()
def _read_folder(path: Path, options: DataConfig, *, emit: Emit) -> dict[str, RawTable]:
    """Return the table of each split of a folder, or its only table.

    The folder of a split is named as one, as ``20news-bydate-test``, and holds folders of classes.
    """
    splits = {
        split: folder
        for folder in _folders_in(path)
        if (split := SPLIT_OF_WORD.get(re.split(r"[-_. ]", folder.name.casefold())[-1]))
    }
    chosen = splits if "train" in splits else {"train": path}
    if (chosen["train"] / SAVED_BY_DATASETS).is_file():
        load = f"datasets.load_from_disk({str(chosen['train'])!r})"
        raise DataUnreadable(
            f"{path} is a dataset that the datasets library has saved to disk",
            remedy=f"save each split as Parquet in Python: {load}.to_parquet('train.parquet')",
        )
    if "train" not in splits and (files := _top_files(path)):
        if files != _tables_in(path) and options.member is None:
            return {"train": read_class_files(files, options, emit=emit)}
        names = [file.relative_to(path).as_posix() for file in files]
        name = choose_member(names, options.member, path=path)
        return {"train": read_file(path / name, replace(options, member=None), emit=emit)}
    return {split: _read_classes(one, options, emit=emit) for split, one in chosen.items()}


def splits_named(names: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the tables of each split by their names; nothing if it is not clear which they are.

    >>> splits_named(["in/train_1.csv", "in/train_2.csv", "x_test.csv", "sample.csv"])
    {'train': ['in/train_1.csv', 'in/train_2.csv'], 'test': ['x_test.csv']}
    >>> splits_named(["train.csv", "train_small.csv", "train_a.csv"])["train"]
    ['train.csv']
    """
    splits: dict[str, list[str]] = {}
    for name in names:
        words = [SPLIT_OF_WORD.get(word) for word in re.split(r"[\W_]|\d", name.casefold())]
        if split := next(filter(None, reversed(words)), None):
            splits.setdefault(split, []).append(name)
    for split, own in splits.items():
        plain = [name for name in own if Path(name).stem.casefold() in SPLIT_OF_WORD]
        if len({re.sub(r"\d", "", name) for name in own}) > 1:
            if len(plain) != 1:
                return {}
            splits[split] = plain
    return splits


@reading_explained()
def digest_folder(path: Path) -> str:
    """Return the sha256 of the names and contents of all texts in a folder and those in it."""
    digest = hashlib.sha256()
    texts = (file for folder in path.glob("**/") for file in _texts_in(folder))
    for file in _top_files(path) or sorted(texts):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_classes(path: Path, options: DataConfig, *, emit: Emit) -> RawTable:
    folders = [folder for folder in _folders_in(path) if folder.name not in WITHOUT_CLASS]
    files = [file for folder in folders for file in _texts_in(folder)]
    if not files:
        raise DataNotFound(
            f"{path} has no .txt files in folders named by their class",
            remedy="name a file as --data, or a folder such as one with pos/1.txt and neg/2.txt",
        )
    contents = [file.read_bytes() for file in files]
    try:  # all have one encoding
        together = Content(path, path, b"\n".join(contents))
        encoding = find_text(together, encoding=options.encoding).encoding
    except DataUnreadable:
        for file in files:  # which one it is
            find_text(Content(file, file), encoding=options.encoding or "utf-8")
        raise
    classes = len({file.parent for file in files})
    emit(Info(f"reading {path}: {len(files):,} texts in {classes} folders, encoding {encoding}"))
    texts = (content.decode(encoding).removeprefix("\ufeff") for content in contents)
    columns = {
        "text": pyarrow.array(texts, "string"),
        "label": pyarrow.array([file.parent.name for file in files], "string"),
    }
    return RawTable(path, pyarrow.table(columns), lambda row: str(files[row]))


def _top_files(path: Path) -> list[Path]:
    """Return the tables of a folder, or its files with the texts of a class each.

    There are none if it has texts in folders of classes.
    """
    inner = [(one, *_folders_in(one)) for one in _folders_in(path)]
    classes = sum(any(next(_texts_in(folder), None) for folder in one) for one in inner)
    if classes > 1:
        return []
    if tables := _tables_in(path):
        return tables
    files = _files_in(path, "*")
    if len({file.stem for file in files}) > 1:  # unlike rt-polarity.pos
        files = [file for file in files if file.suffix.lower() == ".txt"]
    return files if len(files) > 1 and not classes else []


def _tables_in(path: Path) -> list[Path]:
    """Return the files that are tables by their suffix, or else all if they are named as splits."""
    for depth in ("*", "*/*"):
        files = _files_in(path, depth)
        tables = [one for one in files if one.suffix.lower() in (*SUFFIXES, *PACKED_SUFFIXES)]
        if tables or "train" in splits_named([one.name for one in files]):
            return tables or files
    return []


def _files_in(path: Path, pattern: str) -> list[Path]:
    files = (one for one in path.glob(pattern) if one.is_file())
    return sorted(one for one in files if not any(map(ABOUT.match, one.relative_to(path).parts)))


def _folders_in(path: Path) -> list[Path]:
    folders = (one for one in path.iterdir() if one.is_dir() and not one.is_symlink())
    return sorted(one for one in folders if not one.name.startswith("."))


def _texts_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        is_text = file.suffix.lower() in TEXT_SUFFIXES and not file.name.startswith(".")
        if is_text and file.is_file() and not file.is_symlink():
            yield file
