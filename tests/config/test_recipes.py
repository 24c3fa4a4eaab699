import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.config.load import load_config
from finetune.config.recipes import find_recipe, recipes_folder
from finetune.config.schema import Config, mode_of
from finetune.errors import ConfigurationInvalid
from finetune.events import ignore
from finetune.runs.data import load_run_data

RECIPES = sorted(recipes_folder().glob("*.yaml"))


def load(name: str) -> Config:
    return load_config(file=name, environment={}, flags={}, assignments=()).config


def test_the_recipes_are_found() -> None:
    assert {path.stem for path in RECIPES} == {
        *("offline", "trec_full", "trec_head", "trec_top2"),
        *("go_emotions_multi", "imdb_windows", "mrpc_pairs", "stsb_scores"),
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_says_what_it_is_for(path: Path) -> None:
    load(str(path))
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("name", "data", "model", "mode"),
    [
        ("offline", "questions", "minilm", "full"),
        ("trec_full", "trec", "bert-base-uncased", "full"),
        ("trec_head", "trec", "bert-base-uncased", "head"),
        ("trec_top2", "trec", "bert-base-uncased", "last-2"),
    ],
)
def test_a_recipe_makes_what_its_name_says(name: str, data: str, model: str, mode: str) -> None:
    config = load(name)
    assert (config.data.data, config.model.model, mode_of(config.model)) == (data, model, mode)


@pytest.mark.parametrize(
    ("name", "texts", "label", "values", "task"),
    [
        ("go_emotions_multi", ["text"], "labels", (["joy", "fear"], ["joy"]), "multi"),
        ("imdb_windows", ["text"], "label", ("neg", "pos"), "single"),
        ("mrpc_pairs", ["sentence1", "sentence2"], "label", ("no", "yes"), "single"),
        ("stsb_scores", ["sentence1", "sentence2"], "score", (0.5, 0.75), "regression"),
    ],
)
def test_a_recipe_reads_the_columns_of_its_data_set(
    name: str, texts: Sequence[str], label: str, values: Sequence[Any], task: str, tmp_path: Path
) -> None:
    """A table of ours with these columns stands in for that of the Hub."""
    rows = [
        json.dumps({label: values[number % 2]} | {key: f"{key} {number}" for key in texts})
        for number in range(60)
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(rows))
    loaded = load_run_data(replace(load(name).data, data=str(table)), emit=ignore)
    assert loaded.task.name == task
    assert ("text_pair" in loaded.splits["train"].column_names) == (len(texts) == 2)


@pytest.mark.parametrize("name", ["trec_head", "trec_head.yaml", "configs/trec_head.yaml"])
def test_a_recipe_is_found_by_its_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == recipes_folder() / "trec_head.yaml"


def test_a_file_of_the_users_comes_before_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trec_head.yaml").write_text("training: {seed: 7}")
    assert load("trec_head.yaml").training.seed == 7


def test_an_unknown_recipe_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigurationInvalid, match="no configuration file trec_haed") as raised:
        find_recipe("trec_haed")
    assert all(path.stem in raised.value.remedy for path in RECIPES)


@pytest.mark.parametrize("name", ["mine/offline.yaml", "offline.yml", "offline.json", "."])
def test_a_missing_file_of_the_users_is_not_replaced_by_a_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationInvalid):
        find_recipe(name)
