"""The features of whole splits: computed by the frozen layers, or read from the store."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.devices.base import Device
from finetune.distributed.processes import ALONE, MAX_SECONDS, Processes
from finetune.events import Advance, Emit, Info
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.tensor_store import TensorStore, key_of
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.examples import Examples, Inputs, fill_batch

PROGRESS_EVENTS = 10
# Features are held in memory until there are as many as go to one file of the store. Reading from
# four files takes half as long again as from one.
PART_BYTES = 2**29


class FeaturesNotStored(Exception):
    """The store can't be written to, for the reason that is its argument."""


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
        with self.device.autocast(self.precision):
            return self.extractor.extract(on_device)


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
    FeaturesNotStored if the store can't be written to.
    """
    shapes, is_per_token = layers.device.shapes, layers.extractor.per_token
    # The last bits of a text's features depend on its batch, so that the same texts always come in
    # the same batches.
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths, shapes=shapes
    )
    tokens = np.cumsum([len(batch.indices) * batch.padded_length for batch in batches])
    ends = np.searchsorted(tokens, tokens[-1] * np.arange(1, processes.count) / processes.count)
    shares = [
        batches[start:end] for start, end in zip([0, *ends], [*ends, len(batches)], strict=True)
    ]
    counts = examples.lengths if is_per_token else np.ones_like(examples.lengths)

    def inputs_of_batch(batch: Batch) -> Inputs:
        indices = batch.indices
        if shapes.pads_batches:
            filled = max(len(indices), batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return examples.inputs_of(indices, batch.padded_length)

    def ingredients(share: Sequence[Batch]) -> Iterator[str | torch.Tensor]:
        yield layers.key
        for batch in share:
            for name, tensor in sorted(inputs_of_batch(batch).items()):
                yield name
                yield tensor

    def read_or_compute(share: Sequence[Batch], key: str) -> list[torch.Tensor]:
        parts = store.read(key, emit=emit)
        verb = "computing" if parts is None else "reusing"
        rows, split = len(examples.labels), notes["split"]
        emit(Info(f"{verb} features of the frozen layers for {rows:,} {split} rows"))
        if parts is None:
            vectors = int(sum(counts[batch.indices].sum() for batch in share))
            shape = (vectors, layers.extractor.hidden_size)
            parts = store.write(
                key,
                ({"features": part} for part in _compute(layers, share, inputs_of_batch, emit)),
                size_bytes=math.prod(shape) * torch.float32.itemsize,
                notes={**notes, "shape": shape},
            )
        return [part["features"] for part in parts]

    keys = processes.gather(key_of(ingredients(shares[processes.index])))
    own = {processes.index}
    found: dict[int, list[torch.Tensor]] = {}
    for numbers in (own, set(range(processes.count)) - own):
        failure = ""
        with processes.oom_on_all_ranks(layers.device.memory, seconds=MAX_SECONDS):
            try:
                found |= {one: read_or_compute(shares[one], keys[one]) for one in numbers}
            except OSError as error:
                failure = error.strerror or str(error)
        if processes.any(bool(failure)):
            raise FeaturesNotStored(failure or "another process can't write to it")
    features = _Features(
        [part for number in range(processes.count) for part in found[number]],
        counts,
        order=np.concatenate([batch.indices for batch in batches]),
    )

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        vectors = features.of(indices)
        if not is_per_token:
            return pooled_inputs(vectors, takes_4d_mask=layers.takes_4d_mask)
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        embeddings = vectors.new_zeros(len(indices), padded_length, vectors.shape[1])
        embeddings[mask.reshape(len(indices), padded_length).bool()] = vectors
        return {"inputs_embeds": embeddings, "attention_mask": mask}

    return replace(examples, inputs_of=inputs_of)


def _compute(
    layers: FrozenLayers,
    batches: Sequence[Batch],
    inputs_of_batch: Callable[[Batch], Inputs],
    emit: Emit,
) -> Iterator[torch.Tensor]:
    """Yield the features without padding, on the CPU, about ``PART_BYTES`` at once."""
    part: list[torch.Tensor] = []
    step = math.ceil(len(batches) / PROGRESS_EVENTS)
    done, total = 0, sum(len(batch.indices) for batch in batches)
    for number, batch in enumerate(batches, start=1):
        inputs, count = inputs_of_batch(batch), len(batch.indices)
        features = layers.features(inputs)[:count].cpu()
        if layers.extractor.per_token:
            mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
            features = features[mask.bool()]
        if sum(one.nbytes for one in part) >= PART_BYTES:
            yield torch.cat(part)
            part = []
        part.append(features)
        done += count
        if number % step == 0 or number == len(batches):
            emit(Advance(done, total))
    # Of few rows, one of several processes may have no batch.
    yield torch.cat(part) if part else torch.empty(0, layers.extractor.hidden_size)


class _Features:
    """The features of a split: the vectors of the examples, end to end, in one or more tensors.

    ``counts`` are the vectors of each example, ``order`` is that in which they were computed.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        counts: NDArray[np.int64],
        *,
        order: NDArray[np.int64],
    ) -> None:
        self._parts, self._counts = parts, counts
        self._firsts = np.empty_like(counts)
        self._firsts[order] = np.cumsum(counts[order]) - counts[order]
        self._starts = np.cumsum([0, *map(len, parts)])

    def of(self, examples: NDArray[np.int64]) -> torch.Tensor:
        """Return the vectors of some examples, end to end: [vectors, hidden]."""
        counts = self._counts[examples]
        shifts = self._firsts[examples] - (np.cumsum(counts) - counts)
        numbers = np.repeat(shifts, counts) + np.arange(counts.sum())
        if len(self._parts) == 1:
            return self._parts[0].index_select(0, torch.from_numpy(numbers))
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        taken = self._parts[-1].new_empty(len(numbers), self._parts[-1].shape[1])
        for owner in np.unique(owners):
            here = np.flatnonzero(owners == owner)
            inside = torch.from_numpy(numbers[here] - self._starts[owner])
            taken[torch.from_numpy(here)] = self._parts[owner][inside]
        return taken
