"""Predictions of a run on sentence pairs."""

import csv
import json
from pathlib import Path

import pytest
from tiny_models import save_tiny_model, tiny_tokenizer
from tiny_runs import Command, run_tiny

import finetune
from finetune.errors import UsageError

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


def test_predict_accepts_pairs_from_a_table_and_from_arguments(
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
    columns = ("--text-column", "one", "--text-pair-column", "two")
    assert command("predict", run, "--data", unknown, *columns).output.count("\n") == len(PAIRS) + 1
    command("predict", run, "--data", unknown).assert_rejected(3, "pairs", "--text-pair-column")


def test_predict_rejects_single_text_for_pair_model_and_vice_versa(
    run: Path, finished_run: Path, command: Command
) -> None:
    command("predict", run, "who").assert_rejected(2, "pairs", "'who'", "--text-pair")
    command("predict", run, "who", "what", "--text-pair", "where").assert_rejected(2, "--text-pair")
    with pytest.raises(UsageError, match="single texts"):
        finetune.predict(finished_run, [("who", "what")], device="cpu")
