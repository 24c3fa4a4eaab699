"""Finds and freezes encoder layers and head of a text classifier, by recording a forward pass.

The layers are the largest list of modules of one class in the base model. A module that runs after
the last layer belongs to the encoder if it returns one vector per token, and to the head if it
returns one vector per text. So the BERT pooler belongs to the head, although it is in the base
model.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from finetune.config.modes import Mode
from finetune.devices.base import Device
from finetune.errors import ConfigurationError, ModelUnsupportedError

# Exceptions raised by a forward pass on unsupported inputs.
REJECTIONS = (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Structure:
    """Parameter names by part. ``new`` head parameters are initialized randomly.

    ``output_layer_input`` is the root mean square of the output layer input for a sample text.
    """

    embeddings: frozenset[str]
    layers: tuple[frozenset[str], ...]  # the pretrained layers, from the bottom
    mean_layer: frozenset[str]  # the constant layer of ``mean_pooling``, if it was added
    final_norm: frozenset[str]  # norm of the encoder, after the last layer
    head: frozenset[str]  # everything above the encoder, the pooler included
    output_layer: frozenset[str]
    new: frozenset[str]
    output_layer_input: float
    takes_4d_mask: bool  # whether a mask can have the shape [examples, 1, 1, tokens]
    adapters: frozenset[str] = frozenset()


def find_structure(model: PreTrainedModel, *, has_mean_layer: bool = False) -> Structure:
    """Find encoder, layers and head of a model. The model is left in evaluation mode."""
    base = model.base_model
    layers = encoder_layers(model)
    calls = record_sample(model)
    last = [call for call in calls.values() if layers and call.module is layers[-1]]
    linear = [call for call in calls.values() if isinstance(call.module, nn.Linear)]
    linear = [call for call in linear if call.output.shape[-1] == model.config.num_labels]
    if base is model or not last or not linear:
        raise ModelUnsupportedError(
            f"can't find the encoder layers or the output layer of {type(model).__name__}: "
            "finetune needs a stack of identical layers and a linear classifier",
            remedy="choose a BERT-style encoder, such as bert-base-uncased",
        )
    output_layer = max(linear, key=lambda call: call.ended)
    outside = set(model.parameters()) - set(base.parameters())
    below = set(base.parameters()).difference(*(layer.parameters() for layer in layers))
    final_norm: set[nn.Parameter] = set()
    pooler: set[nn.Parameter] = set()
    for call in calls.values():
        if call.ended > last[0].ended:
            returns_tokens = getattr(call.first_output, "ndim", 0) == 3
            of_module = below.intersection(call.module.parameters(recurse=False))
            (final_norm if returns_tokens else pooler).update(of_module)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def names_of(parameters: Iterable[nn.Parameter]) -> frozenset[str]:
        return frozenset(names[parameter] for parameter in parameters)

    names_of_layers = [names_of(layer.parameters()) for layer in layers]
    mean_layer = names_of_layers.pop() if has_mean_layer else frozenset[str]()
    features = output_layer.features
    return Structure(
        embeddings=names_of(below - final_norm - pooler),
        layers=tuple(names_of_layers),
        mean_layer=mean_layer,
        final_norm=names_of(final_norm),
        head=names_of(outside | pooler),
        output_layer=names_of(output_layer.module.parameters()),
        new=names_of(outside),
        output_layer_input=0.0 if features is None else features.square().mean().sqrt().item(),
        takes_4d_mask=_takes_4d_mask(model),
    )


def encoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the largest list of modules of one class in the base model, possibly empty."""
    lists = (module for module in model.base_model.modules() if isinstance(module, nn.ModuleList))
    alike = [layers for layers in lists if len({type(layer) for layer in layers}) == 1]
    sizes = {layers: sum(map(torch.numel, layers.parameters())) for layers in alike}
    return max(alike, key=sizes.__getitem__, default=nn.ModuleList())


def record_sample(model: PreTrainedModel) -> dict[str, "Call"]:
    """Record the calls of a forward pass over two texts of five tokens, without dropout."""
    model.train(False)
    tokens = model.dummy_inputs["input_ids"][:2].to(model.device)
    return record_calls(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})


@torch.no_grad()
def _takes_4d_mask(model: PreTrainedModel) -> bool:
    """Check whether a 4-D mask, which avoids synchronization, gives the same logits."""
    # One mask for all layers would undo sliding windows (ModernBERT).
    if any(getattr(model.config, name, None) for name in ("local_attention", "sliding_window")):
        return False
    tokens = model.dummy_inputs["input_ids"][:2].to(model.device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 3:] = False
    expected = model(input_ids=tokens, attention_mask=mask.long()).logits
    try:
        actual = model(input_ids=tokens, attention_mask=mask[:, None, None, :]).logits
        return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    except REJECTIONS:
        return False


@dataclass
class Call:
    """The first call of a module in a forward pass."""

    module: nn.Module
    features: torch.Tensor | None  # the first of its arguments that can be features
    output: Any = None
    ended: int = -1  # when the module last returned, counted in calls of modules

    @property
    def first_output(self) -> Any:
        """The output, or the first of several outputs."""
        is_several = isinstance(self.output, tuple | ModelOutput) and len(self.output) > 0
        return self.output[0] if is_several else self.output


@torch.no_grad()
def record_calls(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> dict[str, Call]:
    """Run a model without a graph. Return the calls of its modules by name, in order."""
    names = {module: name for name, module in model.named_modules()}
    calls: dict[str, Call] = {}
    returns = count()

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(names[module], Call(module, find_features(args, kwargs)))

    def end(module: nn.Module, _: Any, output: Any) -> None:
        call = calls[names[module]]
        if call.ended < 0:
            call.output = output
        call.ended = next(returns)

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
        model(**inputs)
    return calls


def find_features(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first argument that can be features, or None."""
    return next((value for value in (*args, *kwargs.values()) if are_features(value)), None)


def are_features(value: Any) -> bool:
    """Whether a value is a float tensor [examples, hidden] or [examples, tokens, hidden]."""
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.is_floating_point() and value.ndim in (2, 3)


def freeze_parameters(model: nn.Module, structure: Structure, *, mode: Mode) -> None:
    """Make only the parameters of a mode require gradients."""
    set_trainable(model, trainable_parameter_names(structure, mode=mode), structure)


def set_trainable(model: nn.Module, trained: frozenset[str], structure: Structure) -> None:
    """Make only the parameters with these names require gradients.

    A frozen encoder runs without dropout: with dropout, a linear head on MiniLM loses 4 points of
    accuracy on TREC.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if trained <= structure.head:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def trainable_parameter_names(structure: Structure, *, mode: Mode) -> frozenset[str]:
    """Return the names of the parameters that a mode trains."""
    parts = [getattr(structure, part) for part in mode.kind.trains if part != "layers"]
    layers = layers_of(structure, mode=mode) if "layers" in mode.kind.trains else ()
    return frozenset[str]().union(*parts, *layers)


def layers_of(structure: Structure, *, mode: Mode) -> tuple[frozenset[str], ...]:
    """Return the parameters of each layer that a mode trains or adapts."""
    count = len(structure.layers) if mode.trained_layers is None else mode.trained_layers
    if count > len(structure.layers):
        raise ConfigurationError(
            f"the model has {len(structure.layers)} layers, not {count}",
            remedy=f"lower --train-layers to at most {len(structure.layers)}",
        )
    return structure.layers[len(structure.layers) - count :]


def set_training(model: nn.Module) -> None:
    """Turn dropout on in trainable modules and off in frozen modules."""
    parameters = list(model.parameters())
    is_frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
    model.train(not is_frozen)
    if not is_frozen:
        for child in model.children():
            set_training(child)


def count_parameters(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the number of trainable values and of all values in parameters."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in parameters]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def enable_gradient_checkpointing(model: PreTrainedModel, device: Device) -> None:
    """Make the layers of a model in training mode keep only their inputs for the backward pass.

    Gradients don't change, even with dropout. For the second run, PyTorch restores the random
    states of CPU and CUDA, but not of MPS (pytorch#127676), so the device class restores it.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelUnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing in transformers",
            remedy="drop --gradient-checkpointing, or choose another model",
        )

    @contextmanager
    def random_numbers_from(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        later_state = device.random_state()
        device.set_random_state(state)
        try:
            yield
        finally:
            device.set_random_state(later_state)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), random_numbers_from(device.random_state())

    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    with warnings.catch_warnings():
        # transformers 5.23 renamed this argument.
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[no-untyped-call]
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # Otherwise transformers warns that it can't use both.
    # Otherwise autograd would build a graph for the frozen layers.
    model.disable_input_require_grads()  # type: ignore[no-untyped-call]
