from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from finetune.config.describe import describe_options, make_json_schema
from finetune.config.load import load_config
from finetune.config.recipes import recipes_folder
from finetune.config.schema import SECTION_OF_OPTION, Config

RECIPES = sorted(recipes_folder().glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = make_json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def origins_and_values(**sources: Any) -> dict[str, tuple[str, Any]]:
    loaded = load_config(
        **{"file": None, "environment": {}, "flags": {}, "assignments": ()} | sources
    )
    return {one["option"]: (one["origin"], one["value"]) for one in describe_options(loaded)}


def test_every_option_is_described_in_the_order_of_the_schema() -> None:
    described = describe_options(load_config(file=None, environment={}, flags={}, assignments=()))
    assert {one["option"]: one["section"] for one in described} == SECTION_OF_OPTION
    assert [one["option"] for one in described] == list(SECTION_OF_OPTION)
    assert {one["origin"] for one in described} == {"default"}


def test_an_option_is_described_with_the_source_that_decided_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("training: {seed: 1, batch_size: 2, eval_batch_size: 3, max_steps: 4}")
    described = origins_and_values(
        file=str(file),
        environment={"FINETUNE_BATCH_SIZE": "20", "FINETUNE_MAX_STEPS": "40", "HOME": "/"},
        flags={"eval_batch_size": 30, "max_steps": 400},
        assignments=["training.max_steps=4000"],
    )
    assert described["seed"] == (str(file), 1)
    assert described["batch_size"] == ("FINETUNE_BATCH_SIZE", 20)
    assert described["eval_batch_size"] == ("--eval-batch-size", 30)
    assert described["max_steps"] == ("--set training.max_steps", 4000)
    assert described["warmup_fraction"] == ("default", Config().training.warmup_fraction)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_admits_every_recipe(path: Path, validator: Draft202012Validator) -> None:
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"data": None},
        {"training": {"learning_rate": None}},
        {"training": {"learning_rate": 1}},
    ],
    ids=str,
)
def test_the_schema_admits_what_loads(
    content: dict[str, Any], validator: Draft202012Validator, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    load_config(file=str(file), environment={}, flags={}, assignments=())
    assert validator.is_valid(content)


@pytest.mark.parametrize(
    "content",
    [
        {"trainig": {}},
        {"training": {"lerning_rate": 1e-3}},
        {"data": {"learning_rate": 1e-3}},
        {"training": {"batch_size": 0}},
        {"training": {"precision": "fp8"}},
        {"data": {"validation_fraction": 1.0}},
        {"model": {"freeze_core": "perhaps"}},
        {"model": []},
        [],
    ],
    ids=str,
)
def test_the_schema_refuses_typos_and_values_out_of_range(
    content: Any, validator: Draft202012Validator
) -> None:
    assert not validator.is_valid(content)


def test_the_schema_explains_every_option_as_the_help_does() -> None:
    definitions = make_json_schema()["$defs"]
    explained = {
        name: option["description"]
        for section in definitions.values()
        for name, option in section["properties"].items()
    }
    assert explained == {
        option.name: option.metadata["help"]
        for section in fields(Config)
        for option in fields(section.type)  # type: ignore[arg-type]
    }
