"""Gradient accumulation: an effective batch, cut into slices that go through the device."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import Device
from finetune.distributed.processes import ALONE, Processes
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples, Inputs, fill_batch
from finetune.training.windows import WindowBatch, cut_windows, share_loss


@dataclass(frozen=True)
class MicroBatch:
    """Examples for one forward and backward, on the device.

    Args:
        inputs: Keyword arguments of the model.
        labels: As the task's loss reads them: of shape [examples, ...].
        shares: Each example's share of the step's loss, float32 of shape [examples]; over all
            micro-batches of a step they add up to 1.
    """

    inputs: Inputs
    labels: torch.Tensor
    shares: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, as ``from_tensors`` takes them."""
        return {**self.inputs, "labels": self.labels, "shares": self.shares}

    def slices(self) -> Iterator[Inputs]:
        """Yield the inputs of the model, all at once."""
        yield self.inputs

    def pool(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the examples: each is read at once."""
        return logits

    def part(self, rows: slice) -> "MicroBatch":
        """Return some of the examples, as views."""
        return MicroBatch(
            inputs={name: tensor[rows] for name, tensor in self.inputs.items()},
            labels=self.labels[rows],
            shares=self.shares[rows],
        )

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "MicroBatch":
        """Return the micro-batch of tensors that ``tensors`` returned."""
        inputs = dict(tensors)
        return cls(labels=inputs.pop("labels"), shares=inputs.pop("shares"), inputs=inputs)


# Of both a step has one or more.
StepPart = MicroBatch | WindowBatch


class MovedBatches:
    """Effective batches that move to the device together: each copy is a launch.

    All slices of a batch have its padded length, and an example's share of the loss is its weight
    over the weight of the whole batch: the gradients add up to those of the undivided batch,
    whatever the slices. Where the device pads batches, a smaller last slice is filled up with
    examples that have no share.
    """

    def __init__(
        self,
        examples: Examples,
        batches: Sequence[Batch],
        *,
        device: Device,
        processes: Processes = ALONE,
    ) -> None:
        self._examples, self._batches, self._device = examples, batches, device
        self._processes = processes
        self._batch_size = 0
        self._moved: list[MicroBatch] = []

    def cut(self, position: int, batch_size: int) -> Iterator[MicroBatch]:
        """Yield one of the batches as contiguous slices of at most ``batch_size`` examples.

        The first call moves all of them. Memory may run out here.
        """
        batch_size = max(batch_size, self._device.shapes.min_examples)
        if batch_size != self._batch_size:
            self._moved = self._move(batch_size)
            self._batch_size = batch_size
        whole = self._moved[position]
        for start in range(0, len(whole.labels), batch_size):
            yield whole.part(slice(start, start + batch_size))

    def _move(self, batch_size: int) -> list[MicroBatch]:
        moved: dict[int, MicroBatch] = {}
        lengths = [batch.padded_length for batch in self._batches]
        for padded_length in set(lengths):
            positions = [at for at, length in enumerate(lengths) if length == padded_length]
            filled = [self._fill(self._batches[at], batch_size) for at in positions]
            together = self._together(filled, padded_length)
            start = 0
            for at, (indices, _) in zip(positions, filled, strict=True):
                moved[at] = together.part(slice(start, start + len(indices)))
                start += len(indices)
        return [moved[at] for at in range(len(lengths))]

    def _fill(self, batch: Batch, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return a batch's indices and shares, filled up where the device pads batches."""
        indices, shares = share_loss(self._examples, batch.indices, self._processes)
        if self._device.shapes.pads_batches:
            full = math.ceil(len(indices) / batch_size) * batch_size
            shares = np.pad(shares, (0, full - len(indices)))
            indices = fill_batch(indices, batch_size=full)
        return indices, shares

    def _together(
        self,
        filled: Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]],
        padded_length: int,
    ) -> MicroBatch:
        indices = np.concatenate([each for each, _ in filled])
        shares = np.concatenate([each for _, each in filled])
        inputs = self._examples.inputs_of(indices, padded_length)
        return MicroBatch(
            inputs={name: self._device.copy(tensor) for name, tensor in inputs.items()},
            labels=self._device.copy(torch.from_numpy(self._examples.labels[indices])),
            shares=self._device.copy(torch.from_numpy(shares)),
        )


def move_batches(
    examples: Examples,
    batches: Sequence[Batch],
    *,
    device: Device,
    processes: Processes = ALONE,
) -> Iterator[tuple[Batch, Callable[[int], Iterator[StepPart]]]]:
    """Yield each effective batch with what cuts this process's share of it.

    It is cut into slices of at most so many examples.
    """
    if examples.windows:
        for batch in batches:
            yield batch, partial(cut_windows, examples, batch, device=device, processes=processes)
        return
    for pieces in _pieces(batches, tokens=device.prefetch_tokens):
        moved = MovedBatches(examples, pieces, device=device, processes=processes)
        for position, batch in enumerate(pieces):
            yield batch, partial(moved.cut, position)


def _pieces(batches: Sequence[Batch], *, tokens: int) -> Iterator[Sequence[Batch]]:
    """Yield successive batches of at most so many tokens, or one."""
    piece: list[Batch] = []
    left = tokens
    for batch in batches:
        size = len(batch.indices) * batch.padded_length
        if piece and size > left:
            yield piece
            piece, left = [], tokens
        piece.append(batch)
        left -= size
    if piece:
        yield piece


def cut_batch(
    examples: Examples, batch: Batch, *, batch_size: int, device: Device
) -> Iterator[StepPart]:
    """Yield an effective batch as slices on the device, as ``MovedBatches.cut`` does."""
    if examples.windows:
        return cut_windows(examples, batch, batch_size, device=device)
    return MovedBatches(examples, [batch], device=device).cut(0, batch_size)
