import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.load import (
    LoadedConfig,
    dump_config,
    find_preset,
    load_config,
    make_starter,
    parse_size,
    presets_folder,
)
from finetune.config.schema import OPTIONS, Config, change_options
from finetune.data.load import load_splits
from finetune.errors import ConfigurationError

WriteYaml = Callable[[str], str]


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    """Return a function that writes a file and returns its name."""

    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def load(
    file: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
) -> LoadedConfig:
    return load_config(file=file, environment=environment, flags=flags, assignments=assignments)


def test_later_sources_override_earlier_ones(write_yaml: WriteYaml) -> None:
    file = write_yaml("training: {seed: 1, batch_size: 1, max_steps: 1, weight_decay: 1}")
    loaded = load(
        file,
        environment={"FINETUNE_BATCH_SIZE": "2", "FINETUNE_MAX_STEPS": "2", "HOME": "/"},
        flags={"max_steps": 3, "learning_rate": 3.0, "freeze_core": True},
        assignments=["training.learning_rate=4", "training.weight_decay=4"],
    )
    training = loaded.config.training
    assert (training.seed, training.batch_size, training.max_steps) == (1, 2, 3)
    assert (training.learning_rate, training.weight_decay) == (4.0, 4.0)
    assert loaded.sources == {
        "seed": file,
        "batch_size": "FINETUNE_BATCH_SIZE",
        "max_steps": "--max-steps",
        "learning_rate": "--set training.learning_rate",
        "weight_decay": "--set training.weight_decay",
        "freeze_core": "--freeze-core",
    }


def test_unknown_option_suggests_the_closest_name(write_yaml: WriteYaml) -> None:
    sources: dict[str, dict[str, Any]] = {
        "config.yaml": {"file": write_yaml("training: {learning_rte: 1}")},
        "FINETUNE_LEARNING_RTE": {"environment": {"FINETUNE_LEARNING_RTE": "1"}},
        "--set": {"assignments": ["training.learning-rte=1"]},
    }
    for origin, source in sources.items():
        with pytest.raises(ConfigurationError) as raised:
            load(**source)
        assert origin in raised.value.message
        assert raised.value.remedy.startswith("did you mean learning_rate (Peak")
        assert "\n" not in raised.value.message + raised.value.remedy


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("4 gib", 4 * 2**30), ("1.5GiB", 3 * 2**29), ("2g", 2 * 10**9)]
)
def test_sizes_are_parsed_with_common_units(text: str, size_bytes: int) -> None:
    assert parse_size(text, source="--memory") == size_bytes


def test_config_survives_a_yaml_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    values = {"data": "größe: 1\n# 'a'", "train_layers": 2, "learning_rate": 3e-5, "header": False}
    config = change_options(Config(), values)
    file.write_text(dump_config(config), encoding="utf-8")
    assert load(str(file)).config == config
    assignments = ["model.train_layers=null", "training.learning_rate=NULL"]
    again = load(str(file), assignments=assignments).config
    assert (again.model.train_layers, again.training.learning_rate) == (None, None)


PRESETS = sorted(presets_folder().glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_each_preset_is_valid_and_starts_with_a_description(path: Path) -> None:
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
def test_preset_selects_the_columns_of_its_dataset(
    name: str, texts: Sequence[str], label: str, values: Sequence[Any], task: str, tmp_path: Path
) -> None:
    """A local table with the same columns replaces the Hub dataset."""
    rows = [
        json.dumps({label: values[number % 2]} | {key: f"{key} {number}" for key in texts})
        for number in range(60)
    ]
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(rows))
    loaded = load_splits(replace(load(name).config.data, data=str(table)))
    assert loaded.task.name == task
    assert ("text_pair" in loaded.splits["train"].column_names) == (len(texts) == 2)


@pytest.mark.parametrize("name", ["trec_head", "trec_head.yaml", "configs/trec_head.yaml"])
def test_preset_is_found_by_name_in_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_preset(name) == presets_folder() / "trec_head.yaml"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").touch()
    assert find_preset("~/mine.yaml") == tmp_path / "mine.yaml"


def test_starter_config_lists_defaults_as_valid_comments() -> None:
    defaults = {name: option.default for name, option in OPTIONS.items()}
    text = make_starter(defaults, notes={"seed": "Any number will do."}, heading="A test.")
    assert yaml.safe_load(text) == {section.name: None for section in fields(Config)}
    assert "Any number will do.\n  # seed: 42" in text
    names = tuple(f"  # {option}: " for option in defaults)
    active = [
        line.replace("# ", "", 1) if line.startswith(names) else line for line in text.splitlines()
    ]
    assert yaml.safe_load("\n".join(active)) == asdict(Config())
