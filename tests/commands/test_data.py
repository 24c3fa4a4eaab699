"""``finetune data check``."""

import json
from pathlib import Path

import pytest
from tiny_runs import Command

from finetune.files import SCHEMA_VERSION


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str) -> str:
    Path(name).write_text(content, encoding="utf-8")
    return name


def write_table_with(*rows: str) -> str:
    """Write a table of 40 rows with two classes, followed by ``rows``."""
    plain = [f"the river {number},{'xy'[number % 2]}" for number in range(40)]
    return write("rows.csv", "\n".join(["text,label", *plain, *rows]))


def normalized_lines(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_check_reports_rows_classes_lengths_and_suggestions(
    command: Command, tiny_folder: Path
) -> None:
    data = write_table_with("the [red] river,x", "the [red] river,x", ",x")
    test = write("test.csv", "text,label\nthe RIVER 2,y\na new one,x\n")
    outcome = command(
        "data", "check", "--data", data, "--test-file", test,
        "--model", tiny_folder, "--max-length", "4",
    )  # fmt: skip
    assert outcome.code == 0, outcome.errors
    shown = normalized_lines(outcome.output)
    for line in (
        "class train test",
        "x 22 1",
        "all rows 42 2",
        "split sizes in a run: 42 train, 2 test",
        "training method of finetune run: few-shot, because there are only 21 rows per class on"
        " average",
        "duplicates of an earlier row 1 0",
        "texts with contradictory labels 0 0",
        "rows whose text is also in train 1",
        "x in train, y in test the RIVER 2",
        "repeats in train the [red] river",
    ):
        assert line in shown
    assert "tokens per text train test" in shown
    assert any(line.startswith("truncated ") for line in shown)
    assert any(line.startswith("try: use --max-length") for line in shown)
    assert "encoding utf-8, delimiter comma" in outcome.errors
    assert "guessed: --text-column 'text' (by its name)" in outcome.errors
    assert "1 of 43 rows skipped" in outcome.errors


def test_check_prints_one_json_object_and_needs_a_tokenizer_only_for_lengths(
    command: Command, tiny_folder: Path
) -> None:
    check = ("data", "check", "--data", write_table_with(), "--json", "-q")
    outcome = command(*check, "--model", tiny_folder)
    assert outcome.errors == ""
    found = json.loads(outcome.output)
    assert (found["schema_version"], found["data"]) == (SCHEMA_VERSION, "rows.csv")
    assert found["classes"] == {"train": {"x": 20, "y": 20}}
    assert found["lengths"]["splits"]["train"]["cut_rows"] == 0
    assert found["suggestions"] == []
    outcome = command(*check, "--model", ".")
    assert "lengths of the texts are unknown" in outcome.errors
    assert json.loads(outcome.output) == found | {
        "lengths": None,
        "linear_head_estimate": None,
        "warnings": json.loads(outcome.output)["warnings"],
    }


def test_class_names_that_may_be_missing_labels_are_reported_once(
    command: Command, tiny_folder: Path
) -> None:
    table = write_table_with(*(f"a hill {number},n/a" for number in range(20)))
    for arguments in (("data", "check"), ("run", "--dry-run", "--device", "cpu")):
        outcome = command(*arguments, table, "--model", tiny_folder)
        assert outcome.code == 0, outcome.errors
        assert (outcome.errors + outcome.output).count("usually mean a missing label") == 1
