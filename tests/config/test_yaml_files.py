import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.config.yaml_files import (
    MAX_LINE,
    find_preset,
    make_json_schema,
    make_starter,
    presets_folder,
)
from finetune.data.load import load_splits

PRESETS = sorted(presets_folder().glob("*.yaml"))


def load(name: str) -> Config:
    return load_config(file=name).config


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_says_what_it_is_for(path: Path) -> None:
    load(str(path))
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("name", "texts", "label", "values", "task"),
    [
        ("go_emotions_multi", ["text"], "labels", (["joy", "fear"], ["joy"]), "multi"),
        ("imdb_windows", ["text"], "label", ("neg", "pos"), "single"),
        ("mrpc_pairs", ["sentence1", "sentence2"], "label", ("no", "yes"), "single"),
        ("stsb_scores", ["sentence1", "sentence2"], "score", (0.5, 0.75), "regression"),
    ],
)
def test_a_preset_reads_the_columns_of_its_dataset(
    name: str, texts: Sequence[str], label: str, values: Sequence[Any], task: str, tmp_path: Path
) -> None:
    """A table with these columns replaces the one of the Hub."""
    rows = [
        json.dumps({label: values[number % 2]} | {key: f"{key} {number}" for key in texts})
        for number in range(60)
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(rows))
    loaded = load_splits(replace(load(name).data, data=str(table)))
    assert loaded.task.name == task
    assert ("text_pair" in loaded.splits["train"].column_names) == (len(texts) == 2)


@pytest.mark.parametrize("name", ["trec_head", "trec_head.yaml", "configs/trec_head.yaml"])
def test_a_preset_is_found_by_its_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_preset(name) == presets_folder() / "trec_head.yaml"


DEFAULTS = {
    option: value for section in asdict(Config()).values() for option, value in section.items()
}


def starter(values: dict[str, Any], **notes: str) -> str:
    return make_starter(values, notes=notes, heading="Made for a test.")


def test_a_default_is_a_comment_that_loads_once_its_mark_is_gone() -> None:
    text = starter(DEFAULTS)
    assert yaml.safe_load(text) == {section.name: None for section in fields(Config)}
    names = [f"  # {option}: " for option in DEFAULTS]
    active = [
        line.replace("# ", "", 1) if line.startswith(tuple(names)) else line
        for line in text.splitlines()
    ]
    assert yaml.safe_load("\n".join(active)) == asdict(Config())


def test_each_option_is_explained_by_its_help_and_a_note() -> None:
    lines = starter({"max_length": 64, "seed": 7}, seed="Any number will do.").splitlines()
    assert max(map(len, lines)) <= MAX_LINE
    comments = " ".join(line.strip(" #") for line in lines)
    assert "Maximum tokens per text. max_length: 64" in comments
    assert "order and dropout. Any number will do. seed: 7" in comments


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = make_json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_schema_admits_every_preset(path: Path, validator: Draft202012Validator) -> None:
    validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "content",
    [
        {"trainig": {}},
        {"training": {"lerning_rate": 1e-3}},
        {"data": {"learning_rate": 1e-3}},
        {"training": {"batch_size": 0}},
        {"training": {"precision": "fp8"}},
        {"data": {"validation_fraction": 1.0}},
        {"model": []},
    ],
    ids=str,
)
def test_the_schema_refuses_typos_and_values_out_of_range(
    content: Any, validator: Draft202012Validator
) -> None:
    assert not validator.is_valid(content)
