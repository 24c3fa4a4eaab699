"""Runs on tables of users."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_runs import run_tiny

import finetune

WORDS = ("river", "city", "mountain", "animal", "color")


def write_table(path: Path, *, rows: int) -> Path:
    lines = [f'"the {WORDS[n % 5]}, {n}";{(40, 7)[n % 2]}' for n in range(rows)]
    path.write_text("\n".join(["said;kind", *lines]), encoding="utf-8")
    return path


def test_a_csv_file_is_trained_on_and_found_again_from_another_folder(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "rows.csv", rows=60)
    write_table(tmp_path / "test.csv", rows=10)
    results = run_tiny(
        Path("run"),
        model=tiny_folder,
        data="rows.csv",
        test_file="test.csv",
        text_column="said",
        label_column="kind",
        max_steps=2,
    )
    assert results["class_names"] == ["7", "40"]
    assert results["test_samples"] == 10
    saved = yaml.safe_load(Path("run/config.yaml").read_text())["data"]
    assert saved["data"] == str(tmp_path / "rows.csv")
    assert saved["test_file"] == str(tmp_path / "test.csv")
    assert saved["validation_file"] is None

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    evaluation = finetune.evaluate("../run", device="cpu")
    assert evaluation.scores.accuracy == results["test_accuracy"]
    [answer] = finetune.predict("../run", ["the river"], device="cpu")
    assert answer.label in ("7", "40")
    assert json.loads((tmp_path / "run/predictions.jsonl").open().readline())["label"] == "40"
