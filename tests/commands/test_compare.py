import json
from pathlib import Path

import pytest
from tiny_runs import Command, copy_run

from finetune.files import read_jsonl


@pytest.fixture
def other(finished_run: Path, tmp_path: Path) -> Path:
    """A run with another seed that predicts all test rows correctly."""
    right = [row["label"] for row in read_jsonl(finished_run / "predictions.jsonl")]
    return copy_run(finished_run, tmp_path / "other", answers=right, seed=7)


def test_metrics_rows_and_options_are_tables_of_80_columns(
    command: Command, finished_run: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = command("compare", finished_run, other, "--limit", 2)
    assert outcome.code == 0, outcome.errors
    lines = outcome.output.splitlines()
    assert "270 test rows of questions" in lines
    assert lines[-1] == "Use other: its difference from finished is significant."
    assert any(line.split()[:2] == ["other", "100.0%"] for line in lines)
    assert "seed    42        7" in [line.rstrip() for line in lines]
    assert any(line.startswith("2 of ") for line in lines)
    titles = lines.index("Only other correct")
    assert max(map(len, lines[:titles])) <= 80


def test_json_is_one_object_with_a_version(
    command: Command, finished_run: Path, other: Path
) -> None:
    outcome = command("compare", finished_run, other, "--json")
    [line] = outcome.output.splitlines()
    found = json.loads(line)
    assert found["schema_version"] == 1
    [found] = found["groups"]
    assert (found["baseline"], found["options"]) == ("finished", {"seed": [42, 7]})
    first, second = found["runs"]
    assert first["versus_baseline"] is None
    difference = second["versus_baseline"]["differences"]["accuracy"]
    assert difference["value"] == second["metrics"]["accuracy"] - first["metrics"]["accuracy"] > 0
    assert difference["low"] < difference["value"] < difference["high"]


def test_fewer_than_two_runs_are_refused(command: Command, finished_run: Path) -> None:
    command("compare", finished_run).assert_refused(2, "nothing to compare")
