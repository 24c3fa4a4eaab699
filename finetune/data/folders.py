"""Folders and archives: of tables, of texts in folders of classes, and of files of lines.

Each line of a file is a text; its label is in another file, or the name of the file.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow

from finetune.config.schema import DataConfig
from finetune.data.columns import TEXT_NAMES, OtherData
from finetune.data.encoding import find_text
from finetune.data.formats import TABLE_SUFFIXES, read_file
from finetune.data.packed import (
    ABOUT,
    SPLIT_OF_WORD,
    Content,
    find_tables,
    holds_files,
    names_in,
    read_members,
    reading_explained,
    splits_named,
    unpack,
)
from finetune.data.reader import RawTable, join_tables
from finetune.errors import DataError, DataNotFound, DataUnreadable, SeveralTables
from finetune.events import Emit, Info

# The classes of files by their names, for each split.
Classes = dict[str, dict[str, str]]
TEXT_SUFFIXES = (".txt", "")
SAVED_BY_DATASETS = "state.json"
WITHOUT_CLASS = frozenset(("unsup", "unsupervised", "unlabeled", "unlabelled"))
SPLIT_WORD = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_OF_WORD)})(?![a-z])", re.IGNORECASE)
LABEL_WORDS = frozenset(("label", "labels", "y"))
TEXT_WORDS = {*TEXT_NAMES, *(f"{name}s" for name in TEXT_NAMES), "data", "seq", "in", "x", "txt"}


def read_splits(paths: Sequence[Path], options: DataConfig, *, emit: Emit) -> dict[str, RawTable]:
    """Return the table of some files, as ``train``, or all splits of a folder, archive or file."""
    path = paths[0]
    if options.labels_file is not None:
        labels = Path(options.labels_file).expanduser()
        return {"train": _read_parallel([unpack(path), unpack(labels)], options, emit)}
    try:
        if options.member is None and holds_files(path):
            tables = _read_folder(path, options, emit=emit)
            if len(tables) > 1 and isinstance(options, OtherData):
                raise DataError(
                    f"{path} holds several splits: {', '.join(tables)}",
                    remedy="name the folder or file of one of them",
                )
            return tables
        return {"train": join_tables([read_file(one, options, emit=emit) for one in paths])}
    except SeveralTables as error:
        splits = splits_named(error.names)
        if "train" not in splits or len(paths) > 1 or isinstance(options, OtherData):
            raise

        def read(member: str) -> RawTable:
            return read_file(path, replace(options, member=member), emit=emit)

        named = ", ".join(name for names in splits.values() for name in names)
        emit(Info(f"splits from the tables in {path}: {named}; --member reads one alone"))
        return {split: join_tables(list(map(read, names))) for split, names in splits.items()}


def _read_folder(path: Path, options: DataConfig, *, emit: Emit) -> dict[str, RawTable]:
    """Return the splits of a folder or an archive."""
    names = names_in(path)
    saved = [name for name in names if PurePosixPath(name).name == SAVED_BY_DATASETS]
    if saved:
        load = f"datasets.load_from_disk({str((path / saved[-1]).parent)!r})"
        raise DataUnreadable(
            f"{path} is a dataset that the datasets library has saved to disk",
            remedy=f"save each split as Parquet in Python: {load}.to_parquet('train.parquet')",
        )
    if folders := find_class_folders(names):
        return {split: _read_texts(path, texts, options, emit) for split, texts in folders.items()}
    if find_tables(names, TABLE_SUFFIXES):
        return {"train": read_file(path, options, emit=emit)}
    if labels := pair_with_labels(names):
        splits = splits_named(list(labels)) if len(labels) > 1 else {"train": list(labels)}
        if "train" not in splits:
            raise SeveralTables(path, list(labels))
        return {
            split: _read_parallel(read_members(path, (texts, labels[texts])), options, emit)
            for split, [texts, *_] in splits.items()
        }
    if files := find_class_files(names):
        return {split: _read_lines(path, texts, options, emit) for split, texts in files.items()}
    raise DataNotFound(
        f"{path} has no tables, and no .txt files in folders named by their class",
        remedy="name a file as --data, or a folder such as one with pos/1.txt and neg/2.txt",
    )


def find_class_folders(names: Iterable[str]) -> Classes:
    """Return texts in folders named by their class, which may be in one named as a split.

    >>> find_class_folders(["x-train/a/1.txt", "x-train/b/2", "x-test/b/3", "urls.txt"])
    {'train': {'x-train/a/1.txt': 'a', 'x-train/b/2': 'b'}, 'test': {'x-test/b/3': 'b'}}
    """
    texts = [path for path in map(PurePosixPath, names) if path.suffix.lower() in TEXT_SUFFIXES]
    classes = {
        path: next((folder for folder in path.parts[-2::-1] if folder not in SPLIT_OF_WORD), "")
        for path in texts
    }
    texts = [path for path in texts if classes[path] not in ("", *WITHOUT_CLASS)]
    depths = Counter(len(path.parts) for path in texts).most_common(1)
    known = {path: classes[path] for path in texts if len(path.parts) == depths[0][0]}
    if len(set(known.values())) < 2:
        return {}
    return _by_split(known, lambda path: [one for one in path.parts[:-1] if one != known[path]])


def find_class_files(names: Iterable[str]) -> Classes:
    """Return the uppermost files, if there are several: each line is a text of the file's class.

    >>> find_class_files(["rt.neg", "rt.pos"])
    {'train': {'rt.neg': 'neg', 'rt.pos': 'pos'}}
    >>> find_class_files(["train_a.txt", "train_b.txt", "test_a.txt", "README"])
    {'train': {'train_a.txt': 'a', 'train_b.txt': 'b'}, 'test': {'test_a.txt': 'a'}}
    """
    files = [path for path in map(PurePosixPath, names) if not ABOUT.match(path.name)]
    depth = min((len(path.parts) for path in files), default=0)
    files = [path for path in files if len(path.parts) == depth]
    if len({path.stem for path in files}) == 1:
        classes = {path: path.suffix[1:] for path in files}
    else:
        texts = [path for path in files if path.suffix.lower() == ".txt"]
        classes = {path: SPLIT_WORD.sub("", path.stem).strip("-_. ") for path in texts}
    return _by_split(classes, lambda path: path.parts) if len(classes) > 1 else {}


def _by_split(
    classes: Mapping[PurePosixPath, str], names: Callable[[PurePosixPath], Sequence[str]]
) -> Classes:
    splits: Classes = {}
    for path, label in classes.items():
        words = SPLIT_WORD.findall(" ".join(names(path)))
        split = SPLIT_OF_WORD[words[-1].casefold()] if words else "train"
        splits.setdefault(split, {})[str(path)] = label
    return splits if "train" in splits else {}


def pair_with_labels(names: Iterable[str]) -> dict[str, str]:
    """Return files of texts with the files of their labels, a line of which is that of a text.

    >>> pair_with_labels(["train_text.txt", "train_labels.txt", "val.txt", "val.labels", "map.txt"])
    {'train_text.txt': 'train_labels.txt', 'val.txt': 'val.labels'}
    """
    words = {name: {*re.findall("[a-z]+|[0-9]+", name.casefold())} for name in names}
    keys = {name: frozenset(words[name] - LABEL_WORDS - TEXT_WORDS) for name in words}
    labels = {keys[name]: name for name in words if words[name] & LABEL_WORDS}
    texts = {name: key for name, key in keys.items() if name not in labels.values()}
    counts = Counter(texts.values())
    return {name: labels[key] for name, key in texts.items() if key in labels and counts[key] == 1}


@reading_explained()
def digest_folder(path: Path) -> str:
    """Return the sha256 of the names and contents of all files that are read of a folder."""
    digest = hashlib.sha256()
    names = names_in(path)
    texts = [name for classes in find_class_folders(names).values() for name in classes]
    tables = find_tables(names, TABLE_SUFFIXES)
    others = [name for name in names if not ABOUT.match(PurePosixPath(name).name)]
    for name in sorted(texts) or tables or others:
        content = (path / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _read_texts(
    path: Path, classes: Mapping[str, str], options: DataConfig, emit: Emit
) -> RawTable:
    """Return a table of files with a text each; all have one encoding."""
    names = list(classes)
    contents = read_members(path, names)
    texts = [content.open().read() for content in contents]
    try:
        together = Content(path, b"\n".join(texts))
        encoding = find_text(together, encoding=options.encoding).encoding
    except DataUnreadable:
        for content in contents:  # which one it is
            find_text(content, encoding=options.encoding or "utf-8")
        raise
    folders = len(set(classes.values()))
    emit(Info(f"reading {path}: {len(texts):,} texts in {folders} folders, encoding {encoding}"))
    decoded = [text.decode(encoding).removeprefix("\ufeff") for text in texts]
    return _table_of(path, decoded, [*classes.values()], lambda row: str(path / names[row]))


def _read_lines(
    path: Path, classes: Mapping[str, str], options: DataConfig, emit: Emit
) -> RawTable:
    """Return a table of the lines of files with a class each."""
    rows = [
        (line, label, f"line {number} of {content.path}")
        for content, label in zip(read_members(path, list(classes)), classes.values(), strict=True)
        for number, line in find_text(content, encoding=options.encoding, emit=emit).lines()
    ]
    if all("\t" in text for text, _, _ in rows):
        raise SeveralTables(path, list(classes))
    emit(Info(f"reading {path}: {len(rows):,} lines of {len(classes)} files, one for each class"))
    lines, labels, places = zip(*rows, strict=True)
    return _table_of(path, lines, labels, places.__getitem__)


def _read_parallel(files: Sequence[Content], options: DataConfig, emit: Emit) -> RawTable:
    """Return a table of the lines of two files."""
    columns = []
    for content in files:
        with find_text(content, encoding=options.encoding, emit=emit).open(newline="\n") as lines:
            columns.append([line.rstrip("\r\n") for line in lines])
    [texts, labels], [column, classes] = files, columns
    if len(column) != len(classes):
        raise DataError(
            f"{texts.path} has {len(column):,} lines, and {labels.path} {len(classes):,}",
            remedy="write the text and the label of a row in the same line of both",
        )
    emit(Info(f"reading the lines of {texts.path} as texts, of {labels.path} as their labels"))
    return _table_of(texts.path, column, classes, lambda row: f"line {row + 1} of {texts.path}")


def _table_of(
    path: Path, texts: Sequence[str], labels: Sequence[str], place: Callable[[int], str]
) -> RawTable:
    columns = pyarrow.table({"text": texts, "label": labels})
    return RawTable(path, columns, place, np.arange(len(columns)))
