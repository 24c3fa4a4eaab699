"""Sentence pairs, from a table to predictions: one run, and every command on it."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model, tiny_tokenizer
from tiny_runs import Command, run_tiny
from transformers import pipeline

import finetune
from finetune.errors import DataError, UsageError
from finetune.files import read_json, read_jsonl

WORDS = ("river", "city", "mountain", "animal", "color", "author")
PAIRS = [
    (f"the {one} of {n}", f"a long {other} of {n}", "same" if one == other else "other")
    for n in range(3)
    for one in WORDS
    for other in (one, WORDS[n])
]


def write_pairs(path: Path, *, names: tuple[str, str] = ("sentence1", "sentence2")) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("no", *names, "label"), *((7, *row) for row in PAIRS)])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder that uses token types."""
    folder = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on sentence pairs, trained on features of frozen layers."""
    folder = tmp_path_factory.mktemp("pairs")
    data = write_pairs(folder / "pairs.csv")
    run_tiny(folder / "run", model=model, data=str(data), train_layers=1, validation_fraction=0)
    return folder / "run"


def test_the_answers_to_pairs_are_those_of_a_pipeline(run: Path) -> None:
    rows = read_jsonl(run / "predictions.jsonl")
    assert {(row["text"], row["text_pair"], row["label"]) for row in rows} <= set(PAIRS)
    classify = pipeline("text-classification", model=str(run / "model"))
    expected = classify([{name: row[name] for name in ("text", "text_pair")} for row in rows])
    answers = finetune.predict(run, [(row["text"], row["text_pair"]) for row in rows], device="cpu")
    for row, answer, other in zip(rows, answers, expected, strict=True):
        assert row["predicted"] == answer.label == other["label"]
        assert row["probability"] == pytest.approx(other["score"], abs=1e-5)
        assert answer.probability == pytest.approx(other["score"], abs=1e-5)
        assert answer.to_json().items() >= {"text_pair": row["text_pair"]}.items()
    [swapped] = finetune.predict(run, [(rows[0]["text_pair"], rows[0]["text"])], device="cpu")
    assert swapped.probability != answers[0].probability


def test_pairs_are_evaluated_and_other_data_must_be_pairs_too(run: Path, tmp_path: Path) -> None:
    again = finetune.evaluate(run, device="cpu").scores
    assert again.accuracy == read_json(run / "all_results.json")["test_accuracy"]
    other = write_pairs(tmp_path / "other.csv", names=("premise", "hypothesis"))
    assert finetune.evaluate(run, data=other, device="cpu").scores.samples == len(PAIRS)
    single = tmp_path / "single.csv"
    single.write_text("text,label\nthe river,same\na city,other\n")
    with pytest.raises(DataError, match="single texts, and the model reads pairs"):
        finetune.evaluate(run, data=single, device="cpu")


def test_pairs_are_predicted_from_a_table_and_from_arguments(
    run: Path, tmp_path: Path, command: Command
) -> None:
    table = write_pairs(tmp_path / "pairs.csv")
    output = tmp_path / "answers.jsonl"
    command("predict", run, "--data", table, "--output", output)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    read = [(one["sentence1"], one["sentence2"], one["label"]) for one in answers]
    assert read == PAIRS
    assert all(one["no"] == "7" and one["predicted_label"] for one in answers)

    first, second = PAIRS[0][:2]
    shown = command("predict", run, first, "--text-pair", second).output.splitlines()
    assert [line.split("\t")[2:] for line in shown] == [["text", "text_pair"], [first, second]]

    unknown = write_pairs(tmp_path / "unknown.csv", names=("one", "two"))
    named = ("--text-column", "one", "--text-pair-column", "two")
    assert command("predict", run, "--data", unknown, *named).output.count("\n") == len(PAIRS) + 1
    command("predict", run, "--data", unknown).assert_refused(3, "pairs", "--text-pair-column")


def test_a_model_of_pairs_takes_no_single_text_nor_another_a_pair(
    run: Path, finished_run: Path, command: Command
) -> None:
    command("predict", run, "who").assert_refused(2, "pairs", "'who'", "--text-pair")
    command("predict", run, "who", "what", "--text-pair", "where").assert_refused(2, "--text-pair")
    with pytest.raises(UsageError, match="single texts"):
        finetune.predict(finished_run, [("who", "what")], device="cpu")


def test_init_pins_both_columns_and_data_check_shows_both_texts(
    tmp_path: Path, model: Path, command: Command
) -> None:
    table = write_pairs(tmp_path / "pairs.csv")
    with table.open("a") as file:
        file.write(f"7,{PAIRS[0][0].upper()},{PAIRS[0][1]},other\n7,{PAIRS[0][0]},x,other\n")
    config = tmp_path / "pairs.yaml"
    outcome = command("init", table, "--output", config, "--model", model)
    assert outcome.code == 0, outcome.errors
    assert "text_pair_column: sentence2" in config.read_text()
    found: dict[str, Any] = json.loads(
        command("data", "check", "--config", config, "--json").output
    )
    # Only the first text is repeated in more rows.
    assert found["conflicts"]["train"]["texts"] == 1
    assert found["conflicts"]["train"]["examples"][0]["text"] == " | ".join(PAIRS[0][:2])
    assert found["lengths"]["splits"]["train"]["max"] == 12
