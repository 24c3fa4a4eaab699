"""TREC's questions, 5,452 to train and 500 to test, by what they ask for: 6 classes or 50.

Li and Roth, Learning Question Classifiers, 2002. The data has no known licence, so it is fetched
and not shipped.
"""

import codecs
import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datasets import ClassLabel, DatasetDict, Features
from pyarrow import parquet

from finetune import hub
from finetune.data.tables import make_table
from finetune.errors import DataNotFound, DataUnreadable, HubNotReachable, UsageError
from finetune.events import Emit, Stage, WarningMessage

HUB_REPOSITORY = "CogComp/trec"
# The main branch holds a script, which datasets 4 and later refuse; this commit of the branch
# refs/convert/parquet holds the same rows as files.
HUB_REVISION = "65752bf53af25bc935a0dce92fb5b6c930728450"
ORIGINAL_ADDRESS = "https://cogcomp.seas.upenn.edu/Data/QA/QC"

TRAINING_ROWS = 5452

_FINE_OF_COARSE = {
    "ABBR": "abb exp",
    "ENTY": "animal body color cremat currency dismed event food instru lang letter other plant"
    " product religion sport substance symbol techmeth termeq veh word",
    "DESC": "def desc manner reason",
    "HUM": "gr ind title desc",
    "LOC": "city country mount other state",
    "NUM": "code count date dist money ord other period perc speed temp volsize weight",
}
COARSE = tuple(_FINE_OF_COARSE)
"""The 6 classes, in the order of the Hub's present version."""
FINE = tuple(f"{coarse}:{fine}" for coarse in COARSE for fine in _FINE_OF_COARSE[coarse].split())
"""The 50 classes, in the order of the Hub's present version."""
CLASSES_OF_LABEL = {"label-coarse": COARSE, "label-fine": FINE}

# The Hub's first version numbered the classes in the order in which the training file names them,
# and its fine classes lack the coarse one in front.
_FIRST_COARSE = ("DESC", "ENTY", "ABBR", "HUM", "NUM", "LOC")
_FIRST_FINE = (
    "manner cremat animal exp ind gr title def date reason event state desc count other letter"
    " religion food country color termeq city body dismed mount money product period substance"
    " sport plant techmeth volsize instru abb speed word lang perc code dist temp symbol ord veh"
    " weight currency"
)
_CLASSES_OF_COLUMNS = {
    ("coarse_label", "fine_label"): (COARSE, FINE),
    ("label-coarse", "label-fine"): (_FIRST_COARSE, tuple(_FIRST_FINE.split())),
}


class PublishedFile(NamedTuple):
    """A raw file as it was published; the counts are those of ``COARSE``."""

    name: str
    sha256: str
    class_counts: tuple[int, ...]


PUBLISHED = {
    "train": PublishedFile(
        "train_5500.label",
        "9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3",
        (86, 1250, 1162, 1223, 835, 896),
    ),
    "test": PublishedFile(
        "TREC_10.label",
        "033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e",
        (9, 94, 138, 65, 81, 113),
    ),
}


class Question(NamedTuple):
    """One row; the fine class, such as ``NUM:date``, begins with the coarse one."""

    text: str
    fine: str

    @property
    def coarse(self) -> str:
        """The class among the six."""
        return self.fine.partition(":")[0]


def load_trec(*, folder: Path | None, label: str, emit: Emit) -> DatasetDict:
    """Return TREC's splits with the columns ``text`` and ``label``.

    Args:
        folder: Where the raw files are: ``train_5500.label`` and, for a test split,
            ``TREC_10.label``. ``None`` fetches both splits from the Hub, else from the original
            address, and keeps them in the cache. A file that differs from the published one is
            used, with a warning that says how it differs.
        label: ``label-coarse`` for the 6 classes or ``label-fine`` for the 50.
        emit: Is told what is read.

    Raises:
        UsageError: If there is no such label.
        DataNotFound: If the folder or the training file in it is not there.
        DataUnreadable: If a line is not a class and a question, or a file holds none.
        ChecksumDiffers: If a download arrived damaged.
        HubNotReachable: If neither address answers and the cache does not hold the data.
    """
    if label not in CLASSES_OF_LABEL:
        raise UsageError(
            f"TREC has no label {label!r}", remedy=f"choose one of {', '.join(CLASSES_OF_LABEL)}"
        )
    splits = _fetch(emit) if folder is None else _read_folder(folder, emit)
    return DatasetDict(
        {
            split: make_table(
                [question.text for question in questions],
                [q.coarse if label == "label-coarse" else q.fine for q in questions],
                classes=CLASSES_OF_LABEL[label],
            )
            for split, questions in splits.items()
        }
    )


def _fetch(emit: Emit) -> dict[str, list[Question]]:
    emit(Stage(f"loading TREC from {HUB_REPOSITORY}"))
    try:
        paths = {
            split: hub.fetch_dataset_file(
                HUB_REPOSITORY, f"default/{split}/0000.parquet", revision=HUB_REVISION
            )
            for split in PUBLISHED
        }
    except (HubNotReachable, DataNotFound) as error:
        emit(Stage(f"{error}; trying {ORIGINAL_ADDRESS}"))
        return _read_folder(_fetch_raw_files(), emit)
    return {split: _read_parquet(path) for split, path in paths.items()}


def _fetch_raw_files() -> Path:
    folder = hub.cache_folder("trec")
    try:
        for file in PUBLISHED.values():
            url = f"{ORIGINAL_ADDRESS}/{file.name}"
            hub.fetch_file(url, sha256=file.sha256, to=folder / file.name)
    except HubNotReachable as error:
        raise HubNotReachable(
            "TREC is not in the cache, and neither the Hub nor TREC's own address can be reached",
            remedy="go online for the first run, name a folder with train_5500.label as --data-dir,"
            " or take --data questions, which comes with the package",
        ) from error
    return folder


def _read_folder(folder: Path, emit: Emit) -> dict[str, list[Question]]:
    emit(Stage(f"reading TREC from {folder}"))
    if not (folder / PUBLISHED["train"].name).is_file():
        raise DataNotFound(
            f"there is no file {folder / PUBLISHED['train'].name}",
            remedy=f"put it there from {ORIGINAL_ADDRESS}, or leave out --data-dir to download it",
        )
    return {
        split: _read_raw(folder / file.name, published=file, emit=emit)
        for split, file in PUBLISHED.items()
        if (folder / file.name).is_file()
    }


def _read_raw(path: Path, *, published: PublishedFile, emit: Emit) -> list[Question]:
    content = path.read_bytes()
    text, encoding = _decode(content)
    questions = list(_parse(text, path=path))
    if not questions:
        raise DataUnreadable(
            f"{path} holds no questions", remedy=f"replace it by {ORIGINAL_ADDRESS}/{path.name}"
        )
    if hashlib.sha256(content).hexdigest() != published.sha256:
        marks = _differences_in_writing(content, text=text, encoding=encoding)
        differences = marks + _differences_in_rows(text, questions, published=published)
        emit(
            WarningMessage(
                f"{path} is not the file that was published: {'; '.join(differences)}",
                remedy="results on it can't be compared with published ones; the original is at "
                f"{ORIGINAL_ADDRESS}/{path.name}",
            )
        )
    return questions


def _decode(content: bytes) -> tuple[str, str]:
    """Return the text and its encoding: the published files' ISO-8859-1, or a copy's UTF-8."""
    try:
        return content.decode("utf-8-sig"), "UTF-8"
    except UnicodeDecodeError:
        return content.decode("iso-8859-1"), "ISO-8859-1"


def _parse(text: str, *, path: Path) -> Iterator[Question]:
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        # One space of the training file is the byte 0xF0 by accident ("sister city"); the Hub's
        # versions mend it in this way too.
        match line.replace("\xf0", " ").strip().split(maxsplit=1):
            case []:
                continue
            case [fine, question] if fine in FINE:
                yield Question(question, fine)
            case _:
                raise DataUnreadable(
                    f"line {number} of {path} is not a class and a question: {line[:60]!r}",
                    remedy="write it as 'NUM:date When was the telephone invented ?', in one of "
                    "the 50 classes",
                )


def _differences_in_writing(content: bytes, *, text: str, encoding: str) -> list[str]:
    marks = {
        "it begins with a byte-order mark": content.startswith(codecs.BOM_UTF8),
        "its lines end as on Windows": b"\r\n" in content,
        "it is encoded in UTF-8": encoding == "UTF-8" and not text.isascii(),
    }
    return [mark for mark, is_there in marks.items() if is_there]


def _differences_in_rows(
    text: str, questions: list[Question], *, published: PublishedFile
) -> list[str]:
    lines = "".join(io.StringIO(text, newline=None)).encode("iso-8859-1", errors="replace")
    if hashlib.sha256(lines).hexdigest() == published.sha256:
        return ["the questions are the same"]
    differences = []
    if len(questions) != sum(published.class_counts):
        differences.append(f"it has {len(questions)} questions, not {sum(published.class_counts)}")
    counts = Counter(question.coarse for question in questions)
    differences += [
        f"{counts[name]} of {name}, not {expected}"
        for name, expected in zip(COARSE, published.class_counts, strict=True)
        if counts[name] != expected
    ]
    if not any(question.text.endswith(" ?") for question in questions):
        differences.append("no space stands before the question marks")
    return differences or ["some lines are worded or labelled otherwise"]


def _read_parquet(path: Path) -> list[Question]:
    """Read a file of the Hub, of its first version or the present one, by the names of classes."""
    table = parquet.read_table(path)
    features = Features.from_arrow_schema(table.schema)
    for columns, orders in _CLASSES_OF_COLUMNS.items():
        if features.keys() >= {"text", *columns}:
            texts = table["text"].to_pylist()
            coarse, fine = (
                _class_names(features[column], otherwise=order, ids=table[column].to_pylist())
                for column, order in zip(columns, orders, strict=True)
            )
            return [
                Question(text, f if ":" in f else f"{c}:{f}")
                for text, c, f in zip(texts, coarse, fine, strict=True)
            ]
    raise DataUnreadable(
        f"{path} has the columns {', '.join(features)}, which are not TREC's",
        remedy="name a folder with train_5500.label as --data-dir",
    )


def _class_names(feature: object, *, otherwise: tuple[str, ...], ids: list[int]) -> list[str]:
    """Return names for numbers, as the file itself tells them or, if it does not, as the order."""
    names = feature.names if isinstance(feature, ClassLabel) else otherwise
    return [names[number] for number in ids]
