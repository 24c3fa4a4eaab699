"""Freezes what a mode does not train."""

from collections.abc import Iterable

from torch import nn

from finetune.config.mode import Mode
from finetune.errors import ConfigurationError
from finetune.model.structure import Structure


def freeze_parameters(model: nn.Module, structure: Structure, *, mode: Mode) -> None:
    """Let only the parameters of a mode require gradients."""
    set_trainable(model, trainable_parameter_names(structure, mode=mode), structure)


def set_trainable(model: nn.Module, trained: frozenset[str], structure: Structure) -> None:
    """Let only the parameters of some names require gradients.

    Over a frozen encoder there is no dropout, with which MiniLM's output layer alone stays 4 points
    of accuracy behind on TREC.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if trained <= structure.head:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def trainable_parameter_names(structure: Structure, *, mode: Mode) -> frozenset[str]:
    """Return the names of the parameters that a mode trains."""
    if mode == "head":
        return structure.head
    if mode == "classifier" or mode.is_lora:
        # What is new would otherwise stay as random as it was drawn.
        return structure.adapters | structure.output_layer | structure.new
    if mode.trained_layers is None:
        return structure.head.union(structure.final_norm, structure.embeddings, *structure.layers)
    return structure.head.union(structure.final_norm, *layers_of(structure, mode=mode))


def layers_of(structure: Structure, *, mode: Mode) -> tuple[frozenset[str], ...]:
    """Return the parameters of each layer that a mode trains, or gives adapters."""
    count = len(structure.layers) if mode.trained_layers is None else mode.trained_layers
    if count > len(structure.layers):
        raise ConfigurationError(
            f"the model has {len(structure.layers)} layers, not {count}",
            remedy=f"lower --train-layers to at most {len(structure.layers)}",
        )
    return structure.layers[len(structure.layers) - count :]


def set_training(model: nn.Module) -> None:
    """Switch dropout on in what trains and off in what is frozen."""
    parameters = list(model.parameters())
    is_frozen = bool(parameters) and not any(one.requires_grad for one in parameters)
    model.train(not is_frozen)
    if not is_frozen:
        for child in model.children():
            set_training(child)


def count_parameters(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return how many numbers of some parameters train, and how many there are."""
    sizes = [(one.numel(), one.requires_grad) for one in parameters]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
