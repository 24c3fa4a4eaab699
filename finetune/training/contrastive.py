"""Supervised contrastive training: texts of one class are drawn together, others pushed apart.

Khosla et al. 2020, arXiv:2004.11362. The encoder is then interpolated with the pretrained one
(Wortsman et al. 2022, arXiv:2109.01903), and a linear head is fitted on its features.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from finetune.tokenization.buckets import Batch

# Twice as many steps give the same accuracy in twice the time, and temperatures of 0.05 and 0.2 are
# within two points. With 1.5 times the learning rate, few classes with 5 rows lose a point, and two
# with unlabeled texts (docs/measurements.md).
MIN_STEPS, MAX_STEPS = 50, 200
# Passes over all rows, if the number of steps is within its limits.
PASSES = 2
TEXTS_PER_STEP = 64
CLASSES_PER_STEP = 16
# Half of a random TREC batch is padding. In four parts by length, it is a sixth.
PARTS_PER_STEP = 4
TEMPERATURE = 0.1


@contextmanager
def bypass_output_layer(model: nn.Module, output_layer: str) -> Iterator[None]:
    """Make a classifier return the input of its output layer instead of logits."""
    module = model.get_submodule(output_layer)
    module.forward = nn.Identity().forward
    try:
        yield
    finally:
        del module.forward


def contrastive_losses(
    embeddings: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor
) -> torch.Tensor:
    """Return the loss of each example, from embeddings [examples, hidden] and classes.

    Examples of weight zero fill up the batch: no other example is drawn to them or pushed away.
    """
    # The mean is removed, because an activation may have shifted all values.
    unit = functional.normalize(embeddings - embeddings.mean(dim=1, keepdim=True), dim=1)
    is_itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
    is_left_out = is_itself | (loss_weights == 0)
    similarities = (unit @ unit.T / TEMPERATURE).masked_fill(is_left_out, -1e4)
    log_probabilities = similarities.log_softmax(dim=1)
    is_positive = (labels[:, None] == labels) & ~is_left_out
    losses = -(log_probabilities * is_positive).sum(dim=1)
    return losses / is_positive.sum(dim=1).clamp(min=1)


def count_steps(rows: int) -> int:
    """Return the number of steps for a table with this many rows."""
    return min(max(PASSES * rows // TEXTS_PER_STEP, MIN_STEPS), MAX_STEPS)


def plan_contrast(
    classes: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    padded_lengths: Sequence[int],
    is_padded_right: bool,
    steps: int,
    seed: int,
    epoch: int,
) -> list[Batch]:
    """Return the batches of all steps: a few texts of each of some classes.

    Classes are drawn evenly, whatever their number of rows. Rows of a class with too few come
    twice, with other dropout. Texts are sorted by length and go through the model in parts. The
    plan depends only on the arguments, so a resumed run continues at the same place.
    """
    random = np.random.default_rng([seed, epoch])
    padded = np.asarray(padded_lengths)[np.searchsorted(padded_lengths, lengths)]
    names = np.unique(classes)
    rows_of = [np.flatnonzero(classes == name) for name in names]
    count = min(CLASSES_PER_STEP, len(names))
    each = TEXTS_PER_STEP // count
    batches = []
    for _ in range(steps):
        chosen = random.choice(len(names), count, replace=False)
        chosen_rows = [rows_of[number] for number in chosen]
        indices = np.concatenate(
            [random.choice(rows, each, replace=len(rows) < each) for rows in chosen_rows]
        )
        indices = indices[np.argsort(-padded[indices], kind="stable")]
        parts = [
            (len(part), int(padded[part].max())) for part in np.array_split(indices, PARTS_PER_STEP)
        ]
        batches.append(Batch(indices, int(padded[indices].max()), parts if is_padded_right else ()))
    return batches


def trained_share(frozen_accuracy: float) -> float:
    """Return the weight of the trained parameters in the interpolation, in 0..1.

    Training harms features that already separate the classes well (docs/measurements.md).
    """
    return 1 - frozen_accuracy / 2


@torch.no_grad()
def interpolate(model: nn.Module, pretrained: Mapping[str, torch.Tensor], *, share: float) -> None:
    """Interpolate parameters towards earlier values; ``share`` is how much of the change stays."""
    for name, before in pretrained.items():
        parameter = model.get_parameter(name)
        parameter.copy_(torch.lerp(before.to(parameter.device), parameter, share))
