"""The features of whole splits: computed by the frozen layers, or read from the store."""

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices import host_memory
from finetune.devices.base import Device
from finetune.devices.precision import autocast
from finetune.events import Advance, Emit, Stage, WarningMessage
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.feature_store import FeatureStore, key_of
from finetune.tokenization.buckets import Batch, plan_extraction
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs, InputsOf

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
        there = {name: self.device.copy(one) for name, one in inputs.items()}
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
    # What the outputs are, and the name of the folder, change nothing.
    other = ("id2label", "label2id", "problem_type", "task_specific_params", "_name_or_path")
    config = extractor.model.config.to_dict() | dict.fromkeys(other, 0)
    ingredients = [
        f"split at {extractor.split_at}",
        f"precision {precision}",
        f"device {device.name} {device.description}",
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "finetune-mps")),
        f"config {sorted(config.items(), key=lambda item: item[0])}",
    ]
    # Hashing lets other threads run: of BERT-base, 440 MB, it takes half a second in one.
    with ThreadPoolExecutor() as pool:
        tensors = list(pool.map(key_of, extractor.frozen_tensors()))
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
    batches = plan_extraction(
        examples.lengths,
        batch_size=batch_size,
        padded_lengths=padded_lengths,
        shapes=layers.device.shapes,
    )
    extraction = _Extraction(examples, layers, batches, batch_size, emit)
    what = f"features of the frozen layers for {len(examples.labels):,} {notes['split']} rows"
    key = key_of(extraction.key_parts())
    lines = store.read(key, emit=emit)
    emit(Stage(f"{'computing' if lines is None else 'reusing'} {what}"))
    if lines is None:
        lines = extraction.compute(store, key=key, notes=notes)
    order = np.concatenate([batch.indices for batch in batches])
    if layers.extractor.per_token:
        return replace(examples, inputs_of=_read_tokens(examples, lines, order))
    return replace(examples, inputs_of=_read_pooled(lines, order, layers.takes_4d_mask))


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
                self.emit(Advance(done, len(self.examples.lengths)))

    def compute(self, store: FeatureStore, *, key: str, notes: Notes) -> torch.Tensor:
        """Compute features and keep them in the store, or in memory if it can't be written."""
        size_bytes, shape = self.layers.size_bytes(self.examples), self.layers.shape(self.examples)
        try:
            if not store.would_fit(size_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return store.write(key, self.pieces(), shape=shape, notes=notes)
        except OSError as error:
            if size_bytes > MEMORY_SHARE * host_memory.spare_bytes():
                raise FeaturesDoNotFit from error
            reason = f"can't be written to {store.folder} ({error.strerror})"
            remedy = "make room with finetune cache clear, or name a folder with --cache-dir"
            self.emit(WarningMessage(f"features {reason}: they stay in memory", remedy=remedy))
            return torch.cat(list(self.pieces()))

    def _inputs(self, batch: Batch) -> Inputs:
        indices = batch.indices
        if self.layers.device.shapes.pads_batches:
            indices = fill_batch(indices, batch_size=max(len(indices), self.batch_size))
        return self.examples.inputs_of(indices, batch.padded_length)


def _read_pooled(lines: torch.Tensor, order: NDArray[np.int64], takes_4d_mask: bool) -> InputsOf:
    """Return what reads an example's one vector out of those of a split, computed in an order."""
    line_of_example = np.argsort(order)

    def inputs_of(indices: NDArray[np.int64], _: int) -> Inputs:
        features = lines[torch.from_numpy(line_of_example[indices])]
        return pooled_inputs(features, takes_4d_mask=takes_4d_mask)

    return inputs_of


def _read_tokens(examples: Examples, lines: torch.Tensor, order: NDArray[np.int64]) -> InputsOf:
    """Return what reads the vectors of an example's tokens, padded, and their mask."""
    starts = np.empty_like(order)
    starts[order] = np.cumsum(examples.lengths[order]) - examples.lengths[order]

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        lengths = examples.lengths[indices]
        firsts = starts[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(firsts, lengths) + np.arange(lengths.sum())
        features = lines.new_zeros(len(indices), padded_length, lines.shape[1])
        is_token = mask.reshape(len(indices), padded_length).bool()
        features[is_token] = lines[torch.from_numpy(numbers)]
        return {"inputs_embeds": features, "attention_mask": mask}

    return inputs_of
