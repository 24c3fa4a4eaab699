import csv
import json
import os
from pathlib import Path

import pytest

from finetune.errors import UsageError
from finetune.evaluation.prediction_file import check_output, prediction_file
from finetune.tasks.base import Prediction


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_earlier_predictions_stay_beside_those_of_another_model(
    suffix: str, tmp_path: Path
) -> None:
    before = {"label": "b", "probability_a": "0.2", "input_label": "true"}
    prediction = Prediction(
        "text", {"label": "a", "probability": 0.9}, {"a": 0.9, "b": 0.1}, columns=before
    )
    path = tmp_path / f"predictions.{suffix}"
    with prediction_file(path) as write:
        write([prediction])
    lines = path.read_text().splitlines()
    [row] = [json.loads(lines[0])] if suffix == "jsonl" else list(csv.DictReader(lines))
    assert (row["label"], row["input_label"], row["input_input_label"]) == ("a", "b", "true")
    if suffix == "csv":
        assert (row["probability_a"], row["input_probability_a"]) == ("0.9", "0.2")


def test_a_folder_that_may_not_be_written_to_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_output(tmp_path / "predictions.csv", source=None)
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)
    with pytest.raises(UsageError, match=r"predictions\.csv can't be written"):
        check_output(tmp_path / "predictions.csv", source=None)
