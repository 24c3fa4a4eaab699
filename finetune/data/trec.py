"""Loads TREC: 5,452 training and 500 test questions, labeled with the type of their answer.

It has 6 coarse or 50 fine classes (Li and Roth, Learning Question Classifiers, 2002). The data
has no known license, so it is downloaded, not bundled. The bundled questions use the six TREC
classes.
"""

import hashlib
import io
import json
import os
from importlib.resources import files
from pathlib import Path

import pyarrow
import pyarrow.compute as pc

from finetune import hub
from finetune.config.schema import HUB_PREFIX, DataConfig
from finetune.data.dataset import DataSource, LoadedData, make_dataset
from finetune.data.read import read_file
from finetune.errors import DataNotFoundError, DataUnreadableError, HubNotReachableError
from finetune.events import Info, emit
from finetune.files import file_sha256, read_bytes
from finetune.tasks.labels import map_values
from finetune.tasks.single import Single

HUB_REPOSITORY = "CogComp/trec"
# A commit in refs/convert/parquet: the main branch contains a script, which datasets 4 rejects.
HUB_REVISION = "65752bf53af25bc935a0dce92fb5b6c930728450"
ORIGINAL_ADDRESS = "https://cogcomp.seas.upenn.edu/Data/QA/QC"

TRAINING_ROWS = 5452

_FINE_BY_COARSE = {
    "ABBR": "abb exp",
    "ENTY": "animal body color cremat currency dismed event food instru lang letter other plant"
    " product religion sport substance symbol techmeth termeq veh word",
    "DESC": "def desc manner reason",
    "HUM": "gr ind title desc",
    "LOC": "city country mount other state",
    "NUM": "code count date dist money ord other period perc speed temp volsize weight",
}
COARSE = tuple(_FINE_BY_COARSE)
"""The 6 classes, in the order of the current version on the Hub."""
FINE = tuple(f"{coarse}:{fine}" for coarse in COARSE for fine in _FINE_BY_COARSE[coarse].split())
"""The 50 classes, in the order of the current version on the Hub."""
FILES = {"train": "train_5500.label", "test": "TREC_10.label"}


def load_trec(options: DataConfig) -> LoadedData:
    """Load TREC from raw files in ``data_dir``, else from the Hub."""
    if options.data_dir is not None:
        folder = Path(options.data_dir).expanduser()
        emit(Info(f"reading TREC from {folder}"))
        paths = {split: folder / name for split, name in FILES.items()}
        if not os.path.isfile(paths["test"]):  # false if the folder is not readable
            del paths["test"]
        read = {split: _parse(path) for split, path in paths.items()}
        sources = [DataSource(str(path), file_sha256(path)) for path in paths.values()]
    else:
        read = _fetch()
        sources = [DataSource(f"{HUB_PREFIX}{HUB_REPOSITORY}", commit=HUB_REVISION)]
    is_fine = options.label == "label-fine"
    task, splits = Single(FINE if is_fine else COARSE), dict[str, pyarrow.Table]()
    for split, rows in read.items():
        labels = rows["fine_label"]
        if not is_fine:
            labels = map_values(labels, lambda name: name.partition(":")[0])
        splits[split] = make_dataset(rows["text"], labels, task=task)
    return LoadedData(splits, task, sources)


def _fetch() -> dict[str, pyarrow.Table]:
    emit(Info(f"loading {HUB_REPOSITORY} from the Hub"))
    names = {split: f"default/{split}/0000.parquet" for split in FILES}
    try:
        folder = hub.Repository("dataset", HUB_REPOSITORY, HUB_REVISION).fetch(names.values())
    except (HubNotReachableError, DataNotFoundError) as error:
        raise HubNotReachableError(
            f"TREC is not in the cache: {error.message}",
            remedy="go online for the first run, set --data-dir to a folder with train_5500.label"
            f" from {ORIGINAL_ADDRESS}, or use --data questions, which is bundled",
        ) from error
    return {split: read_file(folder / name, DataConfig()).columns for split, name in names.items()}


def _parse(path: Path) -> pyarrow.Table:
    """Parse a raw file: in ISO-8859-1 as published, or a copy in UTF-8."""
    if not os.path.isfile(path):
        remedy = f"download it from {ORIGINAL_ADDRESS}, or drop --data-dir"
        raise DataNotFoundError(f"file not found: {path}", remedy=remedy)
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("iso-8859-1")
    rows: dict[str, list[str]] = {"fine_label": [], "text": []}
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        # One space in the training file is the byte 0xF0 by accident ("sister city"); the Hub
        # versions fix it in the same way.
        label, _, question = line.replace("\xf0", " ").strip().partition(" ")
        if label in FINE and question:
            rows["fine_label"].append(label)
            rows["text"].append(question.strip())
        elif label:
            raise DataUnreadableError(
                f"line {number} of {path} is not a class followed by a question: {line[:60]!r}",
                remedy="write it as 'NUM:date When was the telephone invented ?', with one of the"
                " 50 classes",
            )
    return pyarrow.table(rows)


def load_questions(options: DataConfig) -> LoadedData:
    """Load the bundled questions in mixed order: 135 per class for training, 45 for testing."""
    emit(Info("reading the bundled questions"))
    content = files("finetune.data").joinpath("questions.jsonl").read_bytes()
    rows = pyarrow.Table.from_pylist([json.loads(line) for line in content.splitlines()])
    task, splits = Single(COARSE), dict[str, pyarrow.Table]()
    for split in ("train", "test"):
        part = rows.filter(pc.equal(rows["split"], split))
        splits[split] = make_dataset(part["text"], part["label"], task=task)
    source = DataSource("questions", hashlib.sha256(content).hexdigest())
    return LoadedData(splits, task, (source,))
