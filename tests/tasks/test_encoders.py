"""Each encoder with each kind, all of it and its head alone, from a table to the pipeline.

One label for one text is tried in runs/test_encoders.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import ARCHITECTURES, COMMON_WORDS, save_tiny_model
from tiny_runs import run_tiny
from transformers import pipeline

import finetune

WORDS = np.array(COMMON_WORDS.split())
TASKS = {"multi": "multi", "regression": "regression", "pairs": "single"}


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Return rows whose labels say how often some words stand in their texts."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(40):
        text, second = (" ".join(random.choice(WORDS, 6)) for _ in range(2))
        found = [word for word in ("the", "of", "in") if random.random() < 0.5]
        label = {"multi": found, "regression": len(found) + number / 7}.get(kind, number % 2)
        texts = {"sentence1": text, "sentence2": second} if kind == "pairs" else {"text": text}
        rows.append({**texts, "label": label})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of each kind, and each encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    for kind in TASKS:
        lines = map(json.dumps, rows_of(kind))
        (folder / f"{kind}.jsonl").write_text("\n".join(lines))
    for architecture in ARCHITECTURES:
        save_tiny_model(folder / architecture, architecture)
    return folder


def probabilities_of(answer: Mapping[str, Any]) -> Mapping[str, float]:
    return answer.get("probabilities") or {"LABEL_0": answer["value"]}


@pytest.mark.slow
@pytest.mark.parametrize("is_head", [False, True], ids=["full", "head"])
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_trains_saves_and_answers_as_the_pipeline(
    architecture: str, kind: str, is_head: bool, folder: Path, tmp_path: Path
) -> None:
    results = run_tiny(
        tmp_path / "run", model=folder / architecture, data=str(folder / f"{kind}.jsonl"),
        freeze_core=is_head, max_train_samples=None, max_steps=2, feature_cache=is_head,
    )  # fmt: skip
    assert results["task"] == TASKS[kind]
    rows = rows_of(kind)[:5]
    pairs = [(row["sentence1"], row["sentence2"]) for row in rows if kind == "pairs"]
    given = pairs or [row["text"] for row in rows]
    answers = finetune.predict(tmp_path / "run", given, device="cpu", all_scores=True)
    classify = pipeline("text-classification", model=str(tmp_path / "run/model"), top_k=None)
    names = ("text", "text_pair")
    asked = [dict(zip(names, own, strict=True)) for own in pairs]
    asked = asked or [{"text": one} for one in given]
    for answer, found in zip(answers, map(classify, asked), strict=True):
        by_name = {one["label"]: one["score"] for one in found}
        assert by_name == pytest.approx(probabilities_of(answer.result), abs=1e-4)
