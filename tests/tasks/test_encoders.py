"""Each encoder with each task type, all of it and its head alone, from a table to the pipeline.

One label a text is tested in runs/test_encoders.py.
"""

import json
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


def draw_rows(table: str) -> list[dict[str, Any]]:
    """Return rows whose labels depend on a few words of their texts."""
    random, rows = np.random.default_rng(0), []
    for number in range(40):
        text, second = (" ".join(random.choice(WORDS, 6)) for _ in range(2))
        found = [word for word in ("the", "of", "in") if random.random() < 0.5]
        label = {"multi": found, "regression": len(found) + number / 7, "pairs": number % 2}[table]
        pair = {"text_pair": second} if table == "pairs" else {}
        rows.append({"text": text, **pair, "label": label})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table for each task type, and each encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    for table in TASKS:
        (folder / f"{table}.jsonl").write_text("\n".join(map(json.dumps, draw_rows(table))))
    for architecture in ARCHITECTURES:
        save_tiny_model(folder / architecture, architecture)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("is_head", [False, True], ids=["full", "head"])
@pytest.mark.parametrize("table", TASKS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_trains_saves_and_predicts_as_the_pipeline(
    architecture: str, table: str, is_head: bool, folder: Path, tmp_path: Path
) -> None:
    pair_column = {"text_pair_column": "text_pair"} if table == "pairs" else {}
    results = run_tiny(
        tmp_path / "run", model=folder / architecture, data=str(folder / f"{table}.jsonl"),
        freeze_core=is_head, max_train_samples=None, max_steps=2, feature_cache=is_head,
        **pair_column,
    )  # fmt: skip
    assert results["task"] == TASKS[table]
    rows = [{name: row[name] for name in row if name != "label"} for row in draw_rows(table)[:5]]
    texts = [tuple(row.values()) if len(row) == 2 else row["text"] for row in rows]
    predictions = finetune.predict(tmp_path / "run", texts, device="cpu", all_scores=True)
    classify = pipeline("text-classification", model=str(tmp_path / "run/model"), top_k=None)
    for prediction, found in zip(predictions, map(classify, rows), strict=True):
        expected = prediction.probabilities or {"LABEL_0": prediction.value}
        by_name = {one["label"]: one["score"] for one in found}
        assert by_name == pytest.approx(expected, abs=1e-4)
