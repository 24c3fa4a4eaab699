"""Every architecture in every mode, from a folder of weights to predictions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import finish_run, prepare_tiny, train_tiny
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, SIZES, save_tiny_model, tiny_tokenizer
from tiny_runs import weights_of
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import finetune
from finetune.config.schema import Mode
from finetune.errors import ModelUnsupportedError
from finetune.files import read_jsonl
from finetune.model.structure import find_structure, trainable_parameter_names

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


def test_what_can_not_read_the_mean_is_refused_only_where_that_is_asked(tmp_path: Path) -> None:
    AlbertModel(AlbertConfig(**SIZES, embedding_size=16)).save_pretrained(tmp_path / "albert")
    tiny_tokenizer().save_pretrained(tmp_path / "albert")
    with pytest.raises(ModelUnsupportedError, match="--pooling mean can't be used with") as refused:
        prepare_tiny(tmp_path / "albert", pooling="mean")
    assert "--pooling mean" in refused.value.remedy
    with pytest.raises(ModelUnsupportedError, match="pooling mean can't be used with"):
        finetune.find_batch(model=tmp_path / "albert", pooling="mean", device="cpu")
    assert prepare_tiny(tmp_path / "albert").text_model.pooling == "cls"
