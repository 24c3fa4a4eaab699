import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_runs import TEXTS

import finetune
from finetune.errors import DataError, ModelUnsupported, NotARun, UsageError
from finetune.events import Event, Info, WarningMessage
from finetune.files import read_json, read_jsonl, write_json


def test_predict_answers_the_test_split_as_the_run_did(finished_run: Path) -> None:
    lines = (finished_run / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    answers = finetune.predict(finished_run, [row["text"] for row in rows], device="cpu")
    assert [answer.text for answer in answers] == [row["text"] for row in rows]
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


@pytest.mark.parametrize(
    "texts",
    ["Who wrote Faust?", b"Who?", None, {"Who?": 1}, pd.DataFrame({"text": TEXTS}), [None], [7.0]],
    ids=lambda texts: type(texts).__name__,
)
def test_what_is_not_a_list_of_texts_is_refused_and_not_taken_apart(
    texts: Any, finished_run: Path
) -> None:
    with pytest.raises(UsageError, match="text"):
        finetune.predict(finished_run, texts, device="cpu")


def test_a_text_with_half_a_surrogate_pair_is_refused(finished_run: Path) -> None:
    with pytest.raises(DataError, match="UTF-8: surrogates not allowed"):
        finetune.predict(finished_run, ["a\ud800"], device="cpu")


@pytest.mark.parametrize("folder", [".", "missing"])
def test_a_folder_without_a_run_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        finetune.predict(tmp_path / folder, TEXTS, device="cpu")


def test_a_run_keeps_its_model_when_its_data_has_gone(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "model", tmp_path / "model")
    shutil.copy(finished_run / "config.yaml", tmp_path)
    assert len(finetune.predict(tmp_path, TEXTS, device="cpu")) == 3


def test_less_sure_answers_are_left_out_and_counted(finished_run: Path) -> None:
    emitted: list[Event] = []
    texts = [row["text"] for row in read_jsonl(finished_run / "predictions.jsonl")[:40]]
    whole = finetune.predict(finished_run, texts, device="cpu", all_scores=True)
    limit = sorted(answer.probability for answer in whole)[25]

    found = finetune.predict(
        finished_run, texts, device="cpu", all_scores=True, min_confidence=limit,
        emit=emitted.append,
    )  # fmt: skip

    for answer, before in zip(found, whole, strict=True):
        assert answer.label == (before.label if before.probability >= limit else None)
        assert (answer.probability, answer.probabilities) == (
            before.probability, before.probabilities,
        )  # fmt: skip
    assert emitted[-1] == Info("25 of 40 texts have no prediction")


@pytest.fixture
def run_with_confidences(finished_run: Path, tmp_path: Path) -> Path:
    """A run whose validation rows let every answer through of one class, none of another."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    content = read_json(run / "model/confidences.json")
    names = list(content["classes"])
    assert sum(len(one["is_right"]) for one in content["classes"].values()) == 81
    for name in names:
        content["classes"][name] = {"probabilities": [0.0] * 100, "is_right": [True] * 100}
    content["classes"][names[1]] = {"probabilities": [0.9] * 18, "is_right": [True] * 18}
    write_json(run / "model/confidences.json", content)
    return run


def test_classes_without_the_precision_are_never_answered(run_with_confidences: Path) -> None:
    emitted: list[Event] = []
    run = run_with_confidences
    texts = [row["text"] for row in read_jsonl(run / "predictions.jsonl")]
    whole = finetune.predict(run, texts, device="cpu")
    missed = list(read_json(run / "model/confidences.json")["classes"])[1]

    found = finetune.predict(run, texts, device="cpu", target_precision=0.95, emit=emitted.append)

    labels = [None if answer.label == missed else answer.label for answer in whole]
    assert [answer.label for answer in found] == labels
    assert any(
        f"never answered: {missed} (18 rows)" in event.message
        for event in emitted
        if isinstance(event, WarningMessage)
    )
    easier = finetune.predict(run, texts[:9], device="cpu", target_precision=0.9)
    assert all(one.label is None for one in easier if one.probability < 0.9 and one.label == missed)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_confidence": 0.5, "target_precision": 0.5}, "both"),
        ({"min_confidence": 95}, "--min-confidence is 95"),
        ({"target_precision": float("nan")}, "--target-precision is nan"),
    ],
)
def test_limits_that_make_no_sense_are_refused(
    options: dict[str, float], expected: str, finished_run: Path
) -> None:
    with pytest.raises(UsageError, match=expected):
        finetune.predict(finished_run, TEXTS, device="cpu", **options)


@pytest.mark.parametrize(
    ("content", "error", "expected"),
    [
        (None, UsageError, "no confidences of validation"),
        ('{"classes": {}}', ModelUnsupported, "can't be read"),
    ],
)
def test_a_target_needs_the_confidences_of_the_run(
    content: str | None, error: type[Exception], expected: str, run_with_confidences: Path
) -> None:
    file = run_with_confidences / "model/confidences.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert finetune.predict(run_with_confidences, TEXTS, device="cpu", min_confidence=0)
    with pytest.raises(error, match=expected):
        finetune.predict(run_with_confidences, TEXTS, device="cpu", target_precision=0.9)
