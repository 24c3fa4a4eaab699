"""Mean pooling in models that transformers loads without extra code."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, EUROBERT, save_tiny_model, tiny_model
from tiny_training import random_texts
from transformers import AutoModelForSequenceClassification, pipeline

from finetune.config.schema import Pooling
from finetune.model.load import TextModel, load_model, save_model
from finetune.model.mean_pooling import compute_only_first_token, has_mean_layer, pool_by_mean
from finetune.model.structure import encoder_layers
from finetune.tasks.single import Single
from finetune.tokenization.examples import collate

# ModernBERT has its own mean pooling, and DeBERTa layers have different modules.
WITH_LAYER = ("bert", "distilbert", "roberta", "electra")
TEXTS = ["Who wrote Faust?", "by", "How old is the river Nile, and how long?"]


def load(folder: Path, pooling: Pooling = "auto", *, strict: bool = False) -> TextModel:
    torch.manual_seed(0)
    return load_model(
        str(folder), revision=None, task=Single(["a", "b", "c"]), from_scratch=False,
        pooling=pooling, strict=strict)  # fmt: skip


def logits_of(text_model: TextModel) -> torch.Tensor:
    encoded = text_model.encode(TEXTS, max_length=32)
    inputs = text_model.inputs(encoded).inputs_of(np.arange(len(TEXTS)), 32)
    with torch.inference_mode():
        return text_model.model.eval()(**inputs).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_head_reads_the_normalized_mean_of_non_padding_tokens(architecture: str) -> None:
    model, plain = tiny_model(architecture), tiny_model(architecture).eval()
    assert pool_by_mean(model) == (architecture != "deberta-v2")
    assert has_mean_layer(model) == (architecture in WITH_LAYER)
    if architecture not in WITH_LAYER:
        assert len(encoder_layers(model)) == len(encoder_layers(plain))
        return
    tensors = collate(random_texts(6), np.arange(6), padded_length=16)
    with torch.no_grad():
        tokens = plain.base_model(**tensors)[0]
        mask = tensors["attention_mask"][..., None]
        mean = (tokens * mask).sum(1) / mask.sum(1)
        expected = torch.nn.functional.layer_norm(mean, mean.shape[-1:])
        actual = model.eval().base_model(**tensors)[0][:, 0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)
    logits = model(**tensors).logits
    compute_only_first_token(model)
    assert model.base_model(**tensors)[0].shape[1] == 1
    torch.testing.assert_close(model(**tensors).logits, logits, rtol=0, atol=1e-6)
    shorter = collate(random_texts(6), np.arange(6), padded_length=12)
    torch.testing.assert_close(model(**shorter).logits, model(**tensors).logits)


@pytest.mark.parametrize("architecture", [*WITH_LAYER, "modernbert", *EUROBERT])
def test_saved_mean_pooling_model_is_standard_and_recognized(
    architecture: str, tmp_path: Path
) -> None:
    source = save_tiny_model(tmp_path / "source", architecture)
    text_model = load(source, "mean")
    assert (load(source).pooling, text_model.pooling) == ("auto", "mean")
    save_model(text_model, tmp_path / "model", max_length=64)
    expected = logits_of(text_model)
    for again in (
        load(tmp_path / "model", strict=True),
        load(tmp_path / "model"),
        load(tmp_path / "model", "mean"),
    ):
        assert again.structure.layers == text_model.structure.layers
        assert again.structure.mean_layer == text_model.structure.mean_layer
        torch.testing.assert_close(logits_of(again), expected, rtol=0, atol=1e-6)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    classify = pipeline("text-classification", model=plain, tokenizer=text_model.tokenizer)
    probabilities = expected.softmax(1).max(1).values.tolist()
    assert [one["score"] for one in classify(TEXTS)] == pytest.approx(probabilities, abs=1e-5)
    undone = load(tmp_path / "model", "cls")
    assert len(encoder_layers(undone.model)) == len(text_model.structure.layers)
