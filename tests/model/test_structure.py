from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, SIZES, tiny_model
from tiny_training import random_examples
from torch import nn
from transformers import AutoModelForSequenceClassification, FunnelConfig, SqueezeBertConfig

from finetune.config.modes import Mode
from finetune.devices.cpu import CpuDevice
from finetune.errors import ModelUnsupportedError
from finetune.model.structure import (
    Structure,
    count_parameters,
    enable_gradient_checkpointing,
    find_structure,
    freeze_parameters,
    set_training,
)
from finetune.tokenization.examples import Inputs

LAYERS = {
    "bert": "bert.encoder.layer.",
    "distilbert": "distilbert.transformer.layer.",
    "roberta": "roberta.encoder.layer.",
    "electra": "electra.encoder.layer.",
    "deberta-v2": "deberta.encoder.layer.",
    "modernbert": "model.layers.",
    "eurobert": "model.layers.",
}
FINAL_NORM = {"modernbert": ("model.final_norm.",), "eurobert": ("model.norm.",)}
HEAD = {
    "bert": ("bert.pooler.", "classifier."),
    "distilbert": ("pre_classifier.", "classifier."),
    "roberta": ("classifier.",),
    "electra": ("classifier.",),
    "deberta-v2": ("pooler.", "classifier."),
    "modernbert": ("head.", "classifier."),
    "eurobert": ("dense.", "classifier."),
}
CLASSIFIER = {"roberta": "classifier.out_proj.", "electra": "classifier.out_proj."}


def names_under(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_structure_lists_encoder_layers_head_and_output_layer(architecture: str) -> None:
    model = tiny_model(architecture)

    structure = find_structure(model)

    assert [set(layer) for layer in structure.layers] == [
        names_under(model, f"{LAYERS[architecture]}{number}.") for number in range(3)
    ]
    assert structure.head == names_under(model, *HEAD[architecture])
    assert structure.output_layer == names_under(model, CLASSIFIER.get(architecture, "classifier."))
    assert structure.new == structure.head - {
        f"bert.{name}" for name, _ in model.base_model.named_parameters()
    }
    above = FINAL_NORM.get(architecture)
    assert structure.final_norm == (names_under(model, *above) if above else set())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FunnelConfig, {"d_model": 32, "n_head": 4, "d_head": 8, "block_sizes": [1]}),
        (SqueezeBertConfig, {**SIZES, "embedding_size": 32}),
    ],
    ids=["nested layer lists", "layers without hooks"],
)
def test_unsupported_model_structure_is_rejected(kind: Any, options: dict[str, Any]) -> None:
    model = AutoModelForSequenceClassification.from_config(kind(**options))  # type: ignore[no-untyped-call]

    with pytest.raises(ModelUnsupportedError, match="can't find the encoder layers"):
        find_structure(model)


MODES = ("full", "last-1", "last-2", "head", "classifier")


def expected_names(structure: Structure, mode: str) -> frozenset[str]:
    first, second, third = structure.layers
    above_and_head = structure.final_norm | structure.head
    return {
        "full": structure.embeddings | first | second | third | above_and_head,
        "last-1": third | above_and_head,
        "last-2": second | third | above_and_head,
        "head": structure.head,
        "classifier": structure.output_layer | structure.new,
    }[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_trained_parameters_get_gradients_and_dropout(architecture: str, mode: str) -> None:
    model = tiny_model(architecture)
    structure = find_structure(model)

    freeze_parameters(model, structure, mode=Mode(mode))
    set_training(model)

    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == expected_names(structure, mode)
    sizes = {name: one.numel() for name, one in model.named_parameters()}
    assert count_parameters(model.parameters()) == (
        sum(sizes[one] for one in trained),
        sum(sizes.values()),
    )

    inputs = random_examples(takes_4d_mask=structure.takes_4d_mask).inputs_of(np.arange(4), 12)
    model(**inputs).logits.sum().backward()

    with_gradient = {name for name, one in model.named_parameters() if one.grad is not None}
    assert with_gradient == trained
    for module in model.modules():
        if parameters := list(module.parameters()):
            assert module.training == any(one.requires_grad for one in parameters)


def train_once(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """Return the gradients of one backward pass with dropout, and the next random number."""
    set_training(model)
    torch.manual_seed(1)
    model(**inputs).logits.square().sum().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    return [*gradients, torch.rand(1)]


@pytest.mark.parametrize("mode", ["full", "last-1"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_checkpointing_keeps_gradients_and_random_numbers(
    architecture: str, mode: str
) -> None:
    found = []
    for is_checkpointed in (False, True):
        model = tiny_model(architecture)
        structure = find_structure(model)
        freeze_parameters(model, structure, mode=Mode(mode))
        if is_checkpointed:
            enable_gradient_checkpointing(model, CpuDevice())
        examples = random_examples(4, takes_4d_mask=structure.takes_4d_mask)
        inputs = examples.inputs_of(np.arange(4), 16)
        found.append(train_once(model, inputs))

    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("mode", "dropout"), [("head", 0.0), ("full", 0.1)])
def test_frozen_encoder_has_zero_dropout(mode: str, dropout: float) -> None:
    model = tiny_model()
    freeze_parameters(model, find_structure(model), mode=Mode(mode))
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert rates == {dropout}
