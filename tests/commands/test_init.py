import json
from pathlib import Path

import pytest
from tiny_runs import Command

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
        "rows of a run train: 32, validation: 4, test: 4",
        "good 20 the river is long [/0]",
        "train with: finetune run --config reviews.yaml",
    ):
        assert line in shown


def test_init_prints_one_json_object(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews, "--output", "mine.yaml", "--json", "--quiet")
    seen = json.loads(outcome.output)
    assert seen["schema_version"] == 1
    assert seen["config"] == "mine.yaml"
    assert seen["class_rows"] == {"bad": 20, "good": 20}
    assert Path("mine.yaml").is_file()


def test_init_takes_the_columns_that_are_named(command: Command, reviews: Path) -> None:
    outcome = command("init", reviews, "--text-column", "verdict", "--label-column", "review")
    outcome.assert_refused(3)
    outcome = command("init", reviews, "--label-column", "verdict", "--json")
    assert json.loads(outcome.output)["label_reason"] == "as --label-column says"


def test_init_overwrites_nothing(command: Command, reviews: Path) -> None:
    Path("reviews.yaml").write_text("mine")
    outcome = command("init", reviews)
    outcome.assert_refused(2, "reviews.yaml already exists")
    assert "reading" not in outcome.errors  # it may take long
    assert Path("reviews.yaml").read_text() == "mine"


def test_init_of_a_table_that_is_not_there_writes_nothing(command: Command) -> None:
    command("init", "none.csv").assert_refused(3, "there is no file none.csv")
    assert not Path("none.yaml").exists()


def test_a_table_of_twenty_classes_shows_all(command: Command) -> None:
    lines = [f"text {number},class {number % 20}" for number in range(300)]
    Path("many.csv").write_text("\n".join(["text,label", *lines]))
    shown = command("init", "many.csv").output
    assert "class 19" in shown
    assert "..." not in shown


def test_a_table_of_many_classes_shows_the_first(command: Command) -> None:
    lines = [f"text {number},class {number % 30}" for number in range(300)]
    Path("many.csv").write_text("\n".join(["text,label", *lines]))
    shown = command("init", "many.csv").output
    assert "classes        30" in shown
    assert "class 0" in shown
    assert "class 9" not in shown
