"""Gradient accumulation: an effective batch, cut into slices that go through the device."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from finetune.devices.base import Device
from finetune.tokenization.buckets import Batch
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs


@dataclass(frozen=True)
class MicroBatch:
    """Examples for one forward and backward, on the device.

    Args:
        inputs: Keyword arguments of the model.
        labels: int64 of shape [examples].
        shares: Each example's share of the update's loss, float32 of shape [examples]; over all
            micro-batches of an update they add up to 1.
    """

    inputs: Inputs
    labels: torch.Tensor
    shares: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, as ``from_tensors`` takes them."""
        return {**self.inputs, "labels": self.labels, "shares": self.shares}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "MicroBatch":
        """Return the micro-batch of tensors that ``tensors`` returned."""
        inputs = dict(tensors)
        return cls(labels=inputs.pop("labels"), shares=inputs.pop("shares"), inputs=inputs)


def cut_batch(
    examples: Examples, batch: Batch, *, batch_size: int, device: Device
) -> Iterator[MicroBatch]:
    """Yield an effective batch as contiguous slices of at most ``batch_size`` examples.

    All have the batch's padded length, and an example's share of the loss is its weight over the
    weight of the whole batch: the gradients add up to those of the undivided batch, whatever the
    slices. Where the device pads batches, a smaller last slice is filled up with examples that have
    no share.

    Args:
        examples: The split that the batch belongs to.
        batch: The effective batch.
        batch_size: Examples in a slice.
        device: Where the tensors go.
    """
    batch_size = max(batch_size, device.shapes.min_examples)
    indices = batch.indices
    shares = examples.weights[indices] / examples.weights[indices].sum(dtype=np.float64)
    if device.shapes.pads_batches:
        full = math.ceil(len(indices) / batch_size) * batch_size
        shares = np.pad(shares, (0, full - len(indices)))
        indices = fill_batch(indices, batch_size=full)
    # The batch moves at once and is cut on the device: a copy may wait for it.
    inputs = {
        name: device.copy(tensor)
        for name, tensor in examples.inputs_of(indices, batch.padded_length).items()
    }
    labels = device.copy(torch.from_numpy(examples.labels[indices]))
    shares_there = device.copy(torch.from_numpy(shares.astype(np.float32)))
    for start in range(0, len(indices), batch_size):
        part = slice(start, start + batch_size)
        yield MicroBatch(
            inputs={name: tensor[part] for name, tensor in inputs.items()},
            labels=labels[part],
            shares=shares_there[part],
        )
