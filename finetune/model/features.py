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
from finetune.distributed.processes import ALONE, MAX_SECONDS, Processes
from finetune.events import Advance, Emit, Info, WarningMessage
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.tensor_store import TensorStore, key_of
from finetune.tokenization.buckets import Batch, plan_extraction
from finetune.tokenization.collate import fill_batch
from finetune.tokenization.examples import Examples, Inputs, InputsOf

PROGRESS_EVENTS = 10
BYTES_A_NUMBER = 4
# The name of features in their entry of the store.
TENSOR = "features"
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

    def size_bytes(self, lengths: NDArray[np.int64]) -> int:
        """Return the size of the features of texts of these lengths in tokens."""
        return math.prod(self.shape(lengths)) * BYTES_A_NUMBER

    def shape(self, lengths: NDArray[np.int64]) -> tuple[int, int]:
        """Return the shape of the features of texts of these lengths: [tokens or texts, hidden]."""
        vectors = lengths.sum() if self.extractor.per_token else len(lengths)
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
    store: TensorStore,
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    notes: Notes,
    emit: Emit,
    processes: Processes = ALONE,
) -> Examples:
    """Return a split with features for inputs; ``notes`` go to the list of the store.

    Each of several processes computes a part, and reads those of the others from the store.

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
    parts = [
        _Extraction(examples, layers, part, batch_size, notes, emit)
        for part in _split_evenly(batches, processes.count)
    ]
    lines = _Lines(_read_or_compute(parts, store, processes))
    order = _indices(batches)
    if layers.extractor.per_token:
        return replace(examples, inputs_of=_read_tokens(examples, lines, order))
    return replace(examples, inputs_of=_read_pooled(lines, order, layers.takes_4d_mask))


def _split_evenly(batches: Sequence[Batch], count: int) -> list[Sequence[Batch]]:
    """Cut batches into contiguous parts of about as many tokens, some of which may be empty."""
    tokens = np.cumsum([len(batch.indices) * batch.padded_length for batch in batches])
    ends = np.searchsorted(tokens, tokens[-1] * np.arange(1, count) / count).tolist()
    return [
        batches[start:end] for start, end in zip([0, *ends], [*ends, len(batches)], strict=True)
    ]


def _read_or_compute(
    parts: Sequence["_Extraction"], store: TensorStore, processes: Processes
) -> list[torch.Tensor]:
    """Return the features of each part: this process's own, and then those of the others.

    What another process could not write to a store that both see is computed here as well.
    """
    keys = processes.gather(key_of(parts[processes.index].key_parts()))
    own = {processes.index}
    found: dict[int, torch.Tensor] = {}
    for numbers in (own, set(range(processes.count)) - own):
        has_room = True
        with processes.oom_on_all_ranks(parts[0].layers.device.memory, seconds=MAX_SECONDS):
            try:
                found |= {number: parts[number].get(store, keys[number]) for number in numbers}
            except FeaturesDoNotFit:
                has_room = False
        if processes.any(not has_room):
            raise FeaturesDoNotFit
    return [found[number] for number in range(processes.count)]


@dataclass(frozen=True)
class _Lines:
    """The features of a split, in one piece from each process that has computed some."""

    pieces: Sequence[torch.Tensor]

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Return the lines of these numbers, as they are counted over all pieces."""
        if len(self.pieces) == 1:
            return self.pieces[0][torch.from_numpy(numbers)]
        starts = np.cumsum([0, *map(len, self.pieces)])
        piece_of_number = np.searchsorted(starts, numbers, side="right") - 1
        taken = self.pieces[0].new_empty(len(numbers), self.pieces[0].shape[1])
        for index, piece in enumerate(self.pieces):
            here = np.flatnonzero(piece_of_number == index)
            taken[torch.from_numpy(here)] = piece[torch.from_numpy(numbers[here] - starts[index])]
        return taken


@dataclass(frozen=True)
class _Extraction:
    """One pass of the frozen layers over a split, or over a part of it."""

    examples: Examples
    layers: FrozenLayers
    batches: Sequence[Batch]
    batch_size: int
    notes: Notes
    emit: Emit

    def get(self, store: TensorStore, key: str) -> torch.Tensor:
        """Return the features that the store has, or compute them."""
        stored = store.read(key, emit=self.emit)
        rows, split = len(self.examples.labels), self.notes["split"]
        verb = "computing" if stored is None else "reusing"
        self.emit(Info(f"{verb} features of the frozen layers for {rows:,} {split} rows"))
        return self._compute(store, key=key) if stored is None else stored[TENSOR]

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
        done, total = 0, sum(len(batch.indices) for batch in self.batches)
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
                self.emit(Advance(done, total))

    def _compute(self, store: TensorStore, *, key: str) -> torch.Tensor:
        """Compute features and keep them in the store, or in memory if it can't be written."""
        lengths = self.examples.lengths[_indices(self.batches)]
        size_bytes, shape = self.layers.size_bytes(lengths), self.layers.shape(lengths)
        try:
            if not store.would_fit(size_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            notes = {**self.notes, "shape": shape}
            return store.write(key, self.pieces(), shapes={TENSOR: shape}, notes=notes)[TENSOR]
        except OSError as error:
            if size_bytes > MEMORY_SHARE * host_memory.spare_bytes():
                raise FeaturesDoNotFit from error
            reason = f"can't be written to {store.folder} ({error.strerror})"
            remedy = "make room with finetune cache clear, or name a folder with --cache-dir"
            self.emit(WarningMessage(f"features {reason}: they stay in memory", remedy=remedy))
            return torch.cat([torch.empty(0, shape[1]), *self.pieces()])

    def _inputs(self, batch: Batch) -> Inputs:
        indices, shapes = batch.indices, self.layers.device.shapes
        if shapes.pads_batches:
            filled = max(len(indices), self.batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return self.examples.inputs_of(indices, batch.padded_length)


def _indices(batches: Sequence[Batch]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(batch.indices for batch in batches)])


def _read_pooled(lines: _Lines, order: NDArray[np.int64], takes_4d_mask: bool) -> InputsOf:
    """Return what reads an example's one vector out of those of a split, computed in an order."""
    line_of_example = np.argsort(order)

    def inputs_of(indices: NDArray[np.int64], _: int) -> Inputs:
        features = lines.take(line_of_example[indices])
        return pooled_inputs(features, takes_4d_mask=takes_4d_mask)

    return inputs_of


def _read_tokens(examples: Examples, lines: _Lines, order: NDArray[np.int64]) -> InputsOf:
    """Return what reads the vectors of an example's tokens, padded, and their mask."""
    starts = np.empty_like(order)
    starts[order] = np.cumsum(examples.lengths[order]) - examples.lengths[order]

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        lengths = examples.lengths[indices]
        firsts = starts[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(firsts, lengths) + np.arange(lengths.sum())
        taken = lines.take(numbers)
        features = taken.new_zeros(len(indices), padded_length, taken.shape[1])
        features[mask.reshape(len(indices), padded_length).bool()] = taken
        return {"inputs_embeds": features, "attention_mask": mask}

    return inputs_of
