"""TREC's questions, 5,452 to train and 500 to test, by what they ask for: 6 classes or 50.

Li and Roth, Learning Question Classifiers, 2002. The data has no known licence, so it is fetched
and not shipped. The questions that are shipped are in TREC's six classes.
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from datasets import DatasetDict

from finetune import hub
from finetune.config.schema import DataConfig
from finetune.data.dataset import DataSource, LoadedData, make_dataset
from finetune.data.formats import read_file
from finetune.data.packed import reading_explained
from finetune.errors import DataNotFound, DataUnreadable, HubNotReachable, UsageError
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.single import Single

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


# The files as they were published, and their sha256.
PUBLISHED = {
    "train": (
        "train_5500.label",
        "9e4c8bdcaffb96ed61041bd64b564183d52793a8e91d84fc3a8646885f466ec3",
    ),
    "test": (
        "TREC_10.label",
        "033f22c028c2bbba9ca682f68ffe204dc1aa6e1cf35dd6207f2d4ca67f0d0e8e",
    ),
}
# Fine class, such as NUM:date, and question.
Rows = list[tuple[str, str]]


def load_trec(options: DataConfig, *, emit: Emit) -> LoadedData:
    """Load TREC from raw files in ``data_dir``, else from the Hub."""
    label, folder = options.label, options.data_dir
    if label not in CLASSES_OF_LABEL:
        raise UsageError(
            f"TREC has no label {label!r}", remedy=f"choose one of {', '.join(CLASSES_OF_LABEL)}"
        )
    read, sources = _read_folder(Path(folder).expanduser(), emit) if folder else _fetch(emit)
    task = Single(CLASSES_OF_LABEL[label])
    splits = DatasetDict()
    for split, rows in read.items():
        fine, texts = zip(*rows, strict=True)
        labels = fine if label == "label-fine" else [name.partition(":")[0] for name in fine]
        splits[split] = make_dataset(texts, labels, task=task)
    return LoadedData(splits, task, sources)


def _fetch(emit: Emit) -> tuple[dict[str, Rows], Sequence[DataSource]]:
    emit(Info(f"loading {HUB_REPOSITORY} from the Hub"))
    names = {split: f"default/{split}/0000.parquet" for split in PUBLISHED}
    try:
        folder = hub.Repository("dataset", HUB_REPOSITORY, HUB_REVISION).fetch(names.values())
    except (HubNotReachable, DataNotFound) as error:
        raise HubNotReachable(
            f"TREC is not in the cache: {error.message}",
            remedy="go online for the first run, name a folder with train_5500.label of"
            f" {ORIGINAL_ADDRESS} as --data-dir, or take --data questions, which comes with the"
            " package",
        ) from error
    splits = {}
    for split, name in names.items():
        columns = read_file(folder / name, DataConfig(), emit=emit).columns
        fine, texts = (columns[one].to_pylist() for one in ("fine_label", "text"))
        splits[split] = list(zip(fine, texts, strict=True))
    return splits, [DataSource(f"hub:{HUB_REPOSITORY}", commit=HUB_REVISION)]


def _read_folder(folder: Path, emit: Emit) -> tuple[dict[str, Rows], Sequence[DataSource]]:
    emit(Info(f"reading TREC from {folder}"))
    splits, sources = {}, []
    for split, (name, sha256) in PUBLISHED.items():
        path = folder / name
        if not os.path.isfile(path):  # no error where it is closed
            if split == "test":
                continue
            remedy = f"put it there from {ORIGINAL_ADDRESS}, or leave out --data-dir to download it"
            raise DataNotFound(f"there is no file {path}", remedy=remedy)
        with reading_explained():
            content = path.read_bytes()
        splits[split] = _parse(content, path=path)
        sources.append(DataSource(str(path), hashlib.sha256(content).hexdigest()))
        if sources[-1].sha256 != sha256:
            remedy = f"to compare with published results, take {ORIGINAL_ADDRESS}/{name}"
            emit(WarningMessage(f"{path} is not the published file", remedy=remedy))
    return splits, sources


def _parse(content: bytes, *, path: Path) -> Rows:
    try:
        text = content.decode("utf-8-sig")  # of a copy; the published files are in ISO-8859-1
    except UnicodeDecodeError:
        text = content.decode("iso-8859-1")
    rows: Rows = []
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        # One space of the training file is the byte 0xF0 by accident ("sister city"); the Hub's
        # versions mend it in this way too.
        words = line.replace("\xf0", " ").strip().split(maxsplit=1)
        if len(words) == 2 and words[0] in FINE:
            rows.append((words[0], words[1]))
        elif words:
            raise DataUnreadable(
                f"line {number} of {path} is not a class followed by a question: {line[:60]!r}",
                remedy="write it as 'NUM:date When was the telephone invented ?', in one of the 50"
                " classes",
            )
    if not rows:
        raise DataUnreadable(
            f"{path} has no questions", remedy=f"replace it with {ORIGINAL_ADDRESS}/{path.name}"
        )
    return rows


def load_questions(options: DataConfig, *, emit: Emit) -> LoadedData:
    """Load the questions that come with the package: 135 of each class to train, 45 to test.

    They were written for this project, in mixed order: the first of a split are of all classes.
    """
    emit(Info("reading the questions that come with the package"))
    content = files("finetune.data").joinpath("questions.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    task, splits = Single(COARSE), {}
    for split in ("train", "test"):
        own = [row for row in rows if row["split"] == split]
        texts, labels = ([row[name] for row in own] for name in ("text", "label"))
        splits[split] = make_dataset(texts, labels, task=task)
    source = DataSource("questions", hashlib.sha256(content).hexdigest())
    return LoadedData(DatasetDict(splits), task, (source,))
