"""Runs with LoRA: what is trained, saved and rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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


def test_only_adapters_and_the_output_layer_change(run: Path, tiny_folder: Path) -> None:
    before = load_file(tiny_folder / "model.safetensors")
    after = load_file(run / "model" / "model.safetensors")

    names = [name for name in before if not torch.equal(before[name], after[f"bert.{name}"])]

    assert names
    assert all(
        ("layer." in name and name.endswith("dense.weight")) or "self" in name for name in names
    )


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-rank", "0"], "--lora-rank is 0"),
        (["--lora-rank", "33"], "above the hidden size, 32"),
        (["--lora-rank", "8", "--lora-targets", "nothing"], "attention.self.query"),
        (["--lora-rank", "8", "--train-layers", "4"], "the model has 3 layers"),
        (["--lora-rank", "8", "--freeze-core"], "can't be combined"),
    ],
)
def test_bad_input_is_refused(
    options: list[str], words: str, tiny_folder: Path, tmp_path: Path,
    command: Command,
) -> None:  # fmt: skip
    common = ("--data", "questions", "--model", tiny_folder, "--output-dir", tmp_path / "run")

    command("run", *common, *options).assert_refused(2, words)

    assert not (tmp_path / "run").exists()


def test_without_peft_a_line_says_what_to_install(
    tiny_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "is_installed", lambda: False)
    common = ("--data", "questions", "--model", tiny_folder, "--output-dir", tmp_path / "run")

    command("run", *common, "--lora-rank", "8").assert_refused(2, "pip install peft")
