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
from finetune.tokenization.examples import Examples, Inputs, InputsOf, fill_batch

PROGRESS_EVENTS = 10
# Features are held in memory until there are as many as go to one file of the store.
PART_BYTES = 2**26
# Fraction of the free memory for features that can't be written to the store.
MEMORY_FRACTION = 0.25
TENSOR = "features"


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
        on_device = {name: self.device.copy(one) for name, one in inputs.items()}
        with autocast(self.device, precision=self.precision):
            return self.extractor.extract(on_device)

    def shape(self, lengths: NDArray[np.int64]) -> tuple[int, int]:
        """Return the shape of the features of texts of these lengths: [tokens or texts, hidden]."""
        vectors = lengths.sum() if self.extractor.per_token else len(lengths)
        return int(vectors), self.extractor.hidden_size

    def size_bytes(self, lengths: NDArray[np.int64]) -> int:
        """Return the size in fp32 of the features of texts of these lengths in tokens."""
        return math.prod(self.shape(lengths)) * torch.float32.itemsize


def key_of_frozen_layers(extractor: FeatureExtractor, *, device: Device, precision: str) -> str:
    """Return a key of all that features depend on but the inputs; the model is on the CPU."""
    # Names of classes and of the folder change nothing.
    names = ("id2label", "label2id", "problem_type", "task_specific_params", "_name_or_path")
    config = extractor.model.config.to_dict() | dict.fromkeys(names, 0)
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
    notes: Mapping[str, str | int],
    emit: Emit,
    processes: Processes = ALONE,
) -> Examples:
    """Return a split with features for inputs; ``notes`` describe them in the store.

    Each of several processes computes a contiguous share, an entry of the store, and reads those of
    the others; what another could not write to a store that both see is computed here as well.

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
    tokens = np.cumsum([len(batch.indices) * batch.padded_length for batch in batches])
    ends = np.searchsorted(tokens, tokens[-1] * np.arange(1, processes.count) / processes.count)
    shares = [
        _Extraction(examples, layers, batches[start:end], batch_size, notes, emit)
        for start, end in zip([0, *ends], [*ends, len(batches)], strict=True)
    ]
    keys = processes.gather(shares[processes.index].key())
    own = {processes.index}
    found: dict[int, list[torch.Tensor]] = {}
    for numbers in (own, set(range(processes.count)) - own):
        has_room = True
        with processes.oom_on_all_ranks(layers.device.memory, seconds=MAX_SECONDS):
            try:
                found |= {number: shares[number].get(store, keys[number]) for number in numbers}
            except FeaturesDoNotFit:
                has_room = False
        if processes.any(not has_room):
            raise FeaturesDoNotFit
    vectors = _Vectors([part for number in range(processes.count) for part in found[number]])
    order = _indices(batches)
    if layers.extractor.per_token:
        return replace(examples, inputs_of=_read_tokens(examples, vectors, order))
    return replace(examples, inputs_of=_read_pooled(vectors, order, layers.takes_4d_mask))


@dataclass(frozen=True)
class _Extraction:
    """One pass of the frozen layers over a split, or over a share of it."""

    examples: Examples
    layers: FrozenLayers
    batches: Sequence[Batch]
    batch_size: int
    notes: Mapping[str, str | int]
    emit: Emit

    def key(self) -> str:
        def ingredients() -> Iterator[str | torch.Tensor]:
            yield self.layers.key
            for batch in self.batches:
                for name, tensor in sorted(self._inputs(batch).items()):
                    yield name
                    yield tensor

        return key_of(ingredients())

    def get(self, store: TensorStore, key: str) -> list[torch.Tensor]:
        """Return the features that the store has, or compute and store them."""
        stored = store.read(key, emit=self.emit)
        verb = "computing" if stored is None else "reusing"
        rows, split = len(self.examples.labels), self.notes["split"]
        self.emit(Info(f"{verb} features of the frozen layers for {rows:,} {split} rows"))
        if stored is None:
            return self._compute(store, key)
        return [part[TENSOR] for part in stored]

    def _compute(self, store: TensorStore, key: str) -> list[torch.Tensor]:
        lengths = self.examples.lengths[_indices(self.batches)]
        size_bytes = self.layers.size_bytes(lengths)
        try:
            if not store.would_fit(size_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            notes = {**self.notes, "shape": self.layers.shape(lengths)}
            parts = ({TENSOR: part} for part in self._parts())
            stored = store.write(key, parts, size_bytes=size_bytes, notes=notes)
            return [part[TENSOR] for part in stored]
        except OSError as error:
            if size_bytes > MEMORY_FRACTION * host_memory.spare_bytes():
                raise FeaturesDoNotFit from error
            reason = f"can't be written to {store.folder} ({error.strerror})"
            remedy = "make room with finetune cache clear, or name a folder with --cache-dir"
            self.emit(WarningMessage(f"features {reason}: they stay in memory", remedy=remedy))
            return list(self._parts())

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield the features without padding, on the CPU, about ``PART_BYTES`` at once."""
        part: list[torch.Tensor] = []
        step = math.ceil(len(self.batches) / PROGRESS_EVENTS)
        done, total = 0, sum(len(batch.indices) for batch in self.batches)
        for number, batch in enumerate(self.batches, start=1):
            inputs, count = self._inputs(batch), len(batch.indices)
            features = self.layers.features(inputs)[:count].cpu()
            if self.layers.extractor.per_token:
                mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
                features = features[mask.bool()]
            part.append(features)
            done += count
            is_last = number == len(self.batches)
            if is_last or number % step == 0:
                self.emit(Advance(done, total))
            if is_last or sum(one.nbytes for one in part) >= PART_BYTES:
                yield torch.cat(part)
                part = []
        if not self.batches:
            yield torch.empty(0, self.layers.extractor.hidden_size)

    def _inputs(self, batch: Batch) -> Inputs:
        indices, shapes = batch.indices, self.layers.device.shapes
        if shapes.pads_batches:
            filled = max(len(indices), self.batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return self.examples.inputs_of(indices, batch.padded_length)


@dataclass(frozen=True)
class _Vectors:
    """The features of a split, one vector a token or a text, in one or more tensors."""

    parts: Sequence[torch.Tensor]

    def take(self, numbers: NDArray[np.int64]) -> torch.Tensor:
        """Return the vectors of these numbers, as they are counted over all parts."""
        if len(self.parts) == 1:
            return self.parts[0][torch.from_numpy(numbers)]
        starts = np.cumsum([0, *map(len, self.parts)])
        part_of_number = np.searchsorted(starts, numbers, side="right") - 1
        taken = self.parts[0].new_empty(len(numbers), self.parts[0].shape[1])
        for index in np.unique(part_of_number):
            here = np.flatnonzero(part_of_number == index)
            inside = torch.from_numpy(numbers[here] - starts[index])
            taken[torch.from_numpy(here)] = self.parts[index][inside]
        return taken


def _indices(batches: Sequence[Batch]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(batch.indices for batch in batches)])


def _read_pooled(vectors: _Vectors, order: NDArray[np.int64], takes_4d_mask: bool) -> InputsOf:
    """Return what reads an example's one vector out of those of a split, computed in an order."""
    vector_of_example = np.argsort(order)

    def inputs_of(indices: NDArray[np.int64], _: int) -> Inputs:
        features = vectors.take(vector_of_example[indices])
        return pooled_inputs(features, takes_4d_mask=takes_4d_mask)

    return inputs_of


def _read_tokens(examples: Examples, vectors: _Vectors, order: NDArray[np.int64]) -> InputsOf:
    """Return what reads the vectors of an example's tokens, padded, and their mask."""
    starts = np.empty_like(order)
    starts[order] = np.cumsum(examples.lengths[order]) - examples.lengths[order]

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        lengths = examples.lengths[indices]
        firsts = starts[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(firsts, lengths) + np.arange(lengths.sum())
        taken = vectors.take(numbers)
        features = taken.new_zeros(len(indices), padded_length, taken.shape[1])
        features[mask.reshape(len(indices), padded_length).bool()] = taken
        return {"inputs_embeds": features, "attention_mask": mask}

    return inputs_of
