"""Gradient accumulation: effective batches, split into micro-batches that fit on the device.

Each loss is weighted relative to the whole effective batch. So the gradients of the micro-batches
add up to the gradient of the effective batch, however it is split.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed
from finetune.devices.base import Device
from finetune.tokenization.examples import Batch, Examples, Inputs, fill_batch


@dataclass(frozen=True)
class MicroBatch:
    """Examples for one forward and backward pass, on the device.

    Labels have shape [examples, ...]. The loss weights, float32 of shape [examples], add up to 1
    over all micro-batches of a step. If the examples have windows, the rows of ``inputs`` are
    windows, and ``members``, bool of shape [examples, windows], maps them to examples. Windows that
    fill up a part belong to no example. ``parts`` has the rows and the padded lengths of parts with
    less padding, or of slices of a single example that has more windows than fit.
    """

    inputs: Inputs
    labels: torch.Tensor
    loss_weights: torch.Tensor
    parts: Sequence[tuple[int, int]] = ()
    members: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, for ``from_tensors``."""
        return {**self.inputs, "labels": self.labels, "loss_weights": self.loss_weights}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> "MicroBatch":
        """Create a micro-batch from ``tensors``."""
        inputs = dict(tensors)
        labels, loss_weights = inputs.pop("labels"), inputs.pop("loss_weights")
        return cls(inputs, labels, loss_weights)

    def slices(self) -> Iterator[Inputs]:
        """Yield the model inputs, as one batch or in parts."""
        if not self.parts:
            yield self.inputs
        start = 0
        for examples, tokens in self.parts:
            rows = slice(start, start + examples)
            yield {
                name: tensor[rows, :tokens] if tensor.ndim < 4 else tensor[rows, ..., :tokens]
                for name, tensor in self.inputs.items()
            }
            start += examples

    def aggregate(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the examples or, with windows, their means, in fp32."""
        if self.members is None:
            return logits
        return (self.members / self.members.sum(1, keepdim=True)) @ logits

    def select(self, rows: slice) -> "MicroBatch":
        """Return a slice of the examples, as views."""
        inputs = {name: tensor[rows] for name, tensor in self.inputs.items()}
        labels = self.labels[rows]
        parts = self.parts if len(labels) == len(self.labels) else ()
        return MicroBatch(inputs, labels, self.loss_weights[rows], parts)


def move_batches(
    examples: Examples, batches: Sequence[Batch], *, device: Device
) -> Iterator[tuple[Batch, Callable[[int], Iterator[MicroBatch]]]]:
    """Yield each effective batch with a function that splits this process's share.

    The function takes a batch size, in examples or windows, and moves micro-batches to the device.
    """
    if examples.windows:
        for batch in batches:
            yield batch, partial(_cut_windows, examples, batch, device)
        return
    tokens = [len(batch.indices) * batch.padded_length for batch in batches]
    for group in _group(tokens, limit=device.prefetch_tokens):
        together = [batches[number] for number in group]
        # The batch size changes only after running out of memory.
        moved = lru_cache(maxsize=1)(partial(_move_together, examples, together, device))
        for position, batch in enumerate(together):
            yield batch, partial(_cut, moved, position, device.shapes.min_examples)


def _cut(
    moved: Callable[[int], list[MicroBatch]], position: int, min_examples: int, batch_size: int
) -> Iterator[MicroBatch]:
    batch_size = max(batch_size, min_examples)
    whole = moved(batch_size)[position]
    for start in range(0, len(whole.labels), batch_size):
        yield whole.select(slice(start, start + batch_size))


def cut_batch(
    examples: Examples, batch: Batch, *, batch_size: int, device: Device
) -> Iterator[MicroBatch]:
    """Yield one effective batch as micro-batches on the device."""
    [(_, cut)] = move_batches(examples, [batch], device=device)
    return cut(batch_size)


def _group(sizes: Sequence[int], *, limit: int) -> Iterator[list[int]]:
    """Yield groups of successive indices, each with a total size up to the limit, or one index."""
    group: list[int] = []
    free = limit
    for number, size in enumerate(sizes):
        if group and size > free:
            yield group
            group, free = [], limit
        group.append(number)
        free -= size
    if group:
        yield group


def _move_together(
    examples: Examples, batches: Sequence[Batch], device: Device, batch_size: int
) -> list[MicroBatch]:
    """Copy batches of equal padded length at once, because each copy is a kernel launch."""
    by_length = defaultdict[int, list[int]](list)
    for position, batch in enumerate(batches):
        by_length[batch.padded_length].append(position)
    moved: dict[int, MicroBatch] = {}
    for padded_length, positions in by_length.items():
        multiple = batch_size if device.shapes.pads_batches else 1
        weighted = [
            _weigh(examples, batches[position].indices, multiple=multiple) for position in positions
        ]
        indices, loss_weights = map(np.concatenate, zip(*weighted, strict=True))
        inputs = examples.inputs_of(indices, padded_length)
        together = _move(inputs, examples.labels[indices], loss_weights, device)
        end = 0
        for position, (batch_indices, _) in zip(positions, weighted, strict=True):
            start, end = end, end + len(batch_indices)
            rows = together.select(slice(start, end))
            moved[position] = replace(rows, parts=batches[position].parts)
    return [moved[position] for position in range(len(batches))]


def _weigh(
    examples: Examples, indices: NDArray[np.int64], *, multiple: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return this process's examples in an effective batch, and their loss weights.

    Examples of weight zero pad them to a multiple. A process without examples, at the end of an
    epoch, gets an example of weight zero, because it must compute gradients.
    """
    weights = examples.weights[indices]
    loss_weights = (weights / weights.sum(dtype=np.float64)).astype(np.float32)
    share = distributed.share(len(indices))
    if len(indices[share]) == 0:
        indices, loss_weights = indices[:1], np.zeros(1, np.float32)
    else:
        indices, loss_weights = indices[share], loss_weights[share]
    missing = -len(indices) % multiple
    indices = fill_batch(indices, batch_size=len(indices) + missing)
    return indices, np.pad(loss_weights, (0, missing))


def _move(
    inputs: Inputs,
    labels: NDArray[Any],
    loss_weights: NDArray[np.float32],
    device: Device,
    **windows: Any,
) -> MicroBatch:
    """Copy examples to a device."""
    return MicroBatch(
        {name: device.copy(tensor) for name, tensor in inputs.items()},
        device.copy(torch.from_numpy(labels)),
        device.copy(torch.from_numpy(loss_weights)),
        **windows,
    )


def _cut_windows(
    examples: Examples, batch: Batch, device: Device, batch_size: int
) -> Iterator[MicroBatch]:
    """Yield micro-batches of whole examples, with at most ``batch_size`` windows per forward."""
    assert examples.windows is not None
    batch_size = max(batch_size, device.shapes.min_examples)
    all_indices, all_weights = _weigh(examples, batch.indices)
    # Texts with the most windows come first, to fill the groups as much as possible.
    order = np.argsort(-examples.windows.counts[all_indices], kind="stable")
    counts = examples.windows.counts[all_indices[order]].tolist()
    for group in _group(counts, limit=batch_size):
        chosen = order[group]
        indices = all_indices[chosen]
        windows = examples.sequences_of(indices)
        owners = np.repeat(np.arange(len(indices)), examples.windows.counts[indices])
        count = math.ceil(len(windows) / batch_size)
        slices, slice_owners = np.array_split(windows, count), np.array_split(owners, count)
        if device.shapes.counts_evaluation:  # CUDA captures no steps with windows
            slices = [fill_batch(rows, batch_size=batch_size) for rows in slices]
            slice_owners = [
                np.pad(rows, (0, batch_size - len(rows)), constant_values=-1)
                for rows in slice_owners
            ]
        members = np.concatenate(slice_owners) == np.arange(len(indices))[:, None]
        inputs = examples.inputs_of(np.concatenate(slices), batch.padded_length)
        parts = [(len(rows), batch.padded_length) for rows in slices] if count > 1 else ()
        windows_of = {"parts": parts, "members": device.copy(torch.from_numpy(members))}
        yield _move(inputs, examples.labels[indices], all_weights[chosen], device, **windows_of)
