"""The features of whole splits: computed by the frozen layers, or read from the store."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from finetune import distributed
from finetune.devices.base import Device
from finetune.events import Advance, Emit, Info
from finetune.model.feature_extractor import FeatureExtractor, pooled_inputs
from finetune.model.tensor_store import TensorStore, key_of
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.examples import Examples, Inputs, fill_batch

PROGRESS_EVENTS = 10
# Of an entry of the store, which is in memory until it is written. Reading from four takes half as
# long again as from one.
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
    # Hashing lets other threads run: of BERT-base, 440 MB, it takes half a second in one.
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
    notes: Mapping[str, str | int],
    emit: Emit,
) -> Examples:
    """Return a split with features for inputs; ``notes`` describe them in the store.

    They are computed in contiguous parts, each an entry of the store. Each of several ranks
    computes its share of the parts and reads those of the others; what another could not write to a
    store that both see is computed here as well. FeaturesNotStored if it can't be written to.
    """
    shapes, is_per_token = layers.device.shapes, layers.extractor.per_token
    # The last bits of a text's features depend on its batch, so that the same texts always come in
    # the same batches.
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths, shapes=shapes
    )
    counts = examples.lengths if is_per_token else np.ones_like(examples.lengths)
    bytes_of_vector = layers.extractor.hidden_size * torch.float32.itemsize
    fewest_parts = math.ceil(counts.sum() * bytes_of_vector / PART_BYTES)
    part_count = max(distributed.world_size(), fewest_parts)
    tokens = np.cumsum([len(batch.indices) * batch.padded_length for batch in batches])
    ends = np.searchsorted(tokens, tokens[-1] * np.arange(1, part_count) / part_count).tolist()
    parts = [batches[start:end] for start, end in pairwise([0, *ends, len(batches)])]

    def inputs_of_batch(batch: Batch) -> Inputs:
        indices = batch.indices
        if shapes.pads_batches:
            filled = max(len(indices), batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return examples.inputs_of(indices, batch.padded_length)

    def compute(batch: Batch) -> torch.Tensor:
        """Return features without padding, on the CPU."""
        inputs, count = inputs_of_batch(batch), len(batch.indices)
        features = layers.features(inputs)[:count].cpu()
        if not is_per_token:
            return features
        mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
        return features[mask.bool()]

    def ingredients(part: Sequence[Batch]) -> Iterator[str | torch.Tensor]:
        yield layers.key
        for batch in part:
            for name, tensor in sorted(inputs_of_batch(batch).items()):
                yield name
                yield tensor

    def read_or_compute(numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        found = {number: store.read(keys[number], emit=emit) for number in numbers}
        missing = [number for number in numbers if found[number] is None]
        verb = "computing" if missing else "reusing"
        rows, split = len(examples.labels), notes["split"]
        emit(Info(f"{verb} features of the frozen layers for {rows:,} {split} rows"))
        left = [batch.indices for number in missing for batch in parts[number]]
        size_bytes = sum(int(counts[indices].sum()) for indices in left) * bytes_of_vector
        is_kept = bool(missing) and store.make_room(size_bytes)
        done, total = 0, sum(map(len, left))
        for number in missing:
            computed = []
            for batch in parts[number]:
                computed.append(compute(batch))
                before, done = done, done + len(batch.indices)
                if PROGRESS_EVENTS * done // total > PROGRESS_EVENTS * before // total:
                    emit(Advance(done, total))
            # Of few rows, one of several ranks may have no batch.
            none = torch.empty(0, layers.extractor.hidden_size)
            features = torch.cat(computed) if computed else none
            of_part = {**notes, "shape": list(features.shape)}
            tensors = {"features": features}
            found[number] = store.write(keys[number], tensors, is_kept=is_kept, notes=of_part)
        return {number: tensors["features"] for number, tensors in found.items() if tensors}

    own = range(part_count)[distributed.share(part_count)]
    of_ranks = distributed.gather([key_of(ingredients(parts[number])) for number in own])
    keys = [key for of_rank in of_ranks for key in of_rank]
    found: dict[int, torch.Tensor] = {}
    for numbers in (own, [number for number in range(part_count) if number not in own]):
        failure = ""
        with distributed.oom_on_all_ranks(layers.device.memory, seconds=distributed.MAX_SECONDS):
            try:
                found |= read_or_compute(numbers) if numbers else {}
            except OSError as error:
                failure = error.strerror or str(error)
        if distributed.any_rank(bool(failure)):
            raise FeaturesNotStored(failure or "another rank can't write to it")
    order = np.concatenate([batch.indices for batch in batches])
    vectors_of = _vectors_of([found[number] for number in range(part_count)], counts, order)

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        vectors = vectors_of(indices)
        if not is_per_token:
            return pooled_inputs(vectors, takes_4d_mask=layers.takes_4d_mask)
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        embeddings = vectors.new_zeros(len(indices), padded_length, vectors.shape[1])
        embeddings[mask.reshape(len(indices), padded_length).bool()] = vectors
        return {"inputs_embeds": embeddings, "attention_mask": mask}

    return replace(examples, inputs_of=inputs_of)


def _vectors_of(
    parts: Sequence[torch.Tensor], counts: NDArray[np.int64], order: NDArray[np.int64]
) -> Callable[[NDArray[np.int64]], torch.Tensor]:
    """Return what takes the vectors of some examples, end to end: [vectors, hidden]."""
    firsts = np.empty_like(counts)
    firsts[order] = np.cumsum(counts[order]) - counts[order]
    starts = np.cumsum([0, *map(len, parts)])

    def take(examples: NDArray[np.int64]) -> torch.Tensor:
        taken = counts[examples]
        shifts = firsts[examples] - (np.cumsum(taken) - taken)
        numbers = np.repeat(shifts, taken) + np.arange(taken.sum())
        if len(parts) == 1:
            return parts[0].index_select(0, torch.from_numpy(numbers))
        owners = np.searchsorted(starts, numbers, side="right") - 1
        vectors = parts[-1].new_empty(len(numbers), parts[-1].shape[1])
        for owner in np.unique(owners):
            here = np.flatnonzero(owners == owner)
            inside = torch.from_numpy(numbers[here] - starts[owner])
            vectors[torch.from_numpy(here)] = parts[owner][inside]
        return vectors

    return take
