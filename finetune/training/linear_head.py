"""A linear head fitted on features: the loss is convex, so it has one best, found in seconds.

Features are centred and scaled to unit norm on average, which changes nothing but the meaning of
the strength of the L2 penalty: scikit-learn's ``C``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

# Between them, TREC's coarse and fine classes at 5 to 900 rows a class have their best.
STRENGTHS = (1.0, 10.0, 100.0)
# The best of them on features of an encoder that was trained on the same rows.
DEFAULT_STRENGTH = 10.0
FOLDS = 5
# Multiplications of one pass over the rows, above which strengths are compared on fewer rows; and
# above which, with as few rows as folds need, they are not compared.
MAX_WORK, MAX_WORK_OF_FOLDS = 2e7, 2e8
# Less work is quicker in one thread, much quicker where other programs use the cores.
MIN_WORK_OF_THREADS = 1e7
# Of the penalized mean loss, for features of unit norm; a trial need not be exact.
FITTED_GRADIENT, TRIED_GRADIENT = 1e-5, 5e-4
MAX_ITERATIONS = 1_000
# Features of more numbers are fitted in fp32.
MAX_DOUBLES = 5e7


@dataclass(frozen=True)
class LabelledFeatures:
    """Rows to fit a head on, with the loss of each from logits [rows, outputs] and labels."""

    features: NDArray[np.float32]  # [rows, hidden]
    labels: NDArray[Any]  # [rows, ...]
    weights: NDArray[np.float32]  # what each row counts in the loss
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    outputs: int
    groups: NDArray[np.int64]  # what folds are balanced over, such as the class of each row

    def select(self, rows: NDArray[np.int64]) -> "LabelledFeatures":
        """Return some of the rows."""
        arrays = ("features", "labels", "weights", "groups")
        return replace(self, **{name: getattr(self, name)[rows] for name in arrays})


@dataclass(frozen=True)
class LinearHead:
    """A fitted linear head: ``weight`` is float64 [outputs, hidden], ``bias`` [outputs]."""

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]
    loss: float

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of features: float32 of shape [rows, outputs]."""
        return np.asarray(features @ self.weight.T + self.bias, np.float32)


def fit_linear_head(
    rows: LabelledFeatures,
    *,
    strength: float,
    max_gradient: float = FITTED_GRADIENT,
    start: LinearHead | None = None,
) -> LinearHead:
    """Minimize the mean loss with an L2 penalty of ``1 / (strength * rows)`` on the weight.

    A ``start`` may only come from the same rows: from others it would bring what they have taught.
    """
    # In place, since a copy of a large table's features may take gigabytes.
    is_exact = max_gradient <= FITTED_GRADIENT and rows.features.size <= MAX_DOUBLES
    dtype = torch.float64 if is_exact else torch.float32
    features = torch.tensor(rows.features, dtype=dtype)
    centre = features.mean(dim=0)
    features -= centre
    scale = torch.linalg.vector_norm(features).div(len(features) ** 0.5).clamp(min=1e-12)
    features /= scale
    labels = torch.tensor(rows.labels)
    weights = torch.from_numpy(rows.weights).to(dtype)
    weights = weights / weights.sum()
    penalty = 1 / (strength * len(features))
    shape = (rows.outputs, features.shape[1])

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        parameters = torch.from_numpy(flat).to(dtype).requires_grad_()
        weight, bias = parameters[: -shape[0]].view(shape), parameters[-shape[0] :]
        losses = rows.losses(features @ weight.T + bias, labels)
        loss = (losses * weights).sum() + penalty / 2 * weight.square().sum()
        [gradient] = torch.autograd.grad(loss, [parameters])
        return loss.item(), gradient.double().numpy()

    first = np.zeros(shape[0] * (shape[1] + 1))
    if start is not None:
        bias = start.bias + start.weight @ centre.numpy()
        first = np.concatenate([(start.weight * scale.item()).ravel(), bias])
    threads = torch.get_num_threads()
    if features.numel() * rows.outputs < MIN_WORK_OF_THREADS:
        torch.set_num_threads(1)
    try:
        found = minimize(
            objective,
            first,
            jac=True,
            method="L-BFGS-B",
            options={"gtol": max_gradient, "ftol": 0.0, "maxiter": MAX_ITERATIONS, "maxcor": 20},
        )
    finally:
        torch.set_num_threads(threads)
    weight = found.x[: -shape[0]].reshape(shape) / scale.item()
    bias = found.x[-shape[0] :] - weight @ centre.numpy()
    return LinearHead(weight, bias, float(found.fun))


def choose_strength(
    rows: LabelledFeatures, *, seed: int
) -> tuple[float, NDArray[np.float32] | None]:
    """Return the strength with the lowest cross-validated loss, or the default of many classes.

    The logits beside it are those of ``cross_validate``, unless fewer rows were enough to choose.
    """
    work = rows.features.size * rows.outputs
    if min(work, FOLDS * rows.outputs**2 * rows.features.shape[1]) > MAX_WORK_OF_FOLDS:
        return DEFAULT_STRENGTH, None
    compared = rows
    if work > MAX_WORK:
        count = max(int(len(rows.labels) * MAX_WORK / work), FOLDS * rows.outputs)
        order = np.random.default_rng(seed).permutation(len(rows.labels))
        compared = rows.select(np.sort(order[:count]))
    logits = cross_validate(compared, STRENGTHS, seed=seed)
    best = min(STRENGTHS, key=lambda one: _mean_loss(compared, logits[one]))
    return best, logits[best] if compared is rows else None


def cross_validate(
    rows: LabelledFeatures, strengths: Sequence[float], *, seed: int
) -> dict[float, NDArray[np.float32]]:
    """Return, by strength, the logits of each row by a head fitted without it: [rows, outputs]."""
    shape = (len(rows.labels), rows.outputs)
    logits = {strength: np.empty(shape, np.float32) for strength in strengths}
    # Of many classes each has a small gradient, even where nothing is fitted yet.
    max_gradient = min(TRIED_GRADIENT, 0.02 / rows.outputs)
    for test in folds(rows.groups, seed=seed):
        training, head = rows.select(np.setdiff1d(np.arange(len(rows.labels)), test)), None
        for strength in strengths:
            head = fit_linear_head(
                training, strength=strength, max_gradient=max_gradient, start=head
            )
            logits[strength][test] = head.logits(rows.features[test])
    return logits


def folds(groups: NDArray[np.int64], *, seed: int) -> Sequence[NDArray[np.int64]]:
    """Return the rows of each fold, with as many of each group as of any other fold."""
    order = np.random.default_rng(seed).permutation(len(groups))
    by_group = order[np.argsort(groups[order], kind="stable")]
    return [by_group[first::FOLDS] for first in range(min(FOLDS, len(groups)))]


def _mean_loss(rows: LabelledFeatures, logits: NDArray[np.float32]) -> float:
    losses = rows.losses(torch.from_numpy(logits), torch.tensor(rows.labels))
    return float(np.average(losses.numpy(), weights=rows.weights))
