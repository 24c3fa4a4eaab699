"""Fit a linear head on features. The loss is convex, so its only minimum is found in seconds.

Features are centered and scaled to unit norm on average. This affects only the meaning of
``inverse_regularization``, which is ``C`` in scikit-learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

# The best value for TREC lies in this range, with 6 or 50 classes and 5 to 900 rows per class.
INVERSE_REGULARIZATIONS = (1.0, 10.0, 100.0)
# The best value on features of an encoder that was trained on the same rows.
DEFAULT_INVERSE_REGULARIZATION = 10.0
FOLDS = 5
# Multiplications in one pass over the rows. Above the first limit, cross-validation uses a sample.
# Above the second, even the smallest sample that folds need is too slow: the default is used.
MAX_WORK, MAX_FOLD_WORK = 2e7, 2e8
# Less work than this is faster in one thread, much faster if other programs use the cores.
MIN_THREADED_WORK = 1e7
# A fit ends at this gradient norm of the penalized mean loss. Cross-validation ends earlier.
FITTED_GRADIENT, TRIED_GRADIENT = 1e-5, 5e-4
MAX_ITERATIONS = 1_000
# Larger feature arrays are fitted in fp32.
MAX_DOUBLES = 5e7


@dataclass(frozen=True)
class LabelledFeatures:
    """Rows to fit a head on, with the loss of each from logits [rows, outputs] and labels."""

    features: NDArray[np.float32]  # [rows, hidden]
    labels: NDArray[Any]  # [rows, ...]
    weights: NDArray[np.float32]  # weight of each row in the loss
    losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    outputs: int
    groups: NDArray[np.int64]  # strata of the folds, such as the class of each row

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
    inverse_regularization: float,
    max_gradient: float = FITTED_GRADIENT,
    start: LinearHead | None = None,
) -> LinearHead:
    """Minimize the mean loss plus ``|weight|² / (2 * inverse_regularization * rows)``.

    ``start`` must have been fitted on the same rows, so that no other labels leak in.
    """
    # In place, since a copy of a large table's features may take gigabytes.
    is_exact = max_gradient <= FITTED_GRADIENT and rows.features.size <= MAX_DOUBLES
    dtype = torch.float64 if is_exact else torch.float32
    features = torch.tensor(rows.features, dtype=dtype)
    center = features.mean(dim=0)
    features -= center
    scale = torch.linalg.vector_norm(features).div(len(features) ** 0.5).clamp(min=1e-12)
    features /= scale
    labels = torch.tensor(rows.labels)
    weights = torch.from_numpy(rows.weights).to(dtype)
    weights = weights / weights.sum()
    penalty = 1 / (inverse_regularization * len(features))
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
        bias = start.bias + start.weight @ center.numpy()
        first = np.concatenate([(start.weight * scale.item()).ravel(), bias])
    threads = torch.get_num_threads()
    if features.numel() * rows.outputs < MIN_THREADED_WORK:
        torch.set_num_threads(1)
    try:
        optimum = minimize(
            objective,
            first,
            jac=True,
            method="L-BFGS-B",
            options={"gtol": max_gradient, "ftol": 0.0, "maxiter": MAX_ITERATIONS, "maxcor": 20},
        )
    finally:
        torch.set_num_threads(threads)
    weight = optimum.x[: -shape[0]].reshape(shape) / scale.item()
    bias = optimum.x[-shape[0] :] - weight @ center.numpy()
    return LinearHead(weight, bias, float(optimum.fun))


def choose_inverse_regularization(
    rows: LabelledFeatures, *, seed: int
) -> tuple[float, NDArray[np.float32] | None]:
    """Return the value with the lowest cross-validated loss, or the default for many classes.

    The second item is the cross-validated logits, or None if only a sample of rows was used.
    """
    work = rows.features.size * rows.outputs
    if min(work, FOLDS * rows.outputs**2 * rows.features.shape[1]) > MAX_FOLD_WORK:
        return DEFAULT_INVERSE_REGULARIZATION, None
    compared = rows
    if work > MAX_WORK:
        count = max(int(len(rows.labels) * MAX_WORK / work), FOLDS * rows.outputs)
        order = np.random.default_rng(seed).permutation(len(rows.labels))
        compared = rows.select(np.sort(order[:count]))
    logits = cross_validate(compared, INVERSE_REGULARIZATIONS, seed=seed)
    best = min(INVERSE_REGULARIZATIONS, key=lambda value: _mean_loss(compared, logits[value]))
    return best, logits[best] if compared is rows else None


def cross_validate(
    rows: LabelledFeatures, candidates: Sequence[float], *, seed: int
) -> dict[float, NDArray[np.float32]]:
    """Return the logits of each row from a head fitted without that row: [rows, outputs].

    Keys are the candidates for ``inverse_regularization``.
    """
    shape = (len(rows.labels), rows.outputs)
    logits = {candidate: np.empty(shape, np.float32) for candidate in candidates}
    # With many classes, each has a small gradient even before anything is fitted.
    max_gradient = min(TRIED_GRADIENT, 0.02 / rows.outputs)
    for test in folds(rows.groups, seed=seed):
        training, head = rows.select(np.setdiff1d(np.arange(len(rows.labels)), test)), None
        for candidate in candidates:
            head = fit_linear_head(
                training, inverse_regularization=candidate, max_gradient=max_gradient, start=head
            )
            logits[candidate][test] = head.logits(rows.features[test])
    return logits


def folds(groups: NDArray[np.int64], *, seed: int) -> Sequence[NDArray[np.int64]]:
    """Return the rows of each fold, stratified by group."""
    order = np.random.default_rng(seed).permutation(len(groups))
    by_group = order[np.argsort(groups[order], kind="stable")]
    return [by_group[first::FOLDS] for first in range(min(FOLDS, len(groups)))]


def _mean_loss(rows: LabelledFeatures, logits: NDArray[np.float32]) -> float:
    losses = rows.losses(torch.from_numpy(logits), torch.tensor(rows.labels))
    return float(np.average(losses.numpy(), weights=rows.weights))
