"""The features of whole splits: computed by the frozen layers, or read from the store."""

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import events
from finetune.devices import host_memory
from finetune.devices.base import Device
from finetune.devices.precision import autocast
from finetune.events import Advance, Emit, Stage
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.feature_store import FeatureStore, key_of
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs

PROGRESS_EVENTS = 10
BYTES_A_NUMBER = 4
# Of the free memory, what features may take that can't be written to the store.
MEMORY_SHARE = 0.25

Notes = Mapping[str, str | int]


class FeaturesDoNotFit(Exception):
    """Neither the disk of the store nor the memory has room for the features."""


@dataclass(frozen=True)
class FrozenLayers:
    """The frozen layers of a model on their device; ``key`` is that of ``key_of_frozen_layers``."""

    extractor: FeatureExtractor
    key: str
    device: Device
    precision: str
    takes_4d_mask: bool

    def features(self, inputs: Inputs) -> torch.Tensor:
        """Return the features of a batch, given on the CPU, on the device."""
        there = {name: one.to(self.device.torch_device) for name, one in inputs.items()}
        with autocast(self.device, precision=self.precision):
            return self.extractor.extract(there)

    def size_bytes(self, examples: Examples) -> int:
        """Return the size of a split's features."""
        return math.prod(self.shape(examples)) * BYTES_A_NUMBER

    def shape(self, examples: Examples) -> tuple[int, int]:
        """Return the shape of a split's features: [tokens or texts, hidden]."""
        per_token = self.extractor.per_token
        vectors = examples.lengths.sum() if per_token else len(examples.lengths)
        return int(vectors), self.extractor.hidden_size


def key_of_frozen_layers(extractor: FeatureExtractor, *, device: Device, precision: str) -> str:
    """Return a key of all that features depend on but the inputs; the model is on the CPU."""
    # The names of the classes and of the folder change nothing.
    config = {**extractor.model.config.to_dict(), "id2label": 0, "label2id": 0, "_name_or_path": 0}
    ingredients = [
        f"split at {extractor.split_at}",
        f"precision {precision}",
        f"device {device.name} {device.description}",
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "finetune-mps")),
        f"config {sorted(config.items(), key=lambda item: item[0])}",
    ]
    tensors = (part for name_and_tensor in extractor.frozen_tensors() for part in name_and_tensor)
    return key_of((*ingredients, *tensors))


def with_features(
    examples: Examples,
    layers: FrozenLayers,
    store: FeatureStore,
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    notes: Notes,
    emit: Emit,
) -> Examples:
    """Return a split with features for inputs; ``notes`` go to the list of the store.

    Raises:
        FeaturesDoNotFit: If there is no room for them, neither on the disk nor in memory.
    """
    # The last bits of a text's features depend on its batch, so that the same texts always come in
    # the same batches.
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths
    )
    extraction = _Extraction(examples, layers, batches, batch_size, emit)
    what = f"features of the frozen layers for {len(examples.labels):,} {notes['split']} rows"
    key = key_of(extraction.key_parts())
    lines = store.read(key, emit=emit)
    if lines is None:
        emit(Stage(f"computing {what}"))
        lines = _compute(extraction, store, key=key, notes=notes)
    else:
        emit(Stage(f"reusing {what}"))
    reader = _Reader(examples, lines, np.concatenate([batch.indices for batch in batches]))
    if layers.extractor.per_token:
        return replace(examples, inputs_of=reader.token_inputs)
    return replace(
        examples,
        inputs_of=lambda indices, _: pooled_inputs(
            reader.pooled(indices), takes_4d_mask=layers.takes_4d_mask
        ),
    )


@dataclass(frozen=True)
class _Extraction:
    """One pass of the frozen layers over a split."""

    examples: Examples
    layers: FrozenLayers
    batches: Sequence[Batch]
    batch_size: int
    emit: Emit

    def key_parts(self) -> Iterator[str | torch.Tensor]:
        yield self.layers.key
        for batch in self.batches:
            inputs = self._inputs(batch)
            for name in sorted(inputs):
                yield name
                yield inputs[name]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield each batch's features without padding, on the CPU."""
        step = math.ceil(len(self.batches) / PROGRESS_EVENTS)
        done = 0
        for number, batch in enumerate(self.batches, start=1):
            inputs = self._inputs(batch)
            count = len(batch.indices)
            features = self.layers.features(inputs)[:count].cpu()
            if self.layers.extractor.per_token:
                mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
                features = features[mask.bool()]
            yield features
            done += count
            if number % step == 0 or number == len(self.batches):
                self.emit(Advance(done, len(self.examples.labels)))

    def _inputs(self, batch: Batch) -> Inputs:
        indices = batch.indices
        if self.layers.device.shapes.pads_batches:
            indices = fill_batch(indices, batch_size=self.batch_size)
        return self.examples.inputs_of(indices, batch.padded_length)


def _compute(
    extraction: _Extraction, store: FeatureStore, *, key: str, notes: Notes
) -> torch.Tensor:
    """Compute features and keep them in the store, or in memory if it can't be written."""
    examples, layers = extraction.examples, extraction.layers
    size_bytes = layers.size_bytes(examples)
    try:
        if not store.would_fit(size_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return store.write(key, extraction.pieces(), shape=layers.shape(examples), notes=notes)
    except OSError as error:
        if size_bytes > MEMORY_SHARE * host_memory.spare_bytes():
            raise FeaturesDoNotFit from error
        extraction.emit(
            events.WarningMessage(
                f"features can't be written to {store.folder} ({error.strerror}): they stay "
                "in memory",
                remedy="make room with finetune cache clear, or name a folder with --cache-dir",
            )
        )
        return torch.cat(list(extraction.pieces()))


class _Reader:
    """Reads the features of single examples out of those of a split.

    Args:
        lines: Features of the split, [tokens or texts, hidden], in the order of their computation.
        order: That order: int64 of shape [examples].
    """

    def __init__(self, examples: Examples, lines: torch.Tensor, order: NDArray[np.int64]) -> None:
        self._examples, self._lines = examples, lines
        self._line_of_example = np.argsort(order)
        self._starts = np.empty_like(order)
        self._starts[order] = np.cumsum(examples.lengths[order]) - examples.lengths[order]

    def pooled(self, indices: NDArray[np.int64]) -> torch.Tensor:
        """Return one vector for each example: [examples, hidden]."""
        return self._lines[torch.from_numpy(self._line_of_example[indices])]

    def token_inputs(self, indices: NDArray[np.int64], padded_length: int) -> Inputs:
        """Return the vectors of each example's tokens, padded, and their mask."""
        mask = self._examples.inputs_of(indices, padded_length)["attention_mask"]
        lengths = self._examples.lengths[indices]
        firsts = self._starts[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(firsts, lengths) + np.arange(lengths.sum())
        features = self._lines.new_zeros(len(indices), padded_length, self._lines.shape[1])
        is_token = mask.reshape(len(indices), padded_length).bool()
        features[is_token] = self._lines[torch.from_numpy(numbers)]
        return {"inputs_embeds": features, "attention_mask": mask}
