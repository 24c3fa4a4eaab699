import json
from typing import Any

import pyarrow
import pytest
import torch
from tiny_runs import Command
from transformers import AutoConfig, AutoModelForSequenceClassification

from finetune.commands.models import read_encoders
from finetune.runs.guess import suggest_encoder

ENCODERS = {one["name"]: one for one in read_encoders()}


LANGUAGES = ("Where is it", "Die Verspätung ist groß", "快递太慢了", "ዕቃው ዘግይቶ ደረሰ")


@pytest.mark.parametrize(("default_for", "has_few"), [("few rows", True), ("many rows", False)])
def test_suggested_encoders_are_listed_as_defaults(default_for: str, has_few: bool) -> None:
    texts = (pyarrow.chunked_array([[text] * 20]) for text in LANGUAGES)
    proposed = {suggest_encoder(column, has_few_rows=has_few) for column in texts}
    assert proposed == {name for name, one in ENCODERS.items() if one["default_for"] == default_for}


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=[*ENCODERS])
def test_encoder_sizes_match_their_configs(encoder: dict[str, Any]) -> None:
    config = AutoConfig.for_model(**encoder["config"])
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    parameters = sum(one.numel() for one in model.base_model.parameters())
    assert parameters == encoder["parameters"]
    # RoBERTa counts positions from 2.
    positions = config.max_position_embeddings - 2 * ("roberta" in config.model_type)
    assert positions == encoder["max_tokens"]


def test_models_lists_encoders_with_size_language_and_license(command: Command) -> None:
    shown = command("models")
    assert shown.code == 0, shown.errors
    minilm = next(line for line in shown.output.splitlines() if line.startswith("minilm"))
    assert all(
        words in minilm
        for words in ("few rows", "English", "23", "512", "1.4", "Apache-2.0", "offline")
    )
    models = json.loads(command("models", "--json").output)["models"]
    assert all(one["source"].startswith("https://huggingface.co/") for one in models)
