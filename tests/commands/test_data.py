"""``finetune data``, as a function and as a command."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Command

from finetune.commands.data import check_data
from finetune.config.schema import Config, DataConfig, ModelConfig
from finetune.events import Event, WarningMessage, sent_to

ROWS = [("a river", "x"), ("a city of the old river", "y"), ("A  River", "x"), ("who", "y")] * 5


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    lines = [f"{text} {number // 4},{label}" for number, (text, label) in enumerate(ROWS)]
    path.write_text("\n".join(["text,label", *lines, ",x"]))
    return path


def check(
    data: Path, model: str | Path, *, emitted: list[Event] | None = None, **options: Any
) -> dict[str, Any]:
    config = Config(
        data=DataConfig(data=str(data), **options),
        model=ModelConfig(model=str(model), max_length=8),
    )
    with sent_to(([] if emitted is None else emitted).append):
        return check_data(config).to_json()


def test_findings_lengths_and_suggestions_come_together(table: Path, tiny_folder: Path) -> None:
    found = check(table, tiny_folder, test_fraction=0.2, validation_fraction=0.1)
    assert found["rows"] == {"train": 20}
    assert found["rows_of_a_run"] == {"train": 15, "validation": 1, "test": 4}
    assert found["repeats"]["train"]["rows_up_to_case"] == 5
    assert found["lengths"]["max_length"] == 8
    assert found["lengths"]["suggested_max_length"] == 16
    train = found["lengths"]["splits"]["train"]
    assert (train["max"], train["cut_rows"], train["cut_share"]) == (9, 5, 0.25)
    assert "--max-length 16" in [change["remedy"] for change in found["suggestions"]]
    [warning] = found["warnings"]
    assert warning.startswith("1 of 21 rows")


@pytest.mark.parametrize("model", ["acme/unknown", "."])
def test_without_a_tokenizer_the_rest_is_found(table: Path, model: str) -> None:
    emitted: list[Event] = []
    found = check(table, model, emitted=emitted)
    assert found["lengths"] is None
    assert found["rows"] == {"train": 20}
    warning = [event for event in emitted if isinstance(event, WarningMessage)][-1]
    assert "lengths of the texts are missing" in warning.message
    assert warning.remedy
    assert found["warnings"][-1] == warning.message


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str) -> str:
    Path(name).write_text(content, encoding="utf-8")
    return name


def table_of(*rows: str, header: str = "text,label", name: str = "rows.csv") -> str:
    """Write a few rows of two classes, and these rows."""
    plain = [f"the river {number},{'xy'[number % 2]}" for number in range(40)]
    return write(name, "\n".join([header, *plain, *rows]))


def lines_of(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_check_shows_rows_classes_lengths_and_what_to_change(
    command: Command, tiny_folder: Path
) -> None:
    data = table_of("the [red] river,x", "the [red] river,x", ",x")
    test = write("test.csv", "text,label\nthe RIVER 2,y\na new one,x\n")
    outcome = command(
        "data", "check", "--data", data, "--test-file", test,
        "--model", tiny_folder, "--max-length", "4",
    )  # fmt: skip
    assert outcome.code == 0, outcome.errors
    shown = lines_of(outcome.output)
    for line in (
        "class train test",
        "x 22 1",
        "all rows 42 2",
        "split sizes in a run: 42 train, 2 test",
        "finetune run: 21 rows per class are few: contrastive steps, then a linear head",
        "duplicates of an earlier row 1 0",
        "texts with contradictory labels 0 0",
        "rows whose text is in train too 1",
        "x in train, y in test the RIVER 2",
        "repeats in train the [red] river",
    ):
        assert line in shown
    assert "tokens of a text train test" in shown
    assert any(line.startswith("truncated ") for line in shown)
    assert any(line.startswith("try: --max-length") for line in shown)
    assert "encoding utf-8, delimiter comma" in outcome.errors
    assert "guessed: --text-column 'text' (its name says so)" in outcome.errors
    assert "1 of 43 rows skipped" in outcome.errors


def test_check_prints_one_json_object(command: Command, tiny_folder: Path) -> None:
    outcome = command("data", "check", "--data", table_of(), "--model", tiny_folder, "--json", "-q")
    assert outcome.errors == ""
    found = json.loads(outcome.output)
    assert found["schema_version"] == 1
    assert found["data"] == "rows.csv"
    assert found["classes"] == {"train": {"x": 20, "y": 20}}
    assert found["lengths"]["splits"]["train"]["cut_rows"] == 0
    assert found["suggestions"] == []
