"""Runs with LoRA: what is trained, saved and rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model
from tiny_runs import TEXTS, Command, run_tiny
from transformers import AutoConfig, AutoModelForSequenceClassification

import finetune
from finetune.model import lora

LORA: dict[str, Any] = {"lora_rank": 4, "contrastive": "off", "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A finished run with LoRA; tests don't change it."""
    path = tmp_path_factory.mktemp("lora") / "run"
    run_tiny(path, model=tiny_folder, **LORA)
    return path


def test_adapter_takes_the_place_of_a_model_that_is_not_merged(
    run: Path, tiny_folder: Path, tmp_path: Path, command: Command
) -> None:
    model = tmp_path / "base"
    save_tiny_model(model)
    run_tiny(tmp_path / "run", model=model, **LORA, merge=False)

    predicted = finetune.predict(tmp_path / "run", TEXTS)

    assert not (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert [one.probability for one in predicted] == pytest.approx(
        [one.probability for one in finetune.predict(run, TEXTS)], abs=1e-5
    )
    push = ("push", tmp_path / "run", "ada/demo", "--dry-run")
    command(*push).assert_refused(2, "no weights", "--adapter")
    assert "adapter_model.safetensors" in command(*push, "--adapter").output
    torch.manual_seed(1)
    other = AutoConfig.from_pretrained(model)
    other.vocab_size += 10
    AutoModelForSequenceClassification.from_config(other).base_model.save_pretrained(model)
    predict = command("predict", tmp_path / "run", "Who?")
    predict.assert_refused(3, "the model's weights", "restore")


def test_without_peft_a_line_says_what_to_install(
    tiny_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "is_installed", lambda: False)
    common = ("--data", "questions", "--model", tiny_folder, "--output-dir", tmp_path / "run")

    command("run", *common, "--lora-rank", "8").assert_refused(2, "pip install peft")
