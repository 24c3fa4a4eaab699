import numpy as np
import pytest
from tiny_models import ARCHITECTURES, tiny_model
from tiny_training import random_examples

from finetune.config.mode import Mode
from finetune.errors import ConfigurationError
from finetune.model.freeze import count_parameters, freeze_parameters, set_training
from finetune.model.structure import Structure, find_structure

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
def test_a_mode_trains_its_part_and_nothing_else_gets_a_gradient_or_dropout(
    architecture: str, mode: str
) -> None:
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


def test_more_layers_than_there_are_is_refused() -> None:
    model = tiny_model()

    with pytest.raises(ConfigurationError, match="has 3 layers, not 4") as caught:
        freeze_parameters(model, find_structure(model), mode=Mode("last-4"))

    assert "at most 3" in caught.value.remedy
