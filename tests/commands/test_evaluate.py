import json
import shutil
from pathlib import Path

import pytest
from machines import LINUX, pretend
from tiny_runs import Command

import finetune
from finetune.files import read_json


def test_the_test_split_is_evaluated_unless_told_otherwise(
    command: Command, finished_run: Path
) -> None:
    outcome = command("evaluate", finished_run, "--device", "cpu")
    assert outcome.code == 0, outcome.errors
    results = read_json(finished_run / "all_results.json")
    assert "test split, 270 rows" in outcome.output
    assert f"accuracy {100 * results['test_accuracy']:.1f}%" in outcome.output
    assert "reading the questions" in outcome.errors


@pytest.mark.parametrize(("split", "rows"), [("train", 64), ("validation", 81), ("test", 270)])
def test_each_split_gives_the_figures_of_the_python_api(
    split: str, rows: int, command: Command, finished_run: Path
) -> None:
    outcome = command("evaluate", finished_run, "--split", split, "--device=cpu", "--json")
    assert outcome.code == 0, outcome.errors
    metrics = json.loads(outcome.output)
    assert (metrics["split"], metrics["samples"]) == (split, rows)
    assert metrics == finetune.evaluate(finished_run, split=split, device="cpu").to_json()


def test_json_is_one_object_with_a_version(command: Command, finished_run: Path) -> None:
    outcome = command("evaluate", finished_run, "--device=cpu", "--json")
    [line] = outcome.output.splitlines()
    assert json.loads(line)["schema_version"] == 1


def test_a_split_that_the_run_lacks_is_refused(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        config.replace("validation_fraction: 0.1", "validation_fraction: 0")
    )
    command("evaluate", run, "--split", "validation").assert_refused(2, "no validation split")


def test_a_run_that_has_not_finished_is_refused(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    shutil.copy(finished_run / "config.yaml", tmp_path)
    command("evaluate", tmp_path).assert_refused(2, "--resume-from-checkpoint")


def test_evaluating_changes_nothing_in_the_run(command: Command, finished_run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")}
    assert command("evaluate", finished_run, "--device=cpu", "-q").code == 0
    assert {path: path.stat().st_mtime_ns for path in finished_run.rglob("*")} == before


@pytest.mark.parametrize("command_and_texts", [["evaluate"], ["predict", "Who?"]])
def test_the_device_may_be_set_by_the_environment(
    command_and_texts: list[str],
    command: Command,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, *texts = command_and_texts
    monkeypatch.setenv("FINETUNE_DEVICE", "gpu")
    command(name, finished_run, *texts).assert_refused(2, "FINETUNE_DEVICE", "gpu")
    pretend(LINUX, monkeypatch)
    monkeypatch.setenv("FINETUNE_DEVICE", "mps")
    command(name, finished_run, *texts).assert_refused(4, "MPS")
    assert command(name, finished_run, *texts, "--device", "cpu").code == 0
