"""Frozen-layer features of a run, computed once or read from the store."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune import distributed
from finetune.config.modes import Mode
from finetune.config.schema import CacheConfig
from finetune.devices.base import BatchSize, Device, DeviceMemory, move_to_device
from finetune.events import Advance, Info, WarningMessage, emit
from finetune.model.features import FrozenLayers, split_frozen
from finetune.model.load import TextModel
from finetune.model.tensor_store import (
    TensorStore,
    key_of,
    map_vectors,
    open_tensor_store,
    write_vectors,
)
from finetune.runs.prepare import RunInputs
from finetune.tokenization.examples import (
    Batch,
    Examples,
    Inputs,
    InputsOf,
    fill_batch,
    plan_evaluation,
)
from finetune.training.checks import prepare_feature_check
from finetune.training.plan import Plan

PROGRESS_EVENTS = 10


def stores_features(options: CacheConfig, mode: Mode) -> bool:
    """Return whether frozen-layer features are stored, if the model can be split."""
    return mode.trained_layers is not None and options.feature_cache


def split_text_model(
    text_model: TextModel, device: Device, precision: str = "fp32"
) -> FrozenLayers | None:
    """Split a model into frozen and trainable layers. Return None if it can't be split."""
    return split_frozen(
        text_model.model,
        device=device,
        precision=precision,
        takes_4d_mask=text_model.structure.takes_4d_mask,
        pads_left=text_model.tokenizer.padding_side == "left",
    )


def stored_features(
    inputs: RunInputs, plan: Plan, batch_size: BatchSize
) -> tuple[nn.Module, Mapping[str, Examples]]:
    """Return the model to run at every step, and its inputs for each split.

    If the model can be split, return its trainable layers, whose inputs are features.
    """
    config, text_model, device = inputs.config, inputs.text_model, inputs.device
    whole = text_model.model, inputs.examples
    if not stores_features(config.cache, inputs.mode):
        return whole
    layers = split_text_model(text_model, device, plan.precision)
    if layers is None:
        name = type(text_model.model).__name__
        message = f"{name} can't be split into frozen and trainable layers"
        emit(WarningMessage(f"{message}: the frozen layers run at every step"))
        return whole
    check = None
    if plan.checks_device:
        check = prepare_feature_check(layers, inputs.examples["train"])
    move_to_device(text_model.model, device.torch_device)
    store = open_tensor_store(config.cache)

    def compute(split: str, examples: Examples) -> Examples:
        attempt = partial(
            with_features, examples, layers, store, split=split,
            padded_lengths=plan.padded_lengths,
        )  # fmt: skip
        return batch_size.retry_on_out_of_memory(lambda size: attempt(batch_size=size))

    features: dict[str, Examples] = {}
    try:
        if inputs.pool:
            pool = compute("train", inputs.pool)
            features = {
                name: pool.select(rows["example"].to_numpy())
                for name, rows in inputs.data.splits.items()
            }
        others = inputs.examples.items()
        features |= {name: compute(name, rows) for name, rows in others if name not in features}
    except OSError as error:
        message = f"the features can't be stored ({error.strerror})"
        remedy = "free space with finetune cache clear, or choose a folder with --cache-dir"
        emit(WarningMessage(f"{message}: the frozen layers run at every step", remedy=remedy))
        return whole
    if check:
        check(features["train"])
    return layers.trainable, features


def with_features(
    examples: Examples,
    layers: FrozenLayers,
    store: TensorStore,
    *,
    padded_lengths: Sequence[int],
    batch_size: int,
    split: str,
) -> Examples:
    """Return a split whose inputs are features in a stored file. Raise OSError on write errors.

    The file contains the vectors of all batches in sequence. Each rank computes its share.
    """
    shapes = layers.device.shapes
    # The last bits of features depend on the batch, so always batch the same texts together.
    batches = plan_evaluation(
        examples.lengths, batch_size=batch_size, padded_lengths=padded_lengths, shapes=shapes
    )
    counts = examples.lengths if layers.per_token else np.ones_like(examples.lengths)
    order = np.concatenate([batch.indices for batch in batches])
    firsts = np.empty_like(counts)
    firsts[order] = np.cumsum(counts[order]) - counts[order]

    def read(batch: Batch) -> Inputs:
        filled = shapes.evaluated_examples(len(batch.indices), batch_size=batch_size)
        indices = fill_batch(batch.indices, batch_size=filled)
        return examples.inputs_of(indices, batch.padded_length)

    def make_key() -> str:
        items = (item for batch in batches for item in sorted(read(batch).items()))
        return key_of(chain([layers.key], chain.from_iterable(items)))

    shape = int(counts.sum()), layers.hidden_size
    key = distributed.broadcast(make_key)
    vectors = store.read(key, shape)
    verb = "computing" if vectors is None else "reusing"
    emit(Info(f"{verb} frozen-layer features for {len(examples.labels):,} {split} rows"))
    if distributed.any_rank(vectors is None):
        share = batches[distributed.share(len(batches))]
        pieces = (
            (int(firsts[batch.indices[0]]), _compute(layers, read(batch), batch))
            for batch in _with_progress(share)
        )
        vectors = _store(store, key, shape, pieces, layers.device.memory)
    assert vectors is not None
    return replace(examples, inputs_of=_reader(examples, layers, vectors, counts, firsts))


def _compute(layers: FrozenLayers, inputs: Inputs, batch: Batch) -> torch.Tensor:
    """Compute the vectors of a batch, [vectors, hidden], without padding."""
    count = len(batch.indices)
    vectors = layers.features(inputs)[:count]
    if layers.per_token:
        mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
        vectors = vectors[mask.bool()]
    return vectors.float()


def _reader(
    examples: Examples,
    layers: FrozenLayers,
    stored: torch.Tensor,
    counts: NDArray[np.int64],
    firsts: NDArray[np.int64],
) -> InputsOf:
    """Return a function that reads the features of examples as inputs of the trainable layers.

    Each example has ``counts`` vectors, starting at ``firsts``.
    """

    def inputs_of(indices: NDArray[np.int64], padded_length: int) -> Inputs:
        lengths = counts[indices]
        shifts = firsts[indices] - (np.cumsum(lengths) - lengths)
        numbers = np.repeat(shifts, lengths) + np.arange(lengths.sum())
        vectors = stored.index_select(0, torch.from_numpy(numbers))
        if not layers.per_token:
            return layers.trainable_inputs(vectors, None)
        mask = examples.inputs_of(indices, padded_length)["attention_mask"]
        embeddings = vectors.new_zeros(len(indices), padded_length, layers.hidden_size)
        embeddings[mask.reshape(embeddings.shape[:2]).bool()] = vectors
        return {"inputs_embeds": embeddings, "attention_mask": mask}

    return inputs_of


def _with_progress(batches: Sequence[Batch]) -> Iterator[Batch]:
    ends = np.cumsum([len(batch.indices) for batch in batches]).tolist()
    for number, (batch, end) in enumerate(zip(batches, ends, strict=True), start=1):
        yield batch
        if number % (len(batches) // PROGRESS_EVENTS + 1) == 0:
            emit(Advance(end, ends[-1]))


def _store(
    store: TensorStore,
    key: str,
    shape: tuple[int, int],
    pieces: Iterable[tuple[int, torch.Tensor]],
    memory: DeviceMemory,
) -> torch.Tensor:
    """Write the vectors from all ranks to one file and map it. Raise OSError if a rank fails."""

    def create() -> Path | OSError:
        try:
            return stack.enter_context(store.creating(key, shape))
        except OSError as error:
            return error

    with ExitStack() as stack:
        file, failure = distributed.broadcast(create), None
        if isinstance(file, OSError):
            raise file
        with distributed.oom_on_all_ranks(memory, seconds=distributed.MAX_SECONDS):
            try:
                write_vectors(file, pieces)
            except OSError as error:
                failure = error
        for other in filter(None, distributed.gather(failure)):
            raise other
        vectors = map_vectors(file, shape)
        distributed.barrier()
    return vectors
