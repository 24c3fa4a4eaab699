"""Splits a model into frozen layers, which need to run only once, and trainable layers.

Recording a forward pass finds the place to split. A split is used only if features don't depend on
padding, and if the trainable layers have the same logits and gradients as the whole model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from finetune import distributed
from finetune.devices.base import Device, DeviceMemory
from finetune.events import Advance, Info, emit
from finetune.model.freeze import set_training
from finetune.model.structure import (
    REFUSALS,
    Call,
    are_features,
    encoder_layers,
    find_features,
    record_calls,
)
from finetune.model.tensor_store import TensorStore, key_of, map_tensors, write_rows
from finetune.tokenization.buckets import Batch, plan_evaluation
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.examples import (
    Examples,
    Inputs,
    fill_batch,
    inputs_of_texts,
    prepare_mask,
)

# Tokens of the two texts that are tried; they are padded by two more to see whether features stay.
TRIED_LENGTHS = (5, 3)


@dataclass(frozen=True)
class FeatureExtractor:
    """A model split at the input of one of its modules.

    This module is the first one that trains or, if the head reads one vector per text, the module
    that reads it. The trainable model shares its parameters and gets features as ``inputs_embeds``.
    """

    model: PreTrainedModel
    split_at: str
    per_token: bool  # or the text as a whole has features
    hidden_size: int
    trainable: nn.Module

    def extract(self, inputs: Inputs) -> torch.Tensor:
        """Return features: floats [examples, tokens, hidden] or [examples, hidden]."""
        self.model.train(False)
        module = self.model.get_submodule(self.split_at)
        with module.register_forward_pre_hook(_stop, with_kwargs=True), torch.no_grad():
            try:
                self.model(**inputs)
            except _SplitReachedError as reached:
                features: torch.Tensor = reached.args[0]
                return features
        raise RuntimeError(f"the forward did not call {self.split_at}")


def split_frozen(
    model: PreTrainedModel, *, takes_4d_mask: bool, pads_left: bool
) -> FeatureExtractor | None:
    """Split a model on the CPU below its trainable layers; None if no split is exact."""
    # Tensor values must not be read: memory is estimated with fake tensors, which have none.
    tokens = np.array([7, 6, 0, 0, 1, 1, 2, 3], np.int32)
    offsets = np.concatenate([[0], np.cumsum(TRIED_LENGTHS)])
    padding = {"input_ids": model.config.pad_token_id or 0}
    texts = EncodedTexts({"input_ids": tokens}, offsets, padding, pads_left, 0)
    inputs_of = inputs_of_texts(texts, takes_4d_mask=takes_4d_mask).inputs_of
    inputs, padded_inputs = (
        inputs_of(np.arange(len(TRIED_LENGTHS)), max(TRIED_LENGTHS) + more) for more in (0, 2)
    )
    model.train(False)
    try:
        calls = record_calls(model, inputs)
    except REFUSALS:
        return None
    for name, features in _possible_splits(calls, set(encoder_layers(model))).items():
        extractor = FeatureExtractor(
            model,
            name,
            per_token=features.ndim == 3,
            hidden_size=features.shape[-1],
            trainable=_make_trainable(model, calls, name),
        )
        with suppress(*REFUSALS):
            if _is_exact(extractor, inputs, padded_inputs, takes_4d_mask=takes_4d_mask):
                return extractor
    return None


def pooled_inputs(features: torch.Tensor, *, takes_4d_mask: bool) -> Inputs:
    """Return vectors [examples, hidden] as inputs of trainable layers: texts of one token."""
    mask = torch.ones(len(features), 1, dtype=torch.bool, device=features.device)
    inputs = {"inputs_embeds": features[:, None], "attention_mask": mask}
    return prepare_mask(inputs, takes_4d_mask=takes_4d_mask)


def unread_parameters(trainable: nn.Module) -> set[str]:
    """Return the names of the parameters of layers that return their input."""
    return {
        f"{name}.{parameter}"
        for name, module in trainable.named_modules()
        if getattr(vars(module).get("forward"), "func", None) is _pass_on
        for parameter, _ in module.named_parameters()
    }


class _SplitReachedError(Exception):
    """Stops a forward pass and carries the features, its argument."""


def _stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _SplitReachedError(_require_features(args, kwargs))


def _require_features(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    features = find_features(args, kwargs)
    if features is None:
        raise TypeError("a frozen layer was called without features")
    return features


def _possible_splits(calls: Mapping[str, Call], layers: set[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the features at possible split points of a model, the topmost first."""
    features = {
        name: call.features
        for name, call in calls.items()
        if call.features is not None
        and len(call.features) == len(TRIED_LENGTHS)
        and list(call.module.parameters())
    }
    trained = []
    for name in features:
        module = calls[name].module
        trains = [parameter.requires_grad for parameter in module.parameters()]
        # In a layer with adapters, only the adapters train.
        if all(trains) or (any(trains) and module in layers):
            trained.append(name)
    reads_vector = [name for name in features if features[name].ndim == 2]
    trained_on_vector = [name for name in trained if name in reads_vector]
    first = [*trained_on_vector[:1], *reads_vector[:1], *trained[:1]]
    return {name: features[name] for name in first}


def _make_trainable(model: nn.Module, calls: Mapping[str, Call], split_at: str) -> nn.Module:
    """Return a model over the same parameters whose frozen layers return their input."""
    tensors = [*model.parameters(), *model.buffers()]
    trainable = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for name, call in takewhile(lambda item: item[0] != split_at, calls.items()):
        parameters = list(call.module.parameters())
        is_frozen = bool(parameters) and not any(
            parameter.requires_grad for parameter in parameters
        )
        output = call.first_output
        if is_frozen and are_features(output) and len(output) == len(TRIED_LENGTHS):
            # The module stays, because a model may read attributes of its layers.
            trainable.get_submodule(name).forward = partial(_pass_on, call.output)
    return trainable


def _pass_on(output: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the features from the arguments of a module, in the form of its output."""
    features = _require_features(args, kwargs)

    def like(part: Any) -> torch.Tensor | None:
        if not are_features(part):
            return None
        return features[:, 0] if (part.ndim, features.ndim) == (2, 3) else features

    if isinstance(output, torch.Tensor):
        return like(output)
    if isinstance(output, ModelOutput):
        return type(output)(**{name: like(part) for name, part in output.items()})
    return tuple(map(like, output))


def _is_exact(
    extractor: FeatureExtractor, inputs: Inputs, padded_inputs: Inputs, *, takes_4d_mask: bool
) -> bool:
    """Whether features are equal at two padded lengths, and give the same gradients."""
    features, padded_features = extractor.extract(inputs), extractor.extract(padded_inputs)
    if extractor.per_token:
        # Features of padding are not kept, so that nothing may depend on them.
        mask, padded_mask = (
            batch["attention_mask"].bool().reshape(len(TRIED_LENGTHS), -1)
            for batch in (inputs, padded_inputs)
        )
        embeddings = features * mask[..., None]
        above = {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}
        features, padded_features = features[mask], padded_features[padded_mask]
    else:
        above = pooled_inputs(features, takes_4d_mask=takes_4d_mask)
    if not _are_close(features, padded_features):
        return False
    expected = _logits_and_gradients(extractor.model, inputs)
    actual = _logits_and_gradients(extractor.trainable, above)
    return all(map(_are_close, expected, actual))


def _are_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # Rounding errors of large values also show in small values of the same tensor.
    rounding = 1e-6 * expected.abs().max().item()
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-5 + rounding)


def _logits_and_gradients(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Return the logits with dropout and all gradients, ordered by parameter name."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    set_training(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # torch.manual_seed would lead to the same dropout for every seed on a GPU.
        torch.default_generator.manual_seed(0)
        logits = model(**inputs).logits
        gradients = torch.autograd.grad(
            # If an output layer is all zeros, squared logits would have no gradient.
            (logits + 1).square().sum(),
            [trained[name] for name in sorted(trained)],
            materialize_grads=True,
        )
    return [logits.detach(), *gradients]


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
        on_device = {name: self.device.copy(tensor) for name, tensor in inputs.items()}
        with self.device.autocast(self.precision):
            return self.extractor.extract(on_device)

    def inputs_of(self, batch: Batch, examples: Examples, *, batch_size: int) -> Inputs:
        """Return the inputs of a batch, filled up if the device pads batches."""
        indices, shapes = batch.indices, self.device.shapes
        if shapes.pads_batches:
            filled = max(len(indices), batch_size, shapes.min_examples)
            indices = fill_batch(indices, batch_size=filled)
        return examples.inputs_of(indices, batch.padded_length)

    def key_of(self, batches: Sequence[Batch], examples: Examples, *, batch_size: int) -> str:
        """Return a key of everything that the features of batches depend on."""
        inputs = (self.inputs_of(batch, examples, batch_size=batch_size) for batch in batches)
        items = (item for tensors in inputs for item in sorted(tensors.items()))
        return key_of(chain([self.key], chain.from_iterable(items)))

    def vectors(self, batch: Batch, examples: Examples, *, batch_size: int) -> torch.Tensor:
        """Return the features of a batch without padding, on the CPU: [vectors, hidden]."""
        inputs = self.inputs_of(batch, examples, batch_size=batch_size)
        count = len(batch.indices)
        features = self.features(inputs)[:count].cpu()
        if not self.extractor.per_token:
            return features
        mask = inputs["attention_mask"].reshape(-1, batch.padded_length)[:count]
        return features[mask.bool()]


def key_of_frozen_layers(extractor: FeatureExtractor, *, device: Device, precision: str) -> str:
    """Return a key of everything that features depend on, except the inputs.

    The model is on the CPU.
    """
    # Class names and the folder name do not affect features.
    names = ("id2label", "label2id", "problem_type", "task_specific_params", "_name_or_path")
    model = extractor.model
    frozen = [
        (name, parameter.detach())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
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
    """Return a split with features as inputs, from a file to which each rank writes its part.

    FeaturesNotStoredError if a rank can't.
    """
    is_per_token = layers.extractor.per_token
    # The last bits of features depend on the batch, so the same texts are always batched together.
    batches = plan_evaluation(
        examples.lengths,
        batch_size=batch_size,
        padded_lengths=padded_lengths,
        shapes=layers.device.shapes,
    )
    counts = examples.lengths if is_per_token else np.ones_like(examples.lengths)
    order = np.concatenate([batch.indices for batch in batches])
    first_vectors = np.empty_like(counts)
    first_vectors[order] = np.cumsum(counts[order]) - counts[order]

    def compute(batch: Batch) -> tuple[int, torch.Tensor]:
        """Return the number of the first vector, and the vectors."""
        vectors = layers.vectors(batch, examples, batch_size=batch_size)
        return int(first_vectors[batch.indices[0]]), vectors

    key = distributed.broadcast(lambda: layers.key_of(batches, examples, batch_size=batch_size))
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
    """Compute the batches of this rank, write them to the shared file, and map the file."""

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
