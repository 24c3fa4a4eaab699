"""Every architecture in every mode, from a folder of weights to predictions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prepared_runs import finish_run, train_tiny
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, COMMON_WORDS, save_tiny_model
from tiny_runs import run_tiny, weights_of
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

import finetune
from finetune.config.mode import Mode
from finetune.files import read_jsonl
from finetune.model.freeze import trainable_parameter_names
from finetune.model.structure import find_structure

MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "last-2": {"train_layers": 2},
    "head": {"freeze_core": True},
    "classifier": {"head": "classifier"},
}
QUICK_CASES = {
    ("bert", "classifier"),
    ("distilbert", "head"),
    ("roberta", "full"),
    ("deberta-v2", "last-2"),
}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK_CASES else pytest.mark.slow)
    for case in ((architecture, mode) for architecture in ARCHITECTURES for mode in MODES)
]


@pytest.mark.parametrize(("architecture", "mode"), CASES)
def test_encoder_trains_what_its_mode_says_and_predicts_in_a_pipeline(
    architecture: str, mode: str, tmp_path: Path
) -> None:
    source, folder = save_tiny_model(tmp_path / "source", architecture), tmp_path / "run"
    # A learning rate that changes fp32 weights wherever there is a gradient.
    options = {"max_steps": 3, "learning_rate": 1e-2, "validation_fraction": 0, **MODES[mode]}
    results = finish_run(train_tiny(folder, model=source, **options))

    assert results.facts.mode == Mode(mode)
    saved = AutoModelForSequenceClassification.from_pretrained(folder / "model").eval()
    assert weights_of(folder).keys() == saved.state_dict().keys()
    trained = trainable_parameter_names(find_structure(saved), mode=Mode(mode))
    assert results.facts.trained_parameters == sum(
        parameter.numel() for name, parameter in saved.named_parameters() if name in trained
    )
    before = load_file(source / "model.safetensors")
    for name, parameter in saved.base_model.named_parameters():
        is_trained = f"{saved.base_model_prefix}.{name}" in trained
        if name in before:
            assert torch.equal(parameter, before[name]) != is_trained, name

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    classify = pipeline("text-classification", model=saved, tokenizer=tokenizer)
    rows = [row for row in read_jsonl(folder / "predictions.jsonl") if len(row["text"]) < 40][:8]
    texts = [row["text"] for row in rows]
    answers = finetune.predict(folder, texts, device="cpu")
    for row, answer, expected in zip(rows, answers, classify(texts), strict=True):
        assert row["predicted"] == answer.label == expected["label"]
        assert row["probability"] == pytest.approx(expected["score"], abs=1e-5)
        assert answer.probability == pytest.approx(expected["score"], abs=1e-5)
    scores = finetune.evaluate(folder, device="cpu").scores
    assert scores.accuracy == results.test.accuracy
    assert scores.loss == pytest.approx(results.test.loss, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_head", [False, True], ids=["full", "head"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoder_trains_on_pairs_with_several_labels_and_predicts_as_the_pipeline(
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
