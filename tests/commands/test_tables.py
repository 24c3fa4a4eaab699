"""Runs on tables of users."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_runs import run_tiny

import finetune
from finetune.commands.predict import read_file

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


def test_columns_that_a_run_has_guessed_are_read_of_other_tables_that_have_them(
    tmp_path: Path, tiny_folder: Path
) -> None:
    run, rows = tmp_path / "run", write_table(tmp_path / "rows.csv", rows=60)
    run_tiny(run, model=tiny_folder, data=str(rows), max_steps=1)
    more, other = tmp_path / "more.csv", tmp_path / "other.csv"
    head, *lines = rows.read_text().splitlines()
    remarks = (f"{line};a remark of many words on row {n}" for n, line in enumerate(lines))
    more.write_text("\n".join([f"{head};remark", *remarks]))
    other.write_text(rows.read_text().replace("said", "words"))

    expected, *same = (
        finetune.evaluate(run, data=table, device="cpu").scores for table in (rows, more, other)
    )
    assert same == [expected, expected]
    expected, *same = (
        [text for piece in read_file(run, table) for text in piece[:].texts]
        for table in (rows, more, other)
    )
    assert same == [expected, expected]
