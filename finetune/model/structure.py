"""Finds encoder, layers and head of a text classifier by running it once, not by names.

The layers are the largest list of like modules in the base model. Of what runs after the last of
them, modules that return a vector a token belong to the encoder, those that return a vector a text
to the head: BERT's pooler is head, although it is stored in the base model.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import ModelUnsupported
from finetune.model.calls import REFUSALS, Call, record_calls


@dataclass(frozen=True)
class Structure:
    """The names of a model's parameters, by where they stand.

    Args:
        embeddings: What of the encoder runs before its last layer and is in no layer.
        layers: Each layer of the encoder, from the bottom.
        final_norm: What of the encoder runs after the last layer.
        head: Everything above the encoder, the pooler included.
        output_layer: The linear layer that gives the logits, at the top of the head.
        new: What of the head starts at random: outside the base model or, if the weights are
            known, not among them.
        output_layer_input: Root mean square of what the output layer reads, for some text.
        takes_4d_mask: Whether attention takes a ready mask of shape [examples, 1, 1, tokens].
    """

    embeddings: frozenset[str]
    layers: tuple[frozenset[str], ...]
    final_norm: frozenset[str]
    head: frozenset[str]
    output_layer: frozenset[str]
    new: frozenset[str]
    output_layer_input: float
    takes_4d_mask: bool

    @property
    def encoder(self) -> frozenset[str]:
        """The pretrained part: everything but the head."""
        return self.embeddings.union(*self.layers, self.final_norm)


def find_structure(model: PreTrainedModel) -> Structure:
    """Find where encoder, layers and head of a model are; it is left as it was.

    Raises:
        ModelUnsupported: If it has no encoder of layers, or no linear output layer.
    """
    layers = _find_layers(model)
    with _in_evaluation(model):
        tokens = model.dummy_inputs["input_ids"][:2].to(model.device)  # of two texts: [2, 5]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        calls = record_calls(model, inputs)
        takes_4d_mask = _takes_4d_mask(model, tokens)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def names_of(parameters: Iterable[nn.Parameter]) -> frozenset[str]:
        return frozenset(names[parameter] for parameter in parameters)

    outside = set(names) - set(model.base_model.parameters())
    below, final_norm, pooler = _divide_base(model, layers, calls)
    output_layer = _find_output_layer(model, calls)
    features = output_layer.features
    return Structure(
        embeddings=names_of(below),
        layers=tuple(names_of(layer.parameters()) for layer in layers),
        final_norm=names_of(final_norm),
        head=names_of(outside | pooler),
        output_layer=names_of(output_layer.module.parameters()),
        new=names_of(outside),
        output_layer_input=0.0 if features is None else features.square().mean().sqrt().item(),
        takes_4d_mask=takes_4d_mask,
    )


def _find_layers(model: PreTrainedModel) -> nn.ModuleList:
    lists = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    ]
    if model.base_model is model or not lists:
        raise _no_layers(model)
    return max(lists, key=lambda layers: sum(one.numel() for one in layers.parameters()))


def _divide_base(
    model: PreTrainedModel, layers: nn.ModuleList, calls: dict[str, Call]
) -> tuple[set[nn.Parameter], set[nn.Parameter], set[nn.Parameter]]:
    """Return what of the base model is in no layer: embeddings, final norm, and pooler."""
    last = next((call for call in calls.values() if call.module is layers[-1]), None)
    if last is None:
        raise _no_layers(model)
    embeddings = set(model.base_model.parameters()) - set(layers.parameters())
    final_norm: set[nn.Parameter] = set()
    pooler: set[nn.Parameter] = set()
    for call in calls.values():
        if call.ended > last.ended:
            returns_tokens = getattr(call.first_output, "ndim", 0) == 3
            own = embeddings.intersection(call.module.parameters(recurse=False))
            (final_norm if returns_tokens else pooler).update(own)
    return embeddings - final_norm - pooler, final_norm, pooler


def _no_layers(model: PreTrainedModel) -> ModelUnsupported:
    return ModelUnsupported(
        f"no encoder of layers was found in {type(model).__name__}: looked in its base model for a "
        "list of like modules, each of which runs",
        remedy="choose a BERT-like encoder, such as bert-base-uncased",
    )


def _find_output_layer(model: PreTrainedModel, calls: dict[str, Call]) -> Call:
    linear = [
        call
        for call in calls.values()
        if isinstance(call.module, nn.Linear) and call.output.shape[-1] == model.config.num_labels
    ]
    if not linear:
        raise ModelUnsupported(
            f"no output layer was found in {type(model).__name__}: looked for a linear module with "
            f"{model.config.num_labels} outputs",
            remedy="choose a model that AutoModelForSequenceClassification knows",
        )
    return max(linear, key=lambda call: call.ended)


def _takes_4d_mask(model: PreTrainedModel, tokens: torch.Tensor) -> bool:
    """Try whether a ready mask means the same as the usual one.

    With it transformers need not ask the device, at every forward, whether all is token. Where some
    layers see a window only (ModernBERT), one ready mask for all layers would undo that.
    """
    if any(getattr(model.config, name, None) for name in ("local_attention", "sliding_window")):
        return False
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 3:] = False
    expected = model(input_ids=tokens, attention_mask=mask.long()).logits
    try:
        actual = model(input_ids=tokens, attention_mask=mask[:, None, None, :]).logits
        return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    except REFUSALS:
        return False


@contextmanager
def _in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}
    model.train(False)
    with torch.no_grad():
        yield
    for module, trains in was_training.items():
        module.training = trains
