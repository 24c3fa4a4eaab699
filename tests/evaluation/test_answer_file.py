"""Answers as files: what stands beside them."""

import csv
import json
from pathlib import Path

import pytest

from finetune.evaluation.answer_file import answer_file
from finetune.tasks.single import ClassAnswer


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_what_a_model_has_answered_before_stays_beside_the_answers_of_another(
    suffix: str, tmp_path: Path
) -> None:
    before = {"label": "b", "probability_a": "0.2", "input_label": "true"}
    answer = ClassAnswer("text", "a", 0.9, {"a": 0.9, "b": 0.1}, columns=before)
    path = tmp_path / f"answers.{suffix}"
    with answer_file(path) as write:
        write([answer])
    lines = path.read_text().splitlines()
    [row] = [json.loads(lines[0])] if suffix == "jsonl" else list(csv.DictReader(lines))
    assert (row["label"], row["input_label"], row["input_input_label"]) == ("a", "b", "true")
    if suffix == "csv":
        assert (row["probability_a"], row["input_probability_a"]) == ("0.9", "0.2")
