from dataclasses import fields, replace

import pytest
from tiny_models import tiny_model

from finetune.config.modes import MODES, Mode, ModeKind
from finetune.config.schema import ModelConfig
from finetune.model.structure import Structure, find_structure


def test_modes_refer_to_existing_parts_and_options() -> None:
    parts, options = ({one.name for one in fields(kind)} for kind in (Structure, ModelConfig))
    for kind in MODES.values():
        assert parts.issuperset(kind.trains)
        assert options.issuperset(kind.options)


def test_new_mode_with_a_frozen_encoder_excludes_encoder_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODES, "new", ModeKind(("output_layer",)))
    assert "--lora-rank" in Mode("new").excludes
    assert not Mode("last-2").excludes


@pytest.mark.parametrize("name", ["last-N", "last-0", "last", "lora-2", "head-1", "Full"])
def test_invalid_mode_names_are_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not one of full, last-N, lora,"):
        Mode(name)


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "full"),
        ({"train_layers": 2}, "last-2"),
        ({"lora_rank": 8}, "lora"),
        ({"lora_rank": 8, "train_layers": 3}, "lora-last-3"),
        ({"freeze_core": True}, "head"),
        ({"freeze_core": True, "head": "classifier"}, "classifier"),
    ],
)
def test_model_options_select_the_mode(options: dict[str, object], mode: str) -> None:
    assert ModelConfig(**options).mode == mode  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "hidden_size", "rate"),
    [("full", 768, 5e-5), ("last-2", 384, 1e-4), ("head", 384, 5e-4)],
)
def test_default_learning_rate_depends_on_mode_and_hidden_size(
    mode: str, hidden_size: int, rate: float
) -> None:
    structure = find_structure(tiny_model())
    actual = Mode(mode).learning_rate(hidden_size=hidden_size, structure=structure)
    assert actual == pytest.approx(rate)


@pytest.mark.parametrize(
    ("output_layer_input", "rate"), [(1.0, 7e-3), (0.07, 0.1), (0.123456, 0.057), (0.0, 0.01)]
)
def test_output_layer_learning_rate_depends_on_the_scale_of_its_input(
    output_layer_input: float, rate: float
) -> None:
    structure = replace(find_structure(tiny_model()), output_layer_input=output_layer_input)
    mode = Mode("classifier")
    linear = replace(structure, new=structure.output_layer)
    assert mode.learning_rate(hidden_size=768, structure=linear) == rate
    with_pooler = replace(structure, new=structure.head)
    assert mode.learning_rate(hidden_size=768, structure=with_pooler) == 5e-4


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
def test_defaults_depend_on_mode_and_steps_per_epoch(
    mode: str, steps_per_epoch: int, epochs: int, multiplier: float, decay: float, patience: int
) -> None:
    values = Mode(mode).defaults(steps_per_epoch=steps_per_epoch)
    assert [*values.values()] == [epochs, multiplier, decay, patience]
