import json

import pytest
from tiny_runs import Command

from finetune.config.load import presets_folder
from finetune.files import SCHEMA_VERSION


def test_show_prints_each_value_with_its_origin(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_BATCH_SIZE", "7")
    outcome = command(
        "config", "show", "-c", "trec_head", "--max_length", "64", "--set", "data.label=label-fine"
    )
    assert outcome.code == 0
    lines = [line.split() for line in outcome.output.splitlines()]
    assert ["batch_size", "7", "FINETUNE_BATCH_SIZE"] in lines
    assert ["max_length", "64", "--max-length"] in lines
    assert ["label", "label-fine", "--set", "data.label"] in lines
    assert ["output", "output_dir", "null", "default"] in lines
    [frozen] = [line for line in lines if "freeze_core" in line]
    assert frozen[1] == "true"
    assert frozen[2].startswith("/")
    shown = json.loads(command("config", "show", "--json", "--seed", "3").output)
    assert shown["schema_version"] == SCHEMA_VERSION
    assert {"section": "training", "option": "seed", "value": 3, "origin": "--seed"} in (
        shown["options"]
    )


def test_ls_lists_each_preset_with_its_description(command: Command) -> None:
    listed = command("config", "ls").output.splitlines()
    assert dict(line.strip().split(maxsplit=1) for line in listed) == {
        path.stem: path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        for path in presets_folder().glob("*.yaml")
    }
