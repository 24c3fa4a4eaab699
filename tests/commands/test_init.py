"""``finetune init``, as a function and as a command."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import Command

from finetune.commands.init import TableFacts, look_at_table, make_config
from finetune.config.load import load_config
from finetune.config.schema import Config, DataConfig

Row = dict[str, Any]


def rows(*, praise: int = 10, blame: int = 10, text: str = "It was {} and {}.") -> list[Row]:
    return [
        {"no": number, "text": text.format(label, number), "label": label}
        for label, count in (("praise", praise), ("blame", blame))
        for number in range(count)
    ]


def look(
    folder: Path, table: Sequence[Row], *, model: str | None = None, **columns: str
) -> TableFacts:
    file = folder / "table.jsonl"
    file.write_text("\n".join(map(json.dumps, table)), encoding="utf-8")
    options = DataConfig(str(file), **columns)
    return look_at_table(options, model=model)


def configured(facts: TableFacts, folder: Path) -> Config:
    file = folder / "made.yaml"
    file.write_text(make_config(facts), encoding="utf-8")
    return load_config(file=str(file), environment={}, flags={}, assignments=()).config


def test_a_table_is_seen_with_its_columns_classes_and_splits(tmp_path: Path) -> None:
    facts = look(tmp_path, rows(praise=30))
    assert facts.columns == ["no", "text", "label"]
    chosen = {option: column.name for option, column in facts.chosen.items()}
    assert chosen == {"text_column": "text", "label_column": "label"}
    assert facts.class_rows == {"blame": 10, "praise": 30}
    assert facts.rows_of_a_run == {"train": 36, "test": 4}
    assert facts.examples == {"blame": "It was blame and 0.", "praise": "It was praise and 0."}
    assert facts.longest_characters == len("It was praise and 29.")


def test_the_configuration_names_the_table_and_leaves_the_rest_at_its_default(
    tmp_path: Path,
) -> None:
    facts = look(tmp_path, rows())
    content = yaml.safe_load(make_config(facts))
    assert content == {
        "data": {"data": facts.options.data, "text_column": "text", "label_column": "label"},
        "model": None,
        "training": None,
    }


def test_what_the_user_said_of_the_file_is_configured(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    lines = (f"отзыв {number},{number % 2}\n" for number in range(40))
    file.write_text("".join(lines), encoding="koi8_r")
    options = DataConfig(str(file), encoding="koi8_r", header=False)
    facts = look_at_table(options, model=None)
    assert facts.examples["1"] == "отзыв 1"
    config = configured(facts, tmp_path).data
    assert (config.encoding, config.header) == ("koi8_r", False)
    assert (config.text_column, config.label_column) == ("column1", "column2")


SENTENCES = ("the river is long", "the food is called {}", "who wrote the word {}", "a city of {}")


@pytest.fixture(autouse=True)
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a table beside which the command is given."""
    monkeypatch.chdir(tmp_path)
    lines = [
        f"{number};{sentence.format(number)} [/{number}];{('good', 'bad')[number % 2]}"
        for number in range(40)
        for sentence in [SENTENCES[number % 4]]
    ]
    file = Path("reviews.csv")
    file.write_text("\n".join(["id;review;verdict", *lines]), encoding="utf-8")
    return file


def test_init_prints_what_it_saw(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews)
    assert outcome.code == 0
    assert "reading reviews.csv: encoding utf-8, delimiter semicolon" in outcome.errors
    shown = [" ".join(line.split()) for line in outcome.output.splitlines()]
    for line in (
        "rows 40",
        "columns id, review, verdict",
        "text column review (its name says so)",
        "label column verdict (40 rows have 2 different values)",
        "rows of a run train: 36, test: 4",
        "good 20 the river is long [/0]",
        "train with: finetune run reviews.yaml",
    ):
        assert line in shown


def test_init_prints_one_json_object(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews, "--output", "mine.yaml", "--json", "--quiet")
    seen = json.loads(outcome.output)
    assert seen["schema_version"] == 1
    assert seen["config"] == "mine.yaml"
    assert seen["class_rows"] == {"bad": 20, "good": 20}
    assert Path("mine.yaml").is_file()


def test_init_overwrites_nothing(command: Command, reviews: Path) -> None:
    Path("reviews.yaml").write_text("mine")
    outcome = command("init", reviews)
    outcome.assert_refused(2, "reviews.yaml already exists")
    assert "reading" not in outcome.errors  # it may take long
    assert Path("reviews.yaml").read_text() == "mine"
