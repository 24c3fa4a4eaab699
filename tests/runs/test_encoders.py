"""Every architecture in every mode, from a folder of weights to a model that answers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, save_tiny_model
from tiny_runs import TEXTS, run_tiny
from transformers import AutoModelForSequenceClassification, pipeline

import finetune
from finetune.model.freeze import trained_names
from finetune.model.mode import Mode
from finetune.model.structure import find_structure

MODES = {
    "full": {},
    "last-2": {"train_layers": 2},
    "head": {"freeze_core": True},
    "classifier": {"head": "classifier"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    return {name: save_tiny_model(root / name, name) for name in ARCHITECTURES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoder_trains_what_its_mode_says_and_answers_in_a_pipeline(
    architecture: str, mode: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[architecture]
    # A rate that shows in fp32 wherever there is a gradient at all.
    options = {"max_steps": 3, "learning_rate": 1e-2, "validation_fraction": 0, **MODES[mode]}
    results = run_tiny(tmp_path / "run", model=source, **options)

    assert results["mode"] == mode
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    trained = trained_names(find_structure(saved), mode=Mode(mode))
    assert results["trained_parameters"] == sum(
        parameter.numel() for name, parameter in saved.named_parameters() if name in trained
    )
    before = load_file(source / "model.safetensors")
    for name, parameter in saved.base_model.named_parameters():
        is_trained = f"{saved.base_model_prefix}.{name}" in trained
        if name in before:
            assert torch.equal(parameter, before[name]) != is_trained, name

    answers = pipeline("text-classification", model=str(tmp_path / "run" / "model"))(TEXTS)
    expected = finetune.predict(tmp_path / "run", TEXTS, device="cpu")
    assert [one["label"] for one in answers] == [one["label"] for one in expected]
