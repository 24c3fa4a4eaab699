"""``run``, ``evaluate`` and ``predict`` on a table of each task type."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import COMMON_WORDS
from tiny_runs import Command, flags
from transformers import pipeline

from finetune.files import read_json, read_jsonl

WORDS = ("river", "city", "animal")


def make_rows(kind: str) -> list[dict[str, Any]]:
    """Return rows whose labels are the words in their texts, or the number of these words."""
    random, rows = np.random.default_rng(0), []
    for number in range(60):
        first, second = (" ".join(random.choice(COMMON_WORDS.split(), 8)) for _ in range(2))
        found = [word for word in WORDS if random.random() < 0.5]
        pair = {"sentence1": f"{first} {' '.join(found)}", "sentence2": second}
        text = {"id": number, "comment_text": pair["sentence1"]}
        rows.append(
            {
                "pairs": {"index": number, **pair, "label": ("same", "other")["river" in found]},
                "scores": {"genre": WORDS[number % 3], **pair, "score": len(found) + number / 100},
                "list": {"text": pair["sentence1"], "labels": json.dumps(found), "id": number},
                "flags": {**text, **{word: int(word in found) for word in WORDS}},
                "long": {"review": f"{first} " * 5 + pair["sentence1"], "sentiment": number % 2},
            }[kind]
        )
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "task", "options"),
    [
        ("pairs", "single", {}),
        ("scores", "regression", {}),
        ("list", "multi", {}),
        ("flags", "multi", {}),
        ("long", "single", {"long_texts": "windows", "max_length": 16, "stride": 4}),
    ],
)
def test_each_task_type_trains_evaluates_and_predicts_like_the_pipeline(
    kind: str, task: str, options: dict[str, Any],
    tiny_folder: Path, tmp_path: Path, command: Command,
) -> None:  # fmt: skip
    rows, table, run = make_rows(kind), tmp_path / "table.csv", tmp_path / "run"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    chosen = {"data": table, "model": tiny_folder, "output_dir": run, **options}
    trained = command("run", *flags(**chosen))
    assert trained.code == 0, trained.errors
    assert "finetune predict" in trained.output
    results = read_json(run / "all_results.json")
    assert results["task"] == task

    evaluated = command("evaluate", run, "--device", "cpu", "--json")
    scores = json.loads(evaluated.output)
    assert scores["loss"] == pytest.approx(results["test_loss"], abs=1e-6)

    output = tmp_path / "answers.jsonl"
    arguments = ("--data", table, "--all-scores", "--output", output, "--device", "cpu")
    predicted = command("predict", run, *arguments)
    assert predicted.code == 0, predicted.errors
    answers = list(read_jsonl(output))
    assert len(answers) == len(rows)
    if kind == "long":
        return  # a pipeline reads only the first window
    classify = pipeline("text-classification", model=str(run / "model"), top_k=None)
    read_as = {
        "sentence1": "text",
        "sentence2": "text_pair",
        "comment_text": "text",
        "text": "text",
    }
    texts = [{read_as[name]: row[name] for name in read_as if name in row} for row in answers]
    for answer, found in zip(answers, map(classify, texts), strict=True):
        expected = answer.get("probabilities") or {"LABEL_0": answer["value"]}
        assert {one["label"]: one["score"] for one in found} == pytest.approx(expected, abs=1e-4)
