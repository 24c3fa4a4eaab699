"""An effective batch, cut into the pieces that go through the device one after another."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.tokenization.buckets import Batch
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward and backward, on the device.

    Args:
        inputs: Keyword arguments of the model.
        labels: int64 of shape [rows].
        shares: Each row's share of the update's loss, float32 of shape [rows]; over all
            micro-batches of an update they add up to 1.
    """

    inputs: Inputs
    labels: torch.Tensor
    shares: torch.Tensor


def cut_batch(
    examples: Examples,
    batch: Batch,
    *,
    batch_size: int,
    pads_batches: bool,
    torch_device: torch.device,
) -> Iterator[MicroBatch]:
    """Yield an effective batch as contiguous slices of at most ``batch_size`` rows.

    All have the batch's width, and a row's share of the loss is its weight over the weight of the
    whole batch: the gradients add up to those of the undivided batch, whatever the slices.

    Args:
        examples: The split that the rows belong to.
        batch: The effective batch.
        batch_size: Rows in a slice.
        pads_batches: Fill a smaller last slice up with rows that have no share.
        torch_device: Where the tensors go.
    """
    rows = batch.indices
    shares = examples.weights[rows] / examples.weights[rows].sum(dtype=np.float64)
    if pads_batches:
        full = math.ceil(len(rows) / batch_size) * batch_size
        shares = np.pad(shares, (0, full - len(rows)))
        rows = fill_batch(rows, batch_size=full)
    # The batch moves at once and is cut on the device: each copy from pageable memory waits.
    inputs = {
        name: tensor.to(torch_device)
        for name, tensor in examples.inputs_of(rows, batch.padded_length).items()
    }
    labels = torch.from_numpy(examples.labels[rows]).to(torch_device)
    shares_there = torch.from_numpy(shares.astype(np.float32)).to(torch_device)
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        yield MicroBatch(
            inputs={name: tensor[part] for name, tensor in inputs.items()},
            labels=labels[part],
            shares=shares_there[part],
        )


def balanced_class_weights(labels: NDArray[np.int64], *, classes: int) -> NDArray[np.float32]:
    """Return a weight a class that gives every class the same say: rows / (classes × its rows).

    Args:
        labels: int64 of shape [rows].
        classes: How many there are; one without rows gets weight 0.

    >>> balanced_class_weights(np.array([0, 0, 0, 1]), classes=2).tolist()
    [0.6666666865348816, 2.0]
    """
    counts = np.bincount(labels, minlength=classes)
    present = np.count_nonzero(counts)
    weights = np.divide(len(labels), present * counts, where=counts > 0, out=np.zeros(classes))
    return np.asarray(weights, np.float32)


def row_weights(
    labels: NDArray[np.int64], class_weights: Sequence[float] | NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return each row's weight from its class's."""
    weights: NDArray[np.float32] = np.asarray(class_weights, np.float32)[labels]
    return weights
