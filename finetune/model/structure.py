"""Finds core, layers and head of a sequence classifier by running it once, not by names.

A few tokens go through the model while hooks note which module ran when and what shape it returned.
The layers are the largest list of like modules in the core. What runs after the last of them and
still returns a vector a token belongs to the core; what returns a vector a text, to the head: so
BERT's pooler is found to be head although it is stored in the core.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.errors import ModelUnsupported


@dataclass(frozen=True)
class Structure:
    """The names of a classifier's parameters, by where they stand.

    Args:
        below: Embeddings, and whatever else of the core runs before its last layer.
        layers: Each layer of the core, from the bottom.
        above: What of the core runs after the last layer, such as a final norm.
        head: Everything on top of the core, the pooler included.
        classifier: The part of the head that gives the logits.
        classifier_input: Root mean square of the numbers that the classifier reads, for some text.
        takes_4d_mask: Whether attention takes a ready mask of shape [rows, 1, 1, tokens].
    """

    below: frozenset[str]
    layers: tuple[frozenset[str], ...]
    above: frozenset[str]
    head: frozenset[str]
    classifier: frozenset[str]
    classifier_input: float
    takes_4d_mask: bool


def find_structure(model: PreTrainedModel) -> Structure:
    """Find where core, layers and head of a classifier are.

    Args:
        model: A sequence classifier on any device; left as it was.

    Raises:
        ModelUnsupported: If it has no core of layers, or no linear classifier on top.
    """
    layers = _find_layers(model)
    with _in_evaluation(model):
        calls = _record_calls(model)
        if layers[-1] not in calls:
            raise _no_layers(model)
        takes_4d_mask = _takes_4d_mask(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    end_of_layers = calls[layers[-1]].order
    core = set(model.base_model.parameters())
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    above: set[nn.Parameter] = set()
    head = set(names) - core
    for module, call in calls.items():
        own = {*module.parameters(recurse=False)} & core - in_layers
        if call.order > end_of_layers:
            (above if call.has_tokens else head).update(own)
    classifier = _find_classifier(model, calls)
    return Structure(
        below=frozenset(names[one] for one in core - in_layers - above - head),
        layers=tuple(frozenset(names[one] for one in layer.parameters()) for layer in layers),
        above=frozenset(names[one] for one in above),
        head=frozenset(names[one] for one in head),
        classifier=frozenset(names[one] for one in classifier.parameters()),
        classifier_input=calls[classifier].input_size,
        takes_4d_mask=takes_4d_mask,
    )


@dataclass(frozen=True)
class _Call:
    order: int
    has_tokens: bool
    classes: int
    input_size: float


def _find_layers(model: PreTrainedModel) -> nn.ModuleList:
    lists = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len({type(layer) for layer in module}) == 1
    ]
    if model.base_model is model or not lists:
        raise _no_layers(model)
    return max(lists, key=lambda layers: sum(one.numel() for one in layers.parameters()))


def _no_layers(model: PreTrainedModel) -> ModelUnsupported:
    return ModelUnsupported(
        f"no core of layers was found in {type(model).__name__}: looked in its base model for a "
        "list of like modules, each of which runs",
        remedy="choose a BERT-like encoder, such as bert-base-uncased",
    )


def _find_classifier(model: PreTrainedModel, calls: dict[nn.Module, _Call]) -> nn.Module:
    linear = [
        module
        for module, call in calls.items()
        if isinstance(module, nn.Linear) and call.classes == model.config.num_labels
    ]
    if not linear:
        raise ModelUnsupported(
            f"no classifier was found in {type(model).__name__}: looked for a linear module with "
            f"{model.config.num_labels} outputs",
            remedy="choose a model that AutoModelForSequenceClassification knows",
        )
    return max(linear, key=lambda module: calls[module].order)


def _record_calls(model: PreTrainedModel) -> dict[nn.Module, _Call]:
    """Run two texts through the model; modules in the order in which they ended."""
    tokens = _two_texts(model)
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        shape = tuple(first.shape) if isinstance(first, torch.Tensor) else ()
        calls[module] = _Call(
            order=len(calls),
            has_tokens=len(shape) == 3,
            classes=shape[-1] if shape else 0,
            input_size=_root_mean_square(inputs),
        )

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _two_texts(model: PreTrainedModel) -> torch.Tensor:
    """Return the tokens of two texts of five tokens, [2, 5], where the model is."""
    tokens: torch.Tensor = model.dummy_inputs["input_ids"][:2]
    return tokens.to(model.device)


def _root_mean_square(inputs: tuple[Any, ...]) -> float:
    for first in inputs[:1]:
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            return first.square().mean().sqrt().item()
    return 0.0


def _takes_4d_mask(model: PreTrainedModel) -> bool:
    """Try whether a ready mask means the same as the usual one.

    With it transformers need not ask the device, at every forward, whether all is token. Where some
    layers see a window only (ModernBERT), one ready mask for all layers would undo that.
    """
    if getattr(model.config, "local_attention", None) or getattr(
        model.config, "sliding_window", None
    ):
        return False
    tokens = _two_texts(model)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 3:] = False
    expected = model(input_ids=tokens, attention_mask=mask.long()).logits
    try:
        actual = model(input_ids=tokens, attention_mask=mask[:, None, None, :]).logits
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def _in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    was_training = {module: module.training for module in model.modules()}
    model.train(False)
    with torch.no_grad():
        yield
    for module, trains in was_training.items():
        module.training = trains
