"""The file of out-of-fold predictions of every row, which ``run --folds`` writes to its folder.

A row of JSON has ``split``, ``row`` (its number in the table of that split, from 0), ``label``,
``predicted`` and, of classes, ``probabilities`` by class.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.files import read_jsonl, write_jsonl
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import MULTI

FILE_NAME = "out_of_fold.jsonl"
LOWEST = 1e-6


def write_out_of_fold(
    path: Path, task: Task, *, logits: Logits, labels: Labels, split: str, rows: NDArray[np.int64]
) -> None:
    """Write logits, [rows, outputs], of heads or models that have not seen the rows."""
    outputs = task.read_logits(logits)

    def lines() -> Iterator[dict[str, object]]:
        both = zip(
            rows.tolist(), task.to_json(labels), task.to_json(outputs.predicted), strict=True
        )
        for place, (row, label, predicted) in enumerate(both):
            line = {"split": split, "row": row, "label": label, "predicted": predicted}
            if outputs.probabilities is not None:
                values = outputs.probabilities[place].tolist()
                line["probabilities"] = dict(zip(task.class_names, values, strict=True))
            yield line

    write_jsonl(path, lines())


def read_out_of_fold(path: Path, task: Task) -> dict[tuple[str, int], NDArray[np.float32]]:
    """Return logits, [outputs], by split and row; of classes that are new, the lowest."""
    found = {}
    for line in read_jsonl(path):
        given = line.get("probabilities", {})
        values = np.array([given.get(name, 0.0) for name in task.class_names])
        values = np.clip(values, LOWEST, 1 - LOWEST)
        logits = np.log(values) - (np.log1p(-values) if task.problem_type == MULTI else 0)
        found[line["split"], line["row"]] = logits.astype(np.float32)
    return found if task.class_names else {}
