import re
import typing
from dataclasses import fields, replace

import pytest
from tiny_models import tiny_model

from finetune.config.schema import OPTIONS, Config, Mode, default_learning_rate, mode_defaults
from finetune.model.structure import find_structure


def test_every_option_has_a_name_of_its_own_and_help_in_a_sentence() -> None:
    kinds = typing.get_type_hints(Config).values()
    assert len(OPTIONS) == sum(len(fields(kind)) for kind in kinds)
    assert [
        one.name for one in OPTIONS.values() if not re.fullmatch(r".{10,}\.", one.description)
    ] == []


@pytest.mark.parametrize(
    ("mode", "hidden_size", "rate"),
    [("full", 768, 5e-5), ("last-2", 384, 1e-4), ("head", 384, 5e-4)],
)
def test_the_default_learning_rate_follows_from_mode_and_width(
    mode: str, hidden_size: int, rate: float
) -> None:
    structure = find_structure(tiny_model())
    actual = default_learning_rate(Mode(mode), hidden_size=hidden_size, structure=structure)
    assert actual == pytest.approx(rate)


@pytest.mark.parametrize(
    ("output_layer_input", "rate"), [(1.0, 7e-3), (0.07, 0.1), (0.123456, 0.057), (0.0, 0.01)]
)
def test_the_rate_of_an_output_layer_alone_follows_from_the_size_of_what_it_reads(
    output_layer_input: float, rate: float
) -> None:
    structure = replace(find_structure(tiny_model()), output_layer_input=output_layer_input)
    mode = Mode("classifier")
    linear = replace(structure, new=structure.output_layer)
    assert default_learning_rate(mode, hidden_size=768, structure=linear) == rate
    with_pooler = replace(structure, new=structure.head)
    assert default_learning_rate(mode, hidden_size=768, structure=with_pooler) == 5e-4


@pytest.mark.parametrize(
    ("mode", "steps_per_epoch", "epochs", "multiplier", "decay", "patience"),
    [
        ("full", 84, 3, 10, 0.01, 0),
        ("last-2", 10, 25, 10, 0.01, 8),
        ("lora", 10, 40, 1, 0, 8),
        ("head", 1, 100, 1, 0, 30),
        ("classifier", 1000, 14, 1, 0, 5),
    ],
)
def test_defaults_follow_from_the_mode_and_the_rows(
    mode: str, steps_per_epoch: int, epochs: int, multiplier: float, decay: float, patience: int
) -> None:
    values = mode_defaults(Mode(mode), steps_per_epoch=steps_per_epoch)
    assert [*values.values()] == [epochs, multiplier, decay, patience]
