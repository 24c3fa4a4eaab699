"""Folders of new runs: named after what they train, reserved immediately, deleted if unused."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK

import finetune
from finetune.config.schema import Config, DataConfig
from finetune.events import Event
from finetune.runs.request import RunRequest

ONE_UPDATE: dict[str, Any] = QUICK | {
    "max_train_samples": 16,
    "max_steps": 1,
    "validation_fraction": 0,
}


@pytest.mark.parametrize(
    ("data", "name"),
    [("some/rows.csv", "rows"), ("hub:acme/rows@refs/pr/1", "rows"), ("trec", "trec")],
)
def test_the_run_folder_is_named_after_the_data(data: str, name: str) -> None:
    config = Config(data=DataConfig(data=data))
    assert RunRequest(config).default_name == f"{name}-bert-base-uncased-full"


def test_runs_without_a_folder_are_numbered_and_reserve_theirs_before_anything_is_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reserved: list[bool] = []

    def look(event: Event) -> None:
        if not reserved:
            reserved.append(Path("runs/questions-tiny-full").is_dir())

    options = {**ONE_UPDATE, "model": str(tiny_folder)}
    folders = [finetune.run(**options, emit=look).output_dir, finetune.run(**options).output_dir]
    assert folders == ["runs/questions-tiny-full", "runs/questions-tiny-full-2"]
    assert all(Path(folder, "model").is_dir() for folder in folders)
    assert reserved == [True]
