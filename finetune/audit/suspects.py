"""Labels that may be wrong, and how many are: from predictions of heads that have not seen them."""

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.audit.duplicates import unit_rows
from finetune.evaluation.statistics import Interval
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.tables import ERRORS_OF_95

NEAREST, MIN_ROWS = 3, 20
# Rows whose distances to all others are in memory at once.
BLOCK = 256
# Of the rows predicted as a class, and of all rows: the predictions of these are nearly all right,
# so that their labels show how many are wrong.
SUREST, SUREST_OF_ALL = 0.3, 0.4
# Of its surest rows a head gets about as many wrong, which nothing in the table can tell.
MODEL_ERRORS = 0.005


def rank_suspects(task: Task, logits: Logits, labels: Labels) -> tuple[NDArray[np.int64], Labels]:
    """Return rows, the highest loss first, and the loss of every row of the table.

    The only row of a class is left out: without it no head has learned that class.
    """
    losses = np.asarray(task.evaluation_losses(logits, labels), np.float64)
    rows, classes = task.class_rows(labels)
    is_only = np.zeros(len(labels), bool)
    if len(classes):
        is_only[rows[np.bincount(classes)[classes] == 1]] = True
    order = np.argsort(-losses, kind="stable")
    return order[~is_only[order]], losses


def estimate_wrong(
    probabilities: NDArray[np.float32], labels: NDArray[np.int64]
) -> Interval | None:
    """Return how many labels are wrong, with the 95% interval; None of too few rows.

    Labels are class numbers, [rows]. Where a head is sure, a label that disagrees is nearly always
    wrong: their fraction among the surest rows of each predicted class counts for the whole class.
    Unlike confident learning's joint count (Northcutt et al., JAIR 2021), this takes the rows that
    a head can't classify for no errors: on TREC that count is 2.3% where nothing was exchanged.
    """
    if len(labels) < MIN_ROWS:
        return None
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    counts = np.bincount(predicted, minlength=probabilities.shape[1])
    order = np.lexsort((-confidence, predicted))
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[predicted[order]]
    is_surest = confidence[order] >= np.quantile(confidence, 1 - SUREST_OF_ALL)
    surest = order[is_surest & (rank < np.ceil(SUREST * counts)[predicted[order]])]
    wrong = surest[predicted[surest] != labels[surest]]
    taken, found = (np.bincount(predicted[one], minlength=len(counts)) for one in (surest, wrong))
    # A class without such rows counts as all others do.
    share = np.where(taken, counts, 0) / counts[taken > 0].sum()
    size = np.maximum(taken, 1)
    value = float(share @ (found / size))
    # Agresti and Coull, 1998: two of each added, else no errors among few rows would be certainty.
    smooth = (found.sum() + 2) / (taken.sum() + 4)
    rate = np.where(found, found / size, smooth)
    error = ERRORS_OF_95 * float(np.sqrt(np.sum(share**2 * rate * (1 - rate) / size)))
    ends = value, max(value - error - MODEL_ERRORS, 0.0), min(value + error, 1.0)
    return Interval(*(float(round(end * len(labels))) for end in ends))


def nearest_rows(
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
    rows: NDArray[np.int64],
    classes: NDArray[np.int64],
) -> list[list[int]]:
    """Return, for some rows, the three nearest others that carry a class: one class for each."""
    unit = unit_rows(features)
    found: list[list[int]] = [[] for _ in rows]
    for number in np.unique(classes):
        carriers, asking = np.flatnonzero(labels == number), np.flatnonzero(classes == number)
        for start in range(0, len(asking), BLOCK):
            places = asking[start : start + BLOCK]
            cosines = unit[rows[places]] @ unit[carriers].T
            cosines[rows[places][:, None] == carriers] = -np.inf
            best = torch.from_numpy(cosines).topk(min(NEAREST, len(carriers))).indices.numpy()
            for place, near in zip(places.tolist(), carriers[best].tolist(), strict=True):
                found[place] = [row for row in near if row != rows[place]]
    return found
