import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TEXTS

import finetune
from finetune.errors import NotARun, UsageError
from finetune.files import read_json


def test_predict_answers_each_text_in_order(finished_run: Path) -> None:
    answers = finetune.predict(finished_run, TEXTS, device="cpu")
    assert [answer.text for answer in answers] == TEXTS
    classes = read_json(finished_run / "all_results.json")["class_names"]
    for answer in answers:
        assert answer.label in classes
        assert 1 / len(classes) <= answer.probability <= 1


def test_predict_answers_the_test_split_as_the_run_did(finished_run: Path) -> None:
    lines = (finished_run / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    answers = finetune.predict(finished_run, [row["text"] for row in rows], device="cpu")
    assert [answer.label for answer in answers] == [row["predicted"] for row in rows]
    for answer, row in zip(answers, rows, strict=True):
        assert answer.probability == pytest.approx(row["probability"], abs=1e-6)


def test_the_company_of_a_text_hardly_changes_its_answer(finished_run: Path) -> None:
    together = finetune.predict(finished_run, [*TEXTS, "word " * 60], device="cpu")
    for text, answer in zip(TEXTS, together, strict=False):
        [alone] = finetune.predict(finished_run, [text], device="cpu")
        assert alone.label == answer.label
        assert alone.probability == pytest.approx(answer.probability, abs=1e-5)


def test_no_texts_have_no_answers(finished_run: Path) -> None:
    assert finetune.predict(finished_run, [], device="cpu") == []


def test_an_empty_and_an_endless_text_have_answers(finished_run: Path) -> None:
    answers = finetune.predict(finished_run, ["", " ", "word " * 10_000], device="cpu")
    assert len(answers) == 3


def test_a_text_in_place_of_texts_is_not_taken_for_its_letters(finished_run: Path) -> None:
    with pytest.raises(UsageError):
        finetune.predict(finished_run, "Who wrote Faust?", device="cpu")


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_a_run_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        finetune.predict(tmp_path / folder, TEXTS, device="cpu")


def test_an_unknown_device_is_refused(finished_run: Path) -> None:
    device: Any = "tpu"
    with pytest.raises(UsageError, match="tpu"):
        finetune.predict(finished_run, TEXTS, device=device)


def test_a_run_keeps_its_model_when_its_data_has_gone(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "model", tmp_path / "model")
    shutil.copy(finished_run / "config.yaml", tmp_path)
    assert len(finetune.predict(tmp_path, TEXTS, device="cpu")) == 3
