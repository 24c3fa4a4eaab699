"""Whole runs on a device that keeps memory for each new shape, as MPS does."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_runs import finish_run, train_tiny
from tiny_training import give_few_shapes
from transformers import BertForSequenceClassification

BATCH_SIZE, EVAL_BATCH_SIZE = 16, 64
Shape = tuple[int, int]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """Examples and tokens of each forward of a batch, in order."""
    seen: list[Shape] = []
    original = BertForSequenceClassification.forward

    @functools.wraps(original)
    def forward(*args: Any, **inputs: torch.Tensor) -> Any:
        name = "inputs_embeds" if "inputs_embeds" in inputs else "input_ids"
        rows, tokens = inputs[name].shape[:2]
        # The others are trials with a few rows, before the model is moved to the device.
        if rows in (BATCH_SIZE, EVAL_BATCH_SIZE):
            seen.append((rows, tokens))
        return original(*args, **inputs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", forward)
    give_few_shapes(monkeypatch)
    return seen


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
def test_run_has_at_most_six_shapes_and_the_largest_first(
    options: dict[str, Any], shapes: list[Shape], tiny_folder: Path, tmp_path: Path
) -> None:
    sizes = {"batch_size": BATCH_SIZE, "eval_batch_size": EVAL_BATCH_SIZE}
    run = train_tiny(
        tmp_path / "run", model=tiny_folder, cache_dir=str(tmp_path / "cache"), **sizes, **options
    )
    finish_run(run)

    # Evaluation with another batch size would add as many shapes.
    assert {rows for rows, _ in shapes} == {BATCH_SIZE}
    assert len(set(shapes)) <= 6
    first_rows, first_tokens = shapes[0]
    assert first_tokens == max(tokens for rows, tokens in shapes if rows == first_rows)
