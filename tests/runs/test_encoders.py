"""Each architecture in each mode, from pretrained weights to predictions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import finish_run, prepare_tiny, train_tiny
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, EUROBERT, SIZES, save_tiny_model, tiny_tokenizer
from tiny_runs import weights_of
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

import finetune
from finetune.config.load import load_config
from finetune.config.modes import Mode
from finetune.errors import ModelUnsupportedError
from finetune.files import read_jsonl
from finetune.model.structure import find_structure, trainable_parameter_names
from finetune.runs.prepare import prepare

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
def test_each_mode_trains_its_parameters_and_predicts_like_the_pipeline(
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


def test_unsupported_mean_pooling_is_rejected_only_if_requested(tmp_path: Path) -> None:
    AlbertModel(AlbertConfig(**SIZES, embedding_size=16)).save_pretrained(tmp_path / "albert")
    tiny_tokenizer().save_pretrained(tmp_path / "albert")
    with pytest.raises(ModelUnsupportedError, match="--pooling mean can't be used with") as raised:
        prepare_tiny(tmp_path / "albert", pooling="mean")
    assert "--pooling mean" in raised.value.remedy
    with pytest.raises(ModelUnsupportedError, match="pooling mean can't be used with"):
        finetune.find_batch(model=tmp_path / "albert", pooling="mean", device="cpu")
    assert prepare_tiny(tmp_path / "albert").text_model.pooling == "auto"


LORA: dict[str, Any] = {"lora_rank": 4, "contrastive": "off", "max_steps": 2}
POOLED: dict[str, tuple[str, str | None]] = {
    "bert": ("bert", None),
    "modernbert, cls": ("modernbert", "cls"),
    "modernbert, mean": ("modernbert", "mean"),
    **{f"{name}, {pooling}": (name, pooling) for name in EUROBERT for pooling in ("late", "mean")},
    "xlnet": ("xlnet", None),
}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("modernbert, mean", LORA),
        *(
            pytest.param(model, options, marks=pytest.mark.slow)
            for model in POOLED
            for options in (LORA, {"max_steps": 2}, {"freeze_core": True})
            if (model.endswith(("late", "xlnet")) or options is LORA)
            and model != "modernbert, mean"
        ),
    ],
)
def test_pooling_is_saved_and_repeated(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    architecture, pooling = POOLED[model]
    changes = {"classifier_pooling": pooling} if pooling else {}
    source = save_tiny_model(tmp_path / "source", architecture, **changes)
    options = {"learning_rate": 1e-2} | options
    run = train_tiny(tmp_path / "run", model=source, **options)
    pretrained, tokens = prepare_tiny(source, **options).text_model, torch.tensor([[5, 6, 7, 8]])
    trained, _ = run.trainer.predict("test")
    results = finish_run(run)

    repeated = prepare(load_config(file=str(tmp_path / "run" / "config.yaml")).config).text_model
    torch.testing.assert_close(repeated.model(tokens).logits, pretrained.model(tokens).logits)
    saved, _ = run.trainer.predict("test")
    if "freeze_core" not in options:
        torch.testing.assert_close(saved, trained, rtol=0, atol=1e-4)
    scores = finetune.evaluate(tmp_path / "run", device="cpu").scores
    assert scores.loss == pytest.approx(results.test.loss, abs=1e-5)
