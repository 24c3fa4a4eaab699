"""Questions that come with the package, in TREC's six classes: 135 of each to train, 45 to test.

They were written for this project, and need no network.
"""

import json
from importlib.resources import files

from datasets import DatasetDict

from finetune.data.tables import make_table
from finetune.data.trec import COARSE


def load_questions() -> DatasetDict:
    """Return the splits ``train`` and ``test`` with the columns ``text`` and ``label``.

    The rows are in mixed order, so that the first of a split are of all classes.
    """
    lines = files("finetune.data").joinpath("questions.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in lines.splitlines()]
    return DatasetDict(
        {
            split: make_table(
                [row["text"] for row in rows if row["split"] == split],
                [row["label"] for row in rows if row["split"] == split],
                classes=COARSE,
            )
            for split in ("train", "test")
        }
    )
