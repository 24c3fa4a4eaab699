"""Effective batches of examples that the model reads in several windows each."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import Device
from finetune.distributed.processes import ALONE, Processes
from finetune.tokenization.buckets import Batch
from finetune.tokenization.examples import Examples, Inputs, fill_batch
from finetune.tokenization.long_texts import AGGREGATIONS, Aggregation


@dataclass(frozen=True)
class WindowBatch:
    """Whole examples for one forward and backward; or one example, for several.

    Args:
        slices: Makes the model's inputs of successive windows, on the device, anew at each call.
        slice_sizes: Windows in each. There are several slices only of a single example that has
            more windows than fit.
        members: Which windows are of which example: bool of shape [examples, windows]. Those that
            fill up a slice are of none.
        aggregation: How the logits of an example's windows become its own.
        labels: int64 of shape [examples].
        shares: As those of a ``MicroBatch``.
        device: Where they are.
    """

    slices: Callable[[], Iterator[Inputs]]
    slice_sizes: list[int]
    members: torch.Tensor
    aggregation: Aggregation
    labels: torch.Tensor
    shares: torch.Tensor
    device: Device

    def pool(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the examples from those of the windows, both fp32."""
        return AGGREGATIONS[self.aggregation].of_batch(logits, self.members)


def cut_windows(
    examples: Examples,
    batch: Batch,
    batch_size: int,
    *,
    device: Device,
    processes: Processes = ALONE,
) -> Iterator[WindowBatch]:
    """Yield an effective batch in parts whose forwards take at most ``batch_size`` windows.

    Of several processes each yields its own share. Examples share a part if all their windows fit,
    so that a part is mostly one forward. The gradients of all parts add up to those of the
    undivided batch.
    """
    assert examples.windows is not None
    batch_size = max(batch_size, device.shapes.min_examples)
    indices, shares = share_loss(examples, batch.indices, processes)
    for part in _pack(examples.windows.counts[indices], batch_size=batch_size):
        yield _make_part(
            examples, replace(batch, indices=indices[part]), shares[part],
            batch_size=batch_size, device=device,
        )  # fmt: skip


def share_loss(
    examples: Examples, indices: NDArray[np.int64], processes: Processes
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return which examples of an effective batch are this process's, and their shares of its loss.

    Where it has none, as at a ragged end, it takes one that has no share: it gives gradients of
    zeros, as every process has to.
    """
    weights = examples.weights[indices]
    shares = (weights / weights.sum(dtype=np.float64)).astype(np.float32)
    own = processes.slice(len(indices))
    if len(indices[own]) == 0:
        return indices[:1], np.zeros(1, np.float32)
    return indices[own], shares[own]


def _pack(counts: NDArray[np.int64], *, batch_size: int) -> list[list[int]]:
    """Group examples by first fit, those with the most windows first."""
    parts: list[list[int]] = []
    room: list[int] = []
    for example in np.argsort(-counts, kind="stable").tolist():
        count = int(counts[example])
        at = next((at for at, left in enumerate(room) if left >= count), len(parts))
        if at == len(parts):
            parts.append([])
            room.append(batch_size)
        parts[at].append(example)
        room[at] -= count
    return parts


def _make_part(
    examples: Examples,
    part: Batch,
    shares: NDArray[np.float32],
    *,
    batch_size: int,
    device: Device,
) -> WindowBatch:
    assert examples.windows is not None
    owners = np.repeat(np.arange(len(part.indices)), examples.windows.counts[part.indices])
    windows = examples.sequences_of(part.indices)
    slice_count = math.ceil(len(windows) / batch_size)
    slices, owners_of_slices = (np.array_split(one, slice_count) for one in (windows, owners))
    if device.shapes.pads_batches:
        slices = [fill_batch(one, batch_size=batch_size) for one in slices]
        owners_of_slices = [
            np.pad(one, (0, batch_size - len(one)), constant_values=-1) for one in owners_of_slices
        ]
    members = np.concatenate(owners_of_slices) == np.arange(len(part.indices))[:, None]
    return WindowBatch(
        partial(_move_slices, examples, slices, part.padded_length, device),
        [len(one) for one in slices],
        device.copy(torch.from_numpy(members)),
        examples.windows.aggregation,
        labels=device.copy(torch.from_numpy(examples.labels[part.indices])),
        shares=device.copy(torch.from_numpy(shares)),
        device=device,
    )


def _move_slices(
    examples: Examples, slices: Sequence[NDArray[np.int64]], padded_length: int, device: Device
) -> Iterator[Inputs]:
    for windows in slices:
        inputs = examples.inputs_of(windows, padded_length)
        yield {name: device.copy(tensor) for name, tensor in inputs.items()}
