"""Splits a model into frozen layers, which run only once per text, and trainable layers.

A recorded forward pass shows where to split. A split is used only if features don't depend on
padding, and if the trainable layers have the same logits and gradients as the whole model.
"""

import copy
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.devices.base import Device
from finetune.devices.private import tree_map
from finetune.model.structure import (
    REJECTIONS,
    Call,
    are_features,
    encoder_layers,
    find_features,
    record_calls,
    set_training,
)
from finetune.model.tensor_store import key_of
from finetune.tokenization.encode import EncodedTexts
from finetune.tokenization.examples import Inputs, inputs_of_texts, prepare_mask

# Tokens of the two sample texts, and extra padding for the comparison.
SAMPLE_LENGTHS, MORE_PADDING = (5, 3), 2
# Class names and folder names don't affect features.
_UNRELATED = ("id2label", "label2id", "problem_type", "task_specific_params", "_name_or_path")


@dataclass(frozen=True)
class FrozenLayers:
    """A model split at the input of one of its modules, with the device that computes features.

    This module is the first trainable module or, if the head reads one vector per text, the module
    that reads it. The trainable model shares its parameters and reads features as
    ``inputs_embeds``.
    """

    model: PreTrainedModel
    split_at: str
    per_token: bool  # False: one vector per text
    hidden_size: int
    trainable: nn.Module
    device: Device
    precision: str
    takes_4d_mask: bool

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

    def features(self, inputs: Inputs) -> torch.Tensor:
        """Return the features of a batch on the CPU, computed on the device."""
        on_device = {name: self.device.copy(tensor) for name, tensor in inputs.items()}
        with self.device.autocast(self.precision):
            return self.extract(on_device).cpu()

    def trainable_inputs(self, features: torch.Tensor, mask: torch.Tensor | None) -> Inputs:
        """Return features as inputs of the trainable layers, with zeros for padding.

        A vector per text becomes a text of one token, without a ``mask``.
        """
        if mask is None:
            mask = torch.ones(len(features), 1, dtype=torch.bool, device=features.device)
            inputs = {"inputs_embeds": features[:, None], "attention_mask": mask}
            return prepare_mask(inputs, takes_4d_mask=self.takes_4d_mask)
        embeddings = features * mask.reshape(*features.shape[:2], 1)
        return {"inputs_embeds": embeddings, "attention_mask": mask}

    @cached_property
    def key(self) -> str:
        """A hash of everything that features depend on except the inputs."""
        frozen = [item for item in self.model.named_parameters() if not item[1].requires_grad]
        config = self.model.config.to_dict() | dict.fromkeys(_UNRELATED, 0)
        ingredients = [
            f"split at {self.split_at}",
            f"precision {self.precision}",
            f"device {self.device.name} {self.device.description}",
            *(f"{name} {version(name)}" for name in ("torch", "transformers", "finetune-mps")),
            f"config {sorted(config.items(), key=lambda item: item[0])}",
        ]
        # In threads: one thread needs half a second to hash the 440 MB of BERT-base.
        with ThreadPoolExecutor() as pool:
            return key_of([*ingredients, *pool.map(key_of, [*frozen, *self.model.named_buffers()])])


def split_frozen(
    model: PreTrainedModel,
    *,
    device: Device,
    precision: str,
    takes_4d_mask: bool,
    pads_left: bool = False,
) -> FrozenLayers | None:
    """Split a model on the CPU below its trainable layers. Return None if no split is exact."""
    # Don't read values of tensors: memory is estimated with fake tensors, which have no values.
    tokens = {"input_ids": np.array([7, 6, 0, 0, 1, 1, 2, 3], np.int32)}
    offsets, padding = np.cumsum([0, *SAMPLE_LENGTHS]), model.config.pad_token_id or 0
    texts = EncodedTexts(tokens, offsets, {"input_ids": padding}, pads_left, 0)
    inputs_of = inputs_of_texts(texts, takes_4d_mask=takes_4d_mask).inputs_of
    rows, longest = np.arange(len(SAMPLE_LENGTHS)), max(SAMPLE_LENGTHS)
    inputs, padded_inputs = (inputs_of(rows, longest + more) for more in (0, MORE_PADDING))
    model.train(False)
    try:
        calls = record_calls(model, inputs)
    except REJECTIONS:
        return None
    for name, features in _possible_splits(calls, set(encoder_layers(model))).items():
        layers = FrozenLayers(
            model,
            name,
            per_token=features.ndim == 3,
            hidden_size=features.shape[-1],
            trainable=_make_trainable(model, calls, name),
            device=device,
            precision=precision,
            takes_4d_mask=takes_4d_mask,
        )
        with suppress(*REJECTIONS):
            if _is_exact(layers, inputs, padded_inputs):
                return layers
    return None


class _SplitReachedError(Exception):
    """Raised to stop a forward pass, with the features as argument."""


def _stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _SplitReachedError(find_features(args, kwargs))


def _possible_splits(calls: Mapping[str, Call], layers: set[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the features at the possible split points of a model, topmost first."""
    trained: dict[str, torch.Tensor] = {}
    for name, call in calls.items():
        trains = [parameter.requires_grad for parameter in call.module.parameters()]
        # In a layer with adapters, only the adapters are trained.
        is_trained = any(trains) and (all(trains) or call.module in layers)
        if is_trained and call.features is not None and len(call.features) == len(SAMPLE_LENGTHS):
            trained[name] = call.features
    on_vector = [name for name, features in trained.items() if features.ndim == 2]
    return {name: trained[name] for name in (*on_vector[:1], *list(trained)[:1])}


def _make_trainable(model: nn.Module, calls: Mapping[str, Call], split_at: str) -> nn.Module:
    """Return a model over the same parameters whose frozen layers return their input."""
    tensors = [*model.parameters(), *model.buffers()]
    trainable = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for name, call in takewhile(lambda item: item[0] != split_at, calls.items()):
        trains = [parameter.requires_grad for parameter in call.module.parameters()]
        output = call.first_output
        is_for_texts = are_features(output) and len(output) == len(SAMPLE_LENGTHS)
        if trains and not any(trains) and is_for_texts:
            # Keep the module, because a model can read attributes of its layers.
            trainable.get_submodule(name).forward = partial(_pass_on, call.output)
    return trainable


def _pass_on(output: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the features in a module's arguments, in the structure of its output."""
    features = find_features(args, kwargs)
    if features is None:
        raise TypeError("a frozen layer was called without features")

    def replaced(part: Any) -> torch.Tensor | None:
        if not are_features(part):
            return None
        return features[:, 0] if (part.ndim, features.ndim) == (2, 3) else features

    return tree_map(replaced, output)


def _is_exact(layers: FrozenLayers, inputs: Inputs, padded_inputs: Inputs) -> bool:
    """Whether features are equal at two padded lengths and give the same gradients."""
    features, padded_features = layers.extract(inputs), layers.extract(padded_inputs)
    mask = inputs["attention_mask"] if layers.per_token else None
    above = layers.trainable_inputs(features, mask)
    if layers.per_token:
        features, padded_features = (
            tensor[batch["attention_mask"].bool().reshape(tensor.shape[:2])]
            for tensor, batch in ((features, inputs), (padded_features, padded_inputs))
        )
    if not _are_close(features, padded_features):
        return False
    expected = _logits_and_gradients(layers.model, inputs)
    actual = _logits_and_gradients(layers.trainable, above)
    return all(map(_are_close, expected, actual))


def _are_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    # Rounding errors of large values also appear in small values of the same tensor.
    rounding = 1e-6 * expected.abs().max().item()
    return torch.allclose(actual, expected, rtol=1e-3, atol=1e-5 + rounding)


def _logits_and_gradients(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Return the logits with dropout and all gradients, ordered by parameter name."""
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    set_training(model)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        # torch.manual_seed would give the same dropout for every seed on a GPU.
        torch.default_generator.manual_seed(0)
        logits = model(**inputs).logits
        gradients = torch.autograd.grad(
            # If an output layer is all zeros, squared logits would have no gradient.
            (logits + 1).square().sum(),
            [trained[name] for name in sorted(trained)],
            materialize_grads=True,
        )
    return [logits.detach(), *gradients]
