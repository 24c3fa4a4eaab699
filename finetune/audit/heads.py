"""Predictions of every row by heads that have not seen it: on features, and on the tokens.

The two are wrong in different places, so the mean of their logits finds more wrong labels than
either: of TREC's exchanged labels 75% instead of 67% are in the top 5% (docs/measurements.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse import csr_matrix

from finetune.data.split import find_folds
from finetune.runs.folds import OutOfFold
from finetune.tasks.base import Labels, Logits, Task
from finetune.tasks.metrics import MULTI
from finetune.tokenization.examples import Examples
from finetune.training.linear_head import TRIED_GRADIENT, LabelledFeatures, choose_strength, solve

SEEDS = 3
# More numbers times outputs take a minute a seed.
MAX_WORK = 1.2e8
# Of the head on tokens: its rows have unit norm. TREC's coarse and fine classes are best near it.
TOKEN_STRENGTH = 10.0
MAX_TOKEN_WEIGHTS = 2_000_000
TOKEN_ITERATIONS = 40
ROWS_A_PIECE = 8_192
# Of a cross-validation's logits in the mean with the heads'.
RUN_WEIGHTS, LOWEST = (0.0, 0.25, 0.5, 0.75, 1.0), 1e-6


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: a little quicker for so small products, 20 times on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def count_tokens(examples: Examples, *, outputs: int) -> csr_matrix:
    """Return which tokens, and which two in a row, are in each example, by TF-IDF: of unit norm.

    Only those of two examples or more count, and of a large vocabulary the most frequent.
    """
    parts = [*_ngrams(examples)]
    rows, codes = (np.concatenate(one) for one in zip(*parts, strict=True))
    _, columns, counts = np.unique(codes, return_inverse=True, return_counts=True)
    limit = max(MAX_TOKEN_WEIGHTS // outputs, 1)
    is_kept = counts > 1
    if is_kept.sum() > limit:
        is_kept = counts >= max(np.partition(counts, -limit)[-limit], 2)
    numbers = np.cumsum(is_kept) - 1
    here = is_kept[columns]
    shape = (len(examples.labels), max(int(is_kept.sum()), 1))
    ones = np.ones(int(here.sum()), np.float32)
    found = csr_matrix((ones, (rows[here], numbers[columns[here]])), shape)
    found.sum_duplicates()
    frequency = np.bincount(found.indices, minlength=shape[1])
    found.data = (np.log((1 + shape[0]) / (1 + frequency)) + 1)[found.indices].astype(np.float32)
    norms = np.sqrt(np.asarray(found.multiply(found).sum(axis=1)).ravel())
    found.data /= np.repeat(np.maximum(norms, 1e-12), np.diff(found.indptr)).astype(np.float32)
    return found


def _ngrams(examples: Examples) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield rows and the numbers of their tokens, then of two in a row."""
    for start in range(0, len(examples.labels), ROWS_A_PIECE):
        rows = np.arange(start, min(start + ROWS_A_PIECE, len(examples.labels)))
        inputs = examples.inputs_of(rows, int(examples.lengths[rows].max()))
        mask = inputs["attention_mask"].reshape(len(rows), -1).bool().numpy()
        tokens = inputs["input_ids"].numpy() + 1
        for codes, is_there in (
            (tokens, mask),
            ((tokens[:, 1:] << 32) + tokens[:, :-1], mask[:, 1:] & mask[:, :-1]),
        ):
            yield rows[np.nonzero(is_there)[0]], codes[is_there]


def predict_out_of_fold(
    rows: LabelledFeatures, tokens: csr_matrix, groups: NDArray[np.int64], *, folds: int
) -> NDArray[np.float32]:
    """Return the mean logits of heads that have not seen the row's group: [rows, outputs]."""
    if len(np.unique(groups)) == 1:  # all rows are near duplicates
        groups = np.arange(len(groups))
    folds = min(folds, len(np.unique(groups)))
    strength, _ = choose_strength(rows, seed=0)
    seeds = SEEDS if rows.features.size * rows.outputs <= MAX_WORK else 1
    total = np.zeros((len(rows.labels), rows.outputs), np.float32)
    for seed in range(seeds):
        fold = find_folds(groups, rows.groups, folds=folds, seed=seed)
        for number in range(folds):
            train, test = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
            training = rows.select(train)
            head = solve(training, strength=strength, max_gradient=TRIED_GRADIENT)
            weight, bias = solve_on_tokens(tokens[train], training)
            total[test] += head.logits(rows.features[test]) + tokens[test] @ weight.T + bias
    return np.asarray(total / (2 * seeds), np.float32)


def solve_on_tokens(
    tokens: csr_matrix, rows: LabelledFeatures
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Minimize the mean loss with an L2 penalty; return weight, [outputs, tokens], and bias."""
    labels, weights = torch.tensor(rows.labels), torch.from_numpy(rows.weights)
    weights = weights / weights.sum()
    penalty = 1 / (TOKEN_STRENGTH * len(rows.labels))
    shape = (rows.outputs, tokens.shape[1])
    transposed = tokens.T.tocsr()

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weight, bias = flat[: -shape[0]].reshape(shape), flat[-shape[0] :]
        product = tokens @ weight.T.astype(np.float32) + bias.astype(np.float32)
        logits = torch.from_numpy(product).requires_grad_()
        loss = (rows.losses(logits, labels) * weights).sum()
        [slope] = torch.autograd.grad(loss, [logits])
        of_weight = (transposed @ slope.numpy()).T + penalty * weight
        gradient = np.concatenate([of_weight.ravel(), slope.sum(dim=0).numpy()])
        return loss.item() + penalty / 2 * float(np.square(weight).sum()), gradient

    start = np.zeros(shape[0] * (shape[1] + 1))
    options = {"gtol": 1e-6, "ftol": 1e-6, "maxiter": TOKEN_ITERATIONS, "maxcor": 5}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    weight, bias = found.x[: -shape[0]].reshape(shape), found.x[-shape[0] :]
    return weight.astype(np.float32), bias.astype(np.float32)


def mix_logits(logits: Logits, found: OutOfFold, task: Task, labels: Labels) -> NDArray[np.float32]:
    """Return the weighted mean with a cross-validation's logits that has the lowest mean loss.

    Logits and labels are those of all rows, the cross-validation's of those before a test file's.
    """
    given = found.outputs.probabilities
    if given is None or list(found.task.class_names) != list(task.class_names):
        return logits
    chances = np.clip(given, LOWEST, 1 - LOWEST)
    own = np.log(chances) - (np.log1p(-chances) if task.problem_type == MULTI else 0)
    mixed = logits.copy()
    heads = logits[found.rows]
    mixes = [np.asarray((1 - one) * heads + one * own, np.float32) for one in RUN_WEIGHTS]
    means = [task.evaluation_losses(one, labels[found.rows]).mean() for one in mixes]
    mixed[found.rows] = mixes[int(np.argmin(means))]
    return mixed
