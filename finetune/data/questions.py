"""Questions that come with the package, in TREC's six classes: 135 of each to train, 45 to test.

They were written for this project, and need no network.
"""

import hashlib
import json
from importlib.resources import files

from datasets import DatasetDict

from finetune.data.dataset import make_dataset
from finetune.data.source import DataSource, LoadedData
from finetune.data.trec import COARSE
from finetune.tasks.single import Single


def load_questions() -> LoadedData:
    """Return the splits ``train`` and ``test`` with the columns ``text`` and ``label``.

    The rows are in mixed order, so that the first of a split are of all classes.
    """
    content = files("finetune.data").joinpath("questions.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    task = Single(COARSE)
    splits = DatasetDict(
        {
            split: make_dataset(
                [row["text"] for row in rows if row["split"] == split],
                [row["label"] for row in rows if row["split"] == split],
                task=task,
            )
            for split in ("train", "test")
        }
    )
    source = DataSource("questions", hashlib.sha256(content).hexdigest())
    return LoadedData(splits, task, (source,))
