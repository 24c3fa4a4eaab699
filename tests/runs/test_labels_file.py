"""Estimates on a table of ``finetune label`` use only randomly drawn rows."""

import csv
from pathlib import Path

import pytest
from tiny_runs import Command, flags

from finetune.files import read_json, read_jsonl
from finetune.runs.folder import SeveralFolder

PLAIN = ["--num-train-epochs", "1", "--max-train-samples", "1000"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows selected by the model with arbitrary labels, and twenty randomly drawn rows."""
    path = tmp_path_factory.mktemp("labels") / "texts.labels.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "row", "how", "split"])
        for number in range(60):
            drawn, label = number % 3 == 0, "yes" if number % 2 else "no"
            word = ("good" if number % 2 else "bad") if drawn else f"word {number * 7 % 11}"
            how, split = ("random", "test") if drawn else ("uncertain", "train")
            writer.writerow([f"{word} {number}", label, number + 1, how, split])
    return path


def test_run_explains_the_test_rows_without_suggesting_folds(
    table: Path, tiny_folder: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ["--model", tiny_folder, "--device", "cpu", "--output-dir", tmp_path / "run"]
    outcome = command("run", table, *arguments)
    assert outcome.code == 0, outcome.errors
    words = " ".join(outcome.output.split())
    assert "on 20 test rows" in words
    assert "Only these rows were drawn at random. The others were chosen because" in words
    assert "folds" not in words
    assert "cross-validated" not in words
    assert read_json(tmp_path / "run" / "all_results.json")["eval_kind"] is None
    outcome = command("evaluate", tmp_path / "run", table, "--device", "cpu")
    assert "20 rows" in outcome.output
    assert "20 rows of" in outcome.errors


def test_table_without_random_rows_gives_no_estimate(
    table: Path, tiny_folder: Path, tmp_path: Path, command: Command
) -> None:
    chosen = tmp_path / "texts.labels.csv"
    header, *lines = table.read_text().splitlines()
    rows = [line.removesuffix(",train") for line in lines if ",random," not in line]
    chosen.write_text("\n".join([header.removesuffix(",split"), *rows]))
    outcome = command("run", *flags(model=tiny_folder, output_dir=tmp_path / "run", data=chosen))
    words = " ".join(outcome.output.split())
    assert "All rows were chosen because they are hard" in words
    assert "folds" not in words
    command("evaluate", tmp_path / "run", chosen).assert_rejected(
        3, "0 rows of", "label more texts"
    )


def test_folds_test_only_random_rows(
    table: Path, tiny_folder: Path, tmp_path: Path, command: Command
) -> None:
    options = flags(model=tiny_folder, output_dir=tmp_path / "folds", data=table) + PLAIN
    outcome = command("run", *options, "--folds", "3")
    assert outcome.code == 0, outcome.errors
    assert "the folds contain the 20 rows that were drawn at random" in outcome.errors
    runs = SeveralFolder(tmp_path / "folds", "folds").runs
    tested = [row["text"] for run in runs for row in read_jsonl(run.predictions_file)]
    assert len(tested) == len({*tested}) == 20
    assert all(text.startswith(("good", "bad")) for text in tested)


@pytest.mark.parametrize("arguments", [["data", "check"], ["init"], ["run", "--dry-run"]])
def test_linear_head_estimate_is_skipped_for_selected_rows(
    arguments: list[str], table: Path, tiny_folder: Path, tmp_path: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outcome = command(*arguments, table, "--model", tiny_folder)
    assert outcome.code == 0, outcome.errors
    assert "no linear-head estimate: the training rows were chosen because" in outcome.errors
    assert "cross-validated" not in outcome.output
