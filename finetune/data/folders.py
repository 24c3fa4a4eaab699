"""Folders of texts, one file each, in folders named by their class."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.encoding import find_text
from finetune.data.packed import Content, reading_explained
from finetune.data.reader import RawTable
from finetune.data.source import SPLIT_OF_WORD
from finetune.errors import DataNotFound, DataUnreadable
from finetune.events import Emit, Info

TEXT_SUFFIXES = (".txt", "")
SAVED_BY_DATASETS = "state.json"
WITHOUT_CLASS = frozenset(("unsup", "unsupervised", "unlabeled", "unlabelled"))


@reading_explained()
def read_folders(path: Path, options: DataConfig, *, emit: Emit) -> dict[str, RawTable]:
    """Return the table of each split of a folder, with the columns ``text`` and ``label``.

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
    return {split: _read_classes(one, options, emit=emit) for split, one in chosen.items()}


@reading_explained()
def digest_folder(path: Path) -> str:
    """Return the sha256 of the names and contents of all texts in a folder and those in it."""
    digest = hashlib.sha256()
    for file in sorted(file for folder in path.glob("**/") for file in _texts_in(folder)):
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


def _folders_in(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir() and not one.is_symlink())


def _texts_in(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        is_text = file.suffix.lower() in TEXT_SUFFIXES and not file.name.startswith(".")
        if is_text and file.is_file() and not file.is_symlink():
            yield file
