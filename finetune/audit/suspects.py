"""Rank labels that are probably wrong, and estimate how many labels are wrong.

Both use predictions of linear heads that were fitted without the row and its near duplicates.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.split import find_folds
from finetune.evaluation.statistics import Interval
from finetune.runs.several import OutOfFold
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import MULTI
from finetune.tasks.tables import ERRORS_OF_95
from finetune.training.linear_head import TRIED_GRADIENT, LabelledFeatures, choose_strength, solve

SEEDS = 3
# More features times outputs take a minute per seed.
MAX_WORK = 1.2e8
LOWEST_PROBABILITY = 1e-6
MIN_ROWS = 20
# Fractions of the rows predicted as a class, and of all rows. Predictions of these surest rows are
# nearly all correct, so that their labels show how many labels are wrong.
SUREST, SUREST_OF_ALL = 0.3, 0.4
# A head misclassifies about this fraction of its surest rows, which no table can show.
MODEL_ERRORS = 0.005


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, which is 20 times as fast for small products on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def predict_out_of_fold(
    rows: LabelledFeatures, groups: NDArray[np.int64], *, folds: int
) -> NDArray[np.float32]:
    """Return the mean logits of heads fitted without the group of each row: [rows, outputs]."""
    if len(np.unique(groups)) == 1:  # all rows are near duplicates
        groups = np.arange(len(groups))
    folds = min(folds, len(np.unique(groups)))
    strength, _ = choose_strength(rows, seed=0)
    seeds = SEEDS if rows.features.size * rows.outputs <= MAX_WORK else 1
    total = np.zeros((len(rows.labels), rows.outputs), np.float32)
    for seed in range(seeds):
        fold = find_folds(groups, rows.groups, folds=folds, seed=seed)
        for number in range(folds):
            training, test = rows.select(np.flatnonzero(fold != number)), fold == number
            head = solve(training, strength=strength, max_gradient=TRIED_GRADIENT)
            total[test] += head.logits(rows.features[test])
    return np.asarray(total / seeds, np.float32)


def mix_logits(logits: Logits, run: OutOfFold, task: Task) -> NDArray[np.float32]:
    """Return the mean with the logits of a cross-validation, where it has the row."""
    mixed, probabilities = logits.copy(), run.outputs.probabilities
    if probabilities is not None and [*run.task.class_names] == [*task.class_names]:
        clipped = np.clip(probabilities, LOWEST_PROBABILITY, 1 - LOWEST_PROBABILITY)
        run_logits = np.log(clipped) - (np.log1p(-clipped) if task.problem_type == MULTI else 0)
        mixed[run.rows] = (logits[run.rows] + run_logits) / 2
    return mixed


def rank_suspects(task: Task, logits: Logits, labels: Labels) -> tuple[NDArray[np.int64], Labels]:
    """Return rows, the highest loss first, and the loss of every row of the table.

    A row that is the only one of its class is left out, since no head learned that class from
    other rows.
    """
    losses = np.asarray(task.evaluation_losses(logits, labels), np.float64)
    rows, classes = task.class_rows(labels)
    is_only = np.zeros(len(labels), bool)
    if len(classes):
        is_only[rows[np.bincount(classes)[classes] == 1]] = True
    order = np.argsort(-losses, kind="stable")
    return order[~is_only[order]], losses


def estimate_wrong(probabilities: NDArray[np.float32], labels: Labels) -> Interval | None:
    """Return how many labels are wrong, with the 95% interval, or None for too few rows.

    Labels are class numbers, [rows], or in multi-label data 0 and 1, [rows, classes]. If a head is
    sure, a label that disagrees is nearly always wrong. So the fraction of such labels among the
    surest rows of each predicted class stands for the whole class. Unlike the joint count of
    confident learning (Northcutt et al., JAIR 2021), rows that a head can't classify do not count
    as errors. On TREC, that count is 2.3% before any label was exchanged.
    """
    if len(labels) < MIN_ROWS:
        return None
    if labels.ndim == 2:  # each cell is one binary label
        cells = probabilities.ravel()
        probabilities, labels = np.stack([1 - cells, cells], axis=1), labels.ravel().astype(int)
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1)
    counts = np.bincount(predicted, minlength=probabilities.shape[1])
    order = np.lexsort((-confidence, predicted))
    rank = np.arange(len(labels)) - (np.cumsum(counts) - counts)[predicted[order]]
    is_surest = confidence[order] >= np.quantile(confidence, 1 - SUREST_OF_ALL)
    surest = order[is_surest & (rank < np.ceil(SUREST * counts)[predicted[order]])]
    wrong = surest[predicted[surest] != labels[surest]]
    checked = np.bincount(predicted[surest], minlength=len(counts))
    disagreeing = np.bincount(predicted[wrong], minlength=len(counts))
    # A class without such rows counts like the mean of the others.
    share = np.where(checked, counts, 0) / counts[checked > 0].sum()
    size = np.maximum(checked, 1)
    value = float(share @ (disagreeing / size))
    # Agresti and Coull, 1998: add two of each, so that no error among few rows is no certainty.
    smooth = (disagreeing.sum() + 2) / (checked.sum() + 4)
    rate = np.where(disagreeing, disagreeing / size, smooth)
    error = ERRORS_OF_95 * float(np.sqrt(np.sum(share**2 * rate * (1 - rate) / size)))
    ends = value, max(value - error - MODEL_ERRORS, 0.0), min(value + error, 1.0)
    return Interval(*(float(round(end * len(labels))) for end in ends))
