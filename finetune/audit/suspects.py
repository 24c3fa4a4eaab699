"""Rank labels that are probably wrong, by linear heads that were fitted without the row.

No total is given: of 1,000 of TREC's questions, the number that the surest predictions suggest was
73 (37 to 105) as published, and 83 (47 to 114) after 16 labels were exchanged.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.split import find_folds
from finetune.runs.several import OutOfFold
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import MULTI
from finetune.training.linear_head import TRIED_GRADIENT, LabelledFeatures, choose_strength, solve

SEEDS = 3
# More features times outputs take a minute per seed.
MAX_WORK = 1.2e8
LOWEST_PROBABILITY = 1e-6


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
