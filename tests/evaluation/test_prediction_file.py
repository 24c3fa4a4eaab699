"""Answers as files: what stands beside them."""

import csv
import json
import os
from pathlib import Path

import pytest

from finetune.errors import UsageError
from finetune.evaluation.prediction_file import check_output, prediction_file
from finetune.tasks.base import Prediction


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_what_a_model_has_answered_before_stays_beside_the_answers_of_another(
    suffix: str, tmp_path: Path
) -> None:
    before = {"label": "b", "probability_a": "0.2", "input_label": "true"}
    answer = Prediction(
        "text", {"label": "a", "probability": 0.9}, {"a": 0.9, "b": 0.1}, columns=before
    )
    path = tmp_path / f"answers.{suffix}"
    with prediction_file(path) as write:
        write([answer])
    lines = path.read_text().splitlines()
    [row] = [json.loads(lines[0])] if suffix == "jsonl" else list(csv.DictReader(lines))
    assert (row["label"], row["input_label"], row["input_input_label"]) == ("a", "b", "true")
    if suffix == "csv":
        assert (row["probability_a"], row["input_probability_a"]) == ("0.9", "0.2")


def test_a_folder_that_may_not_be_written_to_is_refused_before_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output(tmp_path / "answers.csv", source=None)
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with pytest.raises(UsageError, match=r"answers\.csv can't be written: you may not write"):
        check_output(tmp_path / "answers.csv", source=None)
