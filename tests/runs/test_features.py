"""Training on stored features gives the same model, and never reuses features of other models."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prepared_runs import largest_difference, parameters_of, prepare_tiny, train_tiny, was_emitted
from tiny_models import SIZES, save_tiny_model
from tiny_runs import have_same_bits
from transformers import ConvBertConfig, ConvBertModel

from finetune.devices.base import BatchSize
from finetune.events import Event, Info, WarningMessage, sent_to
from finetune.runs.features import stored_features
from finetune.runs.plan import make_plan
from finetune.runs.prepare import RunInputs
from finetune.runs.run import Run

# Adam takes steps as large as the learning rate even if gradients are only rounding errors.
CLOSE: dict[str, Any] = {"learning_rate": 1e-4, "num_train_epochs": 3}
CLOSE |= {"max_train_samples": 32, "validation_fraction": 0}


def logits_of(run: Run, split: str) -> np.ndarray:
    return run.trainer.predict(split)[0]


def train_both(model: Path, tmp_path: Path, **options: Any) -> tuple[Run, Run]:
    """Train once on stored features, and once with the whole model in each step."""
    options = CLOSE | options
    emitted: list[Event] = []
    with sent_to(emitted.append):
        stored = train_tiny(
            tmp_path / "stored", model=model, cache_dir=str(tmp_path / "cache"),
            **options)  # fmt: skip
    assert was_emitted(emitted, Info, "computing frozen-layer features for 32 train rows")
    emitted.clear()
    with sent_to(emitted.append):
        plain = train_tiny(tmp_path / "plain", model=model, feature_cache=False, **options)
    assert not was_emitted(emitted, Info, "features")
    return stored, plain


# Other architectures and modes are tested without a run, in model/test_features.py.
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("bert", {"train_layers": 1}),
        ("deberta-v2", {"freeze_core": True}),
        ("modernbert", {"head": "classifier"}),
    ],
)
def test_weights_match_training_of_the_whole_model(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", architecture)
    stored, plain = train_both(model, tmp_path, **options)
    assert largest_difference(parameters_of(stored), parameters_of(plain)) < 1e-5
    assert stored.progress.loss_sum == pytest.approx(plain.progress.loss_sum, abs=1e-4)
    np.testing.assert_allclose(logits_of(stored, "test"), logits_of(plain, "test"), atol=1e-4)


def test_model_that_cannot_be_split_is_reported_and_trained_as_a_whole(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    ConvBertModel(ConvBertConfig(**SIZES, embedding_size=16)).save_pretrained(model)
    emitted: list[Event] = []
    options = {"train_layers": 1, "max_steps": 2, "cache_dir": str(tmp_path / "cache")}
    with sent_to(emitted.append):
        run = train_tiny(tmp_path / "run", model=model, **options)
    assert was_emitted(emitted, WarningMessage, "ConvBertForSequenceClassification can't be split")
    assert not (tmp_path / "cache").exists()
    plain = train_tiny(tmp_path / "plain", model=model, feature_cache=False, **options)
    assert have_same_bits(parameters_of(run), parameters_of(plain))


SMALL: dict[str, Any] = {"max_train_samples": 16, "validation_fraction": 0}


def computes(inputs: RunInputs) -> bool:
    """Return whether training features were computed and not read from the store."""
    emitted: list[Event] = []
    rows = inputs.config.training.eval_batch_size
    size = BatchSize(rows, "evaluation batch size", inputs.device)
    inputs = replace(inputs, examples={"train": inputs.examples["train"]})
    with sent_to(emitted.append):
        stored_features(inputs, make_plan(inputs), size)
    computed = was_emitted(emitted, Info, "computing frozen-layer features")
    assert computed != was_emitted(emitted, Info, "reusing frozen-layer features")
    return computed


@pytest.fixture(scope="module")
def prepared_again(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunInputs]:
    """Return a function that prepares a run whose store contains features for ``last-1``."""
    options = {
        "cache_dir": str(tmp_path_factory.mktemp("store")), "train_layers": 1, **SMALL
    }  # fmt: skip

    def prepare_again(model: Path = tiny_folder, **changes: Any) -> RunInputs:
        return prepare_tiny(model, **(options | changes))

    assert computes(prepare_again())
    assert not computes(prepare_again())
    return prepare_again


def test_features_are_reused_if_they_do_not_depend_on_the_change(
    prepared_again: Callable[..., RunInputs],
) -> None:
    inputs = prepared_again(
        seed=7, learning_rate=1e-5, num_train_epochs=9, weight_decay=0.3,
        batch_size=4, effective_batch_size=32, class_weights="balanced", cache_gib=3,
        max_length=60,  # longer than all texts
    )  # fmt: skip
    assert not computes(inputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_length": 6},
        {"max_train_samples": 17},
        {"precision": "bf16"},
        {"train_layers": 2},
        {"train_layers": None, "head": "classifier"},
        {"eval_batch_size": 8},
    ],
    ids=str,
)
def test_features_are_recomputed_if_they_depend_on_the_change(
    changes: dict[str, Any],
    prepared_again: Callable[..., RunInputs],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetune.devices.host.bf16_instructions", lambda: ["amx_bf16"])
    assert computes(prepared_again(**changes))


def test_changed_model_weights_need_new_features(prepared_again: Callable[..., RunInputs]) -> None:
    inputs = prepared_again()
    weight = inputs.text_model.model.get_parameter("bert.embeddings.word_embeddings.weight")
    weight.data.view(torch.int32)[299, 31] ^= 1
    assert computes(inputs)


def test_features_are_computed_in_each_step_if_the_disk_is_full(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    options = {**CLOSE, "train_layers": 1}
    emitted: list[Event] = []
    with sent_to(emitted.append):
        run = train_tiny(
            tmp_path / "run", model=tiny_folder, cache_dir=str(tmp_path / "cache"),
            **options)  # fmt: skip
    assert was_emitted(emitted, WarningMessage, "can't be stored (No space left on device): the")
    plain = train_tiny(tmp_path / "plain", model=tiny_folder, feature_cache=False, **options)
    assert have_same_bits(parameters_of(run), parameters_of(plain))
