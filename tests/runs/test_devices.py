"""Runs on devices with wrong results, memory kept per shape, or slow bf16."""

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_faults import Fault, plant, zero_last_row
from prepared_runs import (
    begin_run,
    finish_run,
    prepare_tiny,
    train_prepared,
    train_tiny,
    was_emitted,
)
from tiny_training import OtherDevice
from transformers import BertForSequenceClassification

from finetune.devices.mps.device import FEW_SHAPES
from finetune.errors import ConfigurationError, FinetuneError
from finetune.events import Event, Step, WarningMessage, sent_to
from finetune.files import SUMS, read_json, write_json
from finetune.model.features import FrozenLayers
from finetune.runs import trained
from finetune.runs.folder import RunFolder
from finetune.runs.prepare import RunInputs
from finetune.runs.trained import TrainedModel
from finetune.training import precision as precision_module
from finetune.training.plan import TEXTS_PER_STEP


def prepare_on_other(model: Path, **options: Any) -> RunInputs:
    return replace(prepare_tiny(model, **options), device=OtherDevice())


def test_run_on_a_device_that_starts_to_fail_does_not_save_a_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    inputs = prepare_on_other(tiny_folder, num_train_epochs=4)

    def plant_once(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            plant(run.trainer, Fault(torch.nn.functional.linear, zero_last_row))

    with (
        sent_to(plant_once),
        pytest.raises(FinetuneError, match="other differs from the CPU after step ") as found,
        begin_run(inputs, tmp_path / "run") as run,
    ):
        run.train()

    assert found.value.remedy.startswith("start again with --overwrite --device cpu; ")
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize(
    "trained",
    [pytest.param({"freeze_core": True}, marks=pytest.mark.slow), {"train_layers": 1}],
    ids=str,
)
def test_wrong_device_features_are_detected_before_training(
    trained: dict[str, Any], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.devices.host.bf16_instructions", lambda: ["amx_bf16"])
    options = {"cache_dir": str(tmp_path / "cache"), "precision": "bf16", "max_steps": 1, **trained}
    train_prepared(prepare_on_other(tiny_folder, **options), tmp_path / "right")
    compute = FrozenLayers.features

    def compute_wrongly(*arguments: Any) -> torch.Tensor:
        return compute(*arguments).flip(-1)

    monkeypatch.setattr(FrozenLayers, "features", compute_wrongly)
    options["cache_dir"] = str(tmp_path / "other")
    with pytest.raises(FinetuneError, match="features of the frozen layers"):
        train_prepared(prepare_on_other(tiny_folder, **options), tmp_path / "wrong")


def copy_with_precision(run: Path, folder: Path, precision: str) -> Path:
    shutil.copytree(run, folder)
    file = folder / "model" / "inference.json"
    write_json(file, read_json(file) | {"precision": precision})
    file.with_name(SUMS).unlink()
    return folder


@pytest.mark.parametrize("passed", [False, True])
def test_device_with_silent_faults_uses_16_bits_only_after_a_parity_check(
    passed: bool, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune.devices.host.bf16_instructions", lambda: ["amx_bf16"])
    monkeypatch.setattr(precision_module, "has_parity", lambda *_, **__: passed)
    monkeypatch.setattr(trained, "select_device", lambda *_, **__: OtherDevice())
    run = RunFolder(copy_with_precision(finished_run, tmp_path / "run", "bf16"))
    model = TrainedModel.load(run, device="auto")
    assert model.predictor.precision == ("bf16" if passed else "fp32")


def test_bf16_on_a_cpu_without_bf16_instructions_is_rejected(
    finished_run: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision_module.host, "bf16_instructions", lambda: "")
    with pytest.raises(ConfigurationError, match="bf16 is slow here"):
        prepare_tiny(tiny_folder, precision="bf16")
    prepare_tiny(tiny_folder, precision="bf16", check_device=False)
    run = RunFolder(copy_with_precision(finished_run, tmp_path / "run", "bf16"))
    emitted: list[Event] = []
    with sent_to(emitted.append):
        TrainedModel.load(run, device="cpu")
    assert was_emitted(emitted, WarningMessage, "using fp32 instead of the run's bf16")


BATCH_SIZE, EVAL_BATCH_SIZE = 16, TEXTS_PER_STEP
Shape = tuple[int, int]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Examples and tokens of each forward pass, in order."""
    collected: list[Shape] = []
    original = BertForSequenceClassification.forward

    @functools.wraps(original)
    def forward(*args: Any, **inputs: torch.Tensor) -> Any:
        name = "inputs_embeds" if "inputs_embeds" in inputs else "input_ids"
        rows, tokens = inputs[name].shape[:2]
        # Other shapes are trials with few rows, before the model is moved to the device.
        if rows in (BATCH_SIZE, EVAL_BATCH_SIZE):
            collected.append((rows, tokens))
        return original(*args, **inputs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", forward)
    monkeypatch.setattr("finetune.devices.cpu.BatchShapes", lambda: FEW_SHAPES)
    return collected


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"freeze_core": True}, marks=pytest.mark.slow),
        pytest.param({"freeze_core": True, "feature_cache": False}, marks=pytest.mark.slow),
        {"train_layers": 1},
        pytest.param({"effective_batch_size": 32}, marks=pytest.mark.slow),
        {"max_train_samples": 61},
    ],
    ids=lambda options: " ".join(options) or "full",
)
def test_run_uses_at_most_six_shapes_with_the_largest_first(
    options: dict[str, Any], shapes: list[Shape], tiny_folder: Path, tmp_path: Path
) -> None:
    sizes = {"batch_size": BATCH_SIZE, "eval_batch_size": EVAL_BATCH_SIZE}
    run = train_tiny(
        tmp_path / "run", model=tiny_folder, cache_dir=str(tmp_path / "cache"), **sizes, **options
    )
    finish_run(run)

    # Evaluation with a different batch size would double the number of shapes.
    assert {rows for rows, _ in shapes} == {BATCH_SIZE}
    assert len(set(shapes)) <= 6
    first_rows, first_tokens = shapes[0]
    assert first_tokens == max(tokens for rows, tokens in shapes if rows == first_rows)


@pytest.mark.parametrize(
    "options", [{}, {"train_layers": 1}], ids=lambda options: " ".join(options)
)
def test_unlabeled_texts_use_the_shapes_of_the_run(
    options: dict[str, Any],
    shapes: list[Shape],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("finetune.training.plan.MIN_STEPS", 4)
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"what {'far ' * (row % 45)}{row}\n" for row in range(400)))
    options = {"cache_dir": str(tmp_path / "cache"), "unlabeled": str(texts), **options}
    run = train_tiny(tmp_path / "run", model=tiny_folder, contrastive="on", **options)
    finish_run(run)
    assert run.trainer.progress.unlabeled
    assert run.trainer.progress.unlabeled["texts"] == 400
    assert {rows for rows, _ in shapes} == {TEXTS_PER_STEP}
    assert max(tokens for _, tokens in shapes) >= 43
    assert len(set(shapes)) <= 6
