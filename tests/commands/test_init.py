"""``finetune init``."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_runs import Command

from finetune.config.load import load_config
from finetune.config.schema import Config
from finetune.files import SCHEMA_VERSION
from finetune.runs import guess, linear_head


@pytest.fixture(autouse=True)
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a table to the working directory."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"{number};the river is long [/{number}];{('good', 'bad')[number % 2]}"
        for number in range(40)
    ]
    file = Path("reviews.csv")
    file.write_text("\n".join(["id;review;verdict", *lines]), encoding="utf-8")
    return file


def test_init_prints_its_guesses(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews)
    assert outcome.code == 0
    assert "reading reviews.csv: encoding utf-8, delimiter semicolon" in outcome.errors
    shown = [" ".join(line.split()) for line in outcome.output.splitlines()]
    for line in (
        "rows 40",
        "columns id, review, verdict",
        "text column review (by its name)",
        "label column verdict (2 different values in 40 rows)",
        "split sizes in a run train: 36, test: 4",
        "good 20 the river is long [/0]",
        "model minilm (at most 100 rows per class on average: 18; others: finetune models)",
        "train with: finetune run reviews.yaml",
    ):
        assert line in shown


def test_init_prints_one_json_object(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews, "--output", "mine.yaml", "--json", "--quiet")
    seen = json.loads(outcome.output)
    assert seen["schema_version"] == SCHEMA_VERSION
    assert seen["config"] == "mine.yaml"
    assert seen["class_rows"] == {"bad": 20, "good": 20}
    written = Path("mine.yaml").read_text()
    assert yaml.safe_load(written) == {
        "data": {"data": "reviews.csv", "text_column": "review", "label_column": "verdict"},
        "model": {"model": "minilm"},
        "training": None,
    }
    reason = "at most 100 rows per class on average: 18"
    assert seen["model_reason"] == reason
    assert f"Guessed: {reason}." in written.replace("\n  #", "")


def test_options_about_the_file_are_written_to_the_config(command: Command, tmp_path: Path) -> None:
    lines = (f"отзыв {number},{number % 2}\n" for number in range(40))
    Path("table.csv").write_text("".join(lines), encoding="koi8_r")
    outcome = command("init", "table.csv", "--encoding", "koi8_r", "--no-header", "--json")
    assert json.loads(outcome.output)["examples"]["1"] == "отзыв 1"
    config = load_config(file="table.yaml").config.data
    assert (config.encoding, config.header) == ("koi8_r", False)
    assert (config.text_column, config.label_column) == ("column1", "column2")


def test_linear_head_estimate_reads_texts_up_to_proposed_length(
    command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"{'what is this city ' * 60}{number},{number % 2}" for number in range(40)]
    Path("long.csv").write_text("\n".join(["text,label", *rows]))
    configs: list[Config] = []
    # The tiny model reads 64 tokens. Without a tokenizer, the length is estimated.
    monkeypatch.setattr(guess, "measure_tokens", lambda *_: None)
    monkeypatch.setattr(
        linear_head, "estimate_linear_head", lambda config, *_: configs.append(config)
    )
    assert command("init", "long.csv", "--model", tiny_folder).code == 0
    proposed = load_config(file="long.yaml").config.model.max_length
    assert configs[0].model.max_length == proposed > 128


def test_class_names_that_may_be_missing_labels_are_reported(
    command: Command, tmp_path: Path
) -> None:
    rows = [f"film {number},{('good', 'bad', 'n/a')[number % 3]}" for number in range(30)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]))
    outcome = command("init", tmp_path / "films.csv", "--output", tmp_path / "films.yaml")
    assert "usually mean a missing label: 'n/a'" in outcome.errors
