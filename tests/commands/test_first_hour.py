"""From a table to predictions with short commands."""

import json
import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from tiny_runs import Command, copy_run

from finetune.data.read import read_source
from finetune.files import read_json, read_jsonl, write_json
from finetune.tokenization.encode import encode_texts


@pytest.fixture(autouse=True)
def mails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a table of emails to the working directory."""
    monkeypatch.chdir(tmp_path)
    lines = [f"the river {number} is long,{('good', 'bad')[number % 2]}" for number in range(60)]
    file = Path("mails.csv")
    file.write_text("\n".join(["body,verdict", *lines]), encoding="utf-8")
    return file


@pytest.fixture
def two_labels() -> Path:
    """Write a table with two possible label columns."""
    lines = [f"the mail {number},{number % 3},{'ab'[number % 2]}" for number in range(30)]
    file = Path("two.csv")
    file.write_text("\n".join(["body,priority,team", *lines]), encoding="utf-8")
    return file


def test_run_and_predict_need_only_a_table_and_latest(
    command: Command, mails: Path, tiny_folder: Path
) -> None:
    options = ("--model", tiny_folder, "--device", "cpu", "--max-steps", "1", "--quiet")
    outcome = command("run", mails, *options)
    assert outcome.code == 0, outcome.errors
    [run] = Path("runs").glob("*/")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["data"]["text_column"], saved["data"]["label_column"]) == ("body", "verdict")
    Path("new.csv").write_text("other,body\n1,the river\n2,the food\n")
    predicted = command("predict", "latest", "new.csv", "--quiet")
    assert len(predicted.output.splitlines()) == 3, predicted.errors
    assert predicted.errors == f"latest: {run}\n"
    again = command("run", "latest", "--quiet")
    assert again.code == 0, again.errors
    assert f"{run}-2" in again.output
    assert again.errors == f"latest: {run}\n"
    shown = json.loads(command("config", "show", "latest", "--json").output)["options"]
    assert {one["option"]: one["value"] for one in shown}["max_steps"] == 1


def test_config_show_reports_guesses_about_a_table(command: Command, mails: Path) -> None:
    outcome = command("config", "show", mails, "--model", "minilm")
    lines = [line.split() for line in outcome.output.splitlines()]
    assert ["label_column", "verdict", "guess"] in lines
    assert ["model", "model", "minilm", "--model"] in lines
    assert "guessed: --text-column 'body' (by its name)" in outcome.errors


@pytest.mark.parametrize(
    "typed", ["run", "run --dry-run", "sweep space.yaml", "data check", "data audit"]
)
def test_table_is_read_and_tokenized_once_and_problems_are_reported_once(
    typed: str, command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"the river {number},{'ab'[number % 2]}" for number in range(60)]
    Path("mails.csv").write_text("\n".join(["body,verdict", "no label,", *lines]))
    Path("space.yaml").write_text("learning_rate: [0.001]")
    read, tokenized = Mock(side_effect=read_source), Mock(side_effect=encode_texts)
    monkeypatch.setattr("finetune.data.read.read_source", read)
    monkeypatch.setattr("finetune.model.load.encode_texts", tokenized)
    name = ("--data", "mails.csv") if "sweep" in typed else ("mails.csv",)
    training = () if "data" in typed else ("--device", "cpu", "--max-steps", "1")
    outcome = command(*typed.split(), *name, "--model", tiny_folder, *training)
    assert outcome.code == 0, outcome.errors
    read.assert_called_once()
    columns = [call.args[1] for call in tokenized.mock_calls]
    # Explanations tokenize lists of changed texts.
    texts = [
        text for column in columns if not isinstance(column, list) for text in column.to_pylist()
    ]
    assert not {*texts} & {line.split(",")[0] for line in lines}
    errors = outcome.errors
    assert errors.count("reading mails.csv: encoding utf-8, delimiter comma") == 1
    assert errors.count("guessed: --text-column 'body' (by its name)") == 1
    assert "texts from column" not in errors
    assert errors.count("1 of 61 rows skipped: empty text or label") == 1
    for folder in (path.parent for path in Path("runs").rglob("config.yaml")):
        [warning] = [
            line["message"]
            for line in read_jsonl(folder / "warnings.jsonl")
            if "skipped" in line["message"]
        ]
        assert "the first in line 2 of mails.csv" in warning


@pytest.mark.parametrize("typed", [("run",), ("init",), ("data", "check"), ("config", "show")])
def test_ambiguous_label_columns_raise_an_error_that_lists_them(
    typed: tuple[str, ...], command: Command, two_labels: Path
) -> None:
    command(*typed, two_labels).assert_rejected(2, "'priority'", "'team'", "--label-column")
    assert not Path("runs").exists()


def test_file_argument_can_be_a_config_a_preset_or_data(command: Command, mails: Path) -> None:
    Path("mine.yaml").write_text(f"data:\n  data: {mails}\ntraining:\n  seed: 7\n")
    Path("texts.yaml").write_text("data: [{text: a, label: b}]\n")
    for file, option, value in (
        ("mine.yaml", "seed", 7),
        ("offline", "model", "minilm"),
        ("questions", "data", "questions"),
    ):
        outcome = command("config", "show", file, "--json")
        found = {one["option"]: one["value"] for one in json.loads(outcome.output)["options"]}
        assert found[option] == value
    command("run", "texts.yaml").assert_rejected(
        2, "texts.yaml has no sections", "write them as CSV"
    )
    outcome = command("run", "mine.yaml", "--config", "offline")
    outcome.assert_rejected(2, "mine.yaml and --config offline")


def test_latest_is_the_newest_finished_run(command: Command, finished_run: Path) -> None:
    command("report", "latest").assert_rejected(2, "no finished run in")
    older, newer = (copy_run(finished_run, Path("runs") / name) for name in ("b", "a"))
    (newer / "all_results.json").touch()
    started = Path("runs/c")
    started.mkdir()
    (started / "config.yaml").write_text("")
    assert f"latest: {newer}" in command("export", "onnx", "latest", "--output-dir", older).errors
    compared = command("compare", "latest", older)
    assert compared.code == 0
    assert f"latest: {newer}" in compared.errors


def test_folds_are_listed_but_skipped_by_latest(command: Command, finished_run: Path) -> None:
    def fold(name: str, number: int = 1) -> Path:
        copy_run(finished_run, Path("runs") / name / f"fold-{number}")
        (Path("runs") / name / "folds.json").write_text('{"folds": [1], "best": null}')
        return Path("runs") / name

    run = copy_run(finished_run, Path("runs/run"))
    # One was killed before it wrote its predictions, one is damaged, one finished.
    killed, damaged, folds = map(fold, ("killed", "damaged", "folds"))
    (damaged / "folds.json").write_text("{")
    scores = read_json(finished_run / "all_results.json")
    test = {key[5:]: value for key, value in scores.items() if key.startswith("test_")}
    content = {"folds": [1], "best": None, "test": test, "intervals": {}}
    write_json(folds / "folds.json", content)
    for number, path in enumerate((run / "all_results.json", folds / "predictions.jsonl",
                                   folds / "folds.json")):  # fmt: skip
        path.touch()
        os.utime(path, (time.time() + number,) * 2)
    listed = {
        row["run"]: row["status"] for row in json.loads(command("runs", "--json").output)["runs"]
    }
    assert listed == {str(run): "finished", str(killed): "not finished",
                      str(damaged): "unreadable", str(folds): "unreadable"}  # fmt: skip
    write_json(folds / "folds.json", content | {"intervals": {"accuracy": {"low": 0, "high": 1}}})
    listed = json.loads(command("runs", "--json").output)["runs"]
    assert ("1 folds", scores["test_accuracy"]) in [(row["status"], row["value"]) for row in listed]
    errors = command("evaluate", "latest").errors
    skipped = f"latest: skipped {folds}, which has the folds of a cross-validation and no model"
    assert errors.splitlines()[:2] == [skipped, f"latest: {run}"]
    shutil.rmtree(run)
    outcome = command("predict", "latest", "Who?")
    outcome.assert_rejected(
        2, f"nearly all rows with finetune run {folds}/fold-1/config.yaml --test-fraction 0.02"
    )


def test_runs_are_listed_newest_first(command: Command, finished_run: Path) -> None:
    assert "no runs in" in command("runs").output
    for name in ("older", "newer"):
        copy_run(finished_run, Path("runs") / name)
        (Path("runs") / name / "all_results.json").touch()
    started = Path("runs/started")
    started.mkdir()
    (started / "config.yaml").write_text("data:\n  data: mails.csv\n")
    _, *rows = command("runs").output.splitlines()
    assert [row.split()[0] for row in rows] == ["runs/started", "runs/newer", "runs/older"]
    assert "not finished" in rows[0]
    assert "accuracy" in rows[1]
    [_, newer, _] = json.loads(command("runs", "--json").output)["runs"]
    assert newer["low"] < newer["value"] < newer["high"]
