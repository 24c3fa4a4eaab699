"""Runs whose head reads the mean of the tokens."""

from pathlib import Path
from typing import Any

import pytest
from prepared_runs import finish_run, prepare_tiny, train_tiny
from tiny_models import SIZES, tiny_tokenizer
from transformers import AlbertConfig, AlbertModel, AutoModelForSequenceClassification, pipeline

import finetune
from finetune.errors import ModelUnsupportedError
from finetune.files import read_jsonl
from finetune.model.mean_pooling import has_mean_layer
from finetune.runs.folder import RunFolder


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "long_texts": "windows", "max_length": 10, "stride": 2},
        {"train_layers": 2, "loss": "focal"},
        {"freeze_core": True, "label_smoothing": 0.1},
    ],
    ids=["full", "last-2", "head"],
)
def test_a_run_trains_all_but_the_layer_of_the_mean_and_gives_a_plain_model(
    options: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    trained = train_tiny(folder, model=tiny_folder, pooling="mean", max_steps=3, **options)
    results = finish_run(trained)
    assert RunFolder(folder).read_config().model.pooling == "mean"
    saved = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    assert saved.config.num_hidden_layers == SIZES["num_hidden_layers"] + 1
    assert has_mean_layer(saved)

    rows = [row for row in read_jsonl(folder / "predictions.jsonl") if len(row["text"]) < 30][:4]
    texts = [row["text"] for row in rows]
    classify = pipeline("text-classification", model=str(folder / "model"))
    for row, answer, expected in zip(
        rows, finetune.predict(folder, texts, device="cpu"), classify(texts), strict=True
    ):
        assert answer.probability == pytest.approx(row["probability"], abs=1e-5)
        if "long_texts" not in options:
            assert answer.probability == pytest.approx(expected["score"], abs=1e-5)
    scores = finetune.evaluate(folder, device="cpu").scores
    assert scores.loss == pytest.approx(results.test.loss, abs=1e-5)

    again = prepare_tiny(folder / "model")
    assert again.text_model.pooling == "mean"
    assert len(again.text_model.structure.layers) == SIZES["num_hidden_layers"]


def test_what_can_not_read_the_mean_is_refused_only_where_that_is_asked(tmp_path: Path) -> None:
    AlbertModel(AlbertConfig(**SIZES, embedding_size=16)).save_pretrained(tmp_path / "albert")
    tiny_tokenizer().save_pretrained(tmp_path / "albert")
    with pytest.raises(ModelUnsupportedError, match="--pooling mean can't be used with") as refused:
        prepare_tiny(tmp_path / "albert", pooling="mean")
    assert "--pooling mean" in refused.value.remedy
    assert prepare_tiny(tmp_path / "albert").text_model.pooling == "cls"
