"""Each encoder on pairs of texts with several labels, from a table to the pipeline.

One label a text is tested in runs/test_encoders.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_models import ARCHITECTURES, COMMON_WORDS, save_tiny_model
from tiny_runs import run_tiny
from transformers import pipeline

import finetune


@pytest.mark.slow
@pytest.mark.parametrize("is_head", [False, True], ids=["full", "head"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_trains_saves_and_predicts_as_the_pipeline(
    architecture: str, is_head: bool, tmp_path: Path
) -> None:
    random, words, rows = np.random.default_rng(0), COMMON_WORDS.split(), []
    for _ in range(40):
        text, pair = (" ".join(random.choice(words, 6)) for _ in range(2))
        labels = [word for word in ("the", "of", "in") if random.random() < 0.5]
        rows.append({"text": text, "text_pair": pair, "label": labels})
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    model = save_tiny_model(tmp_path / "model", architecture)
    run = tmp_path / "run"
    results = run_tiny(
        run, model=model, data=str(table), freeze_core=is_head, feature_cache=is_head,
        text_pair_column="text_pair", max_train_samples=None, max_steps=2,
    )  # fmt: skip
    assert results["task"] == "multi"
    pairs = [(row["text"], row["text_pair"]) for row in rows[:5]]
    predictions = finetune.predict(run, pairs, device="cpu", all_scores=True)
    classify = pipeline("text-classification", model=str(run / "model"), top_k=None)
    for prediction, (text, pair) in zip(predictions, pairs, strict=True):
        found = classify({"text": text, "text_pair": pair})
        by_name = {one["label"]: one["score"] for one in found}
        assert by_name == pytest.approx(prediction.probabilities, abs=1e-4)
