"""The features of whole splits: computed by the frozen layers, or read from the store."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed
from finetune.devices.base import Device, DeviceMemory
from finetune.events import Advance, Info, emit
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.tensor_store import TensorStore, key_of, map_tensors, write_rows
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.examples import Examples, Inputs, fill_batch

PROGRESS_EVENTS = 10


class FeaturesNotStoredError(Exception):
    """The store can't be written to. The argument is the reason."""


@dataclass(frozen=True)
class FrozenLayers:
    """The frozen layers of a model on their device, with the key of their weights."""

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
    """Return a key of everything that features depend on, except the inputs.

    The model is on the CPU.
    """
    # The names of the classes and of the folder change nothing.
    names = ("id2label", "label2id", "problem_type", "task_specific_params", "_name_or_path")
    model = extractor.model
    frozen = [
        (name, one.detach()) for name, one in model.named_parameters() if not one.requires_grad
    ]
    config = model.config.to_dict() | dict.fromkeys(names, 0)
    ingredients = [
        f"split at {extractor.split_at}",
        f"precision {precision}",
        f"device {device.name} {device.description}",
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "finetune-mps")),
        f"config {sorted(config.items(), key=lambda item: item[0])}",
    ]
    # One thread takes half a second to hash the 440 MB of BERT-base.
    with ThreadPoolExecutor() as pool:
        tensors = list(pool.map(key_of, [*frozen, *model.named_buffers()]))
    return key_of((*ingredients, *tensors))


def with_features(
    examples: Examples,
    layers: FrozenLayers,
    store: TensorStore,
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    split: str,
) -> Examples:
    """Return a split that has features for inputs, from one file of the store.

    Several ranks each compute a share of the batches and write it to the same file.
    FeaturesNotStoredError if one of them can't.
    """
    shapes, is_per_token = layers.device.shapes, layers.extractor.per_token
    # The last bits of features depend on the batch, so the same texts are always batched together.
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths, shapes=shapes
    )
    counts = examples.lengths if is_per_token else np.ones_like(examples.lengths)
    order = np.concatenate([batch.indices for batch in batches])
    first_vectors = np.empty_like(counts)
    first_vectors[order] = np.cumsum(counts[order]) - counts[order]

    def inputs_of_batch(batch: Batch) -> Inputs:
        indices = batch.indices
        if shapes.pads_batches:
            filled = max(len(indices), batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return examples.inputs_of(indices, batch.padded_length)

    def compute(batch: Batch) -> tuple[int, torch.Tensor]:
        """Return the number of the first vector, and features without padding, on the CPU."""
        inputs, count = inputs_of_batch(batch), len(batch.indices)
        features = layers.features(inputs)[:count].cpu()
        if is_per_token:
            mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
            features = features[mask.bool()]
        return int(first_vectors[batch.indices[0]]), features

    inputs = (item for batch in batches for item in sorted(inputs_of_batch(batch).items()))
    key = distributed.broadcast(lambda: key_of(chain([layers.key], chain.from_iterable(inputs))))
    stored = store.read(key)
    verb = "reusing" if stored else "computing"
    emit(Info(f"{verb} features of the frozen layers for {len(examples.labels):,} {split} rows"))
    if distributed.any_rank(stored is None):
        shape = int(counts.sum()), layers.extractor.hidden_size
        stored = _store(store, key, shape, batches, compute, layers.device.memory)
    assert stored
    all_features = stored["features"]

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        lengths = counts[indices]
        shifts = first_vectors[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(shifts, lengths) + np.arange(lengths.sum())
        vectors = all_features.index_select(0, torch.from_numpy(numbers))
        if not is_per_token:
            return pooled_inputs(vectors, takes_4d_mask=layers.takes_4d_mask)
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        embeddings = vectors.new_zeros(len(indices), padded_length, vectors.shape[1])
        embeddings[mask.reshape(len(indices), padded_length).bool()] = vectors
        return {"inputs_embeds": embeddings, "attention_mask": mask}

    return replace(examples, inputs_of=inputs_of)


def _store(
    store: TensorStore,
    key: str,
    shape: tuple[int, int],
    batches: Sequence[Batch],
    compute: Callable[[Batch], tuple[int, torch.Tensor]],
    memory: DeviceMemory,
) -> dict[str, torch.Tensor]:
    """Compute this rank's share of the batches, write it to the file of all, and map that."""

    def create() -> Path | str:
        try:
            dtype = str(first[1].dtype).removeprefix("torch.")
            return store.create(key, "features", shape, dtype)
        except OSError as error:
            return error.strerror or str(error)

    def compute_share() -> Iterator[tuple[int, torch.Tensor]]:
        share = batches[distributed.share(len(batches))]
        done, total = 0, sum(len(batch.indices) for batch in share)
        for batch in share:
            yield first if batch is batches[0] else compute(batch)
            before, done = done, done + len(batch.indices)
            if PROGRESS_EVENTS * done // total > PROGRESS_EVENTS * before // total:
                emit(Advance(done, total))

    failure, seconds = "", distributed.MAX_SECONDS
    with distributed.oom_on_all_ranks(memory, seconds=seconds):
        first = compute(batches[0])  # which has the dtype
    partial = distributed.broadcast(create)
    if isinstance(partial, str):
        raise FeaturesNotStoredError(partial)
    try:
        with distributed.oom_on_all_ranks(memory, seconds=seconds):
            try:
                write_rows(partial, compute_share())
            except OSError as error:
                failure = error.strerror or str(error)
        if distributed.any_rank(bool(failure)):
            raise FeaturesNotStoredError(failure or "another rank can't write to it")
        mapped = map_tensors(partial)
        distributed.barrier()
        if distributed.is_main():
            store.keep(partial, key)
    finally:
        if distributed.is_main():
            partial.unlink(missing_ok=True)
    return mapped
