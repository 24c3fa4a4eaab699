"""Estimates of the result of a linear head on a table."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from tiny_runs import run_tiny

from finetune.config.schema import Config, DataConfig, change_options
from finetune.data.dataset import LoadedData
from finetune.data.load import load_splits
from finetune.events import Event, Info, sent_to
from finetune.runs.linear_head import estimate_linear_head

QUESTIONS = Config(DataConfig("questions"))


def config_of(model: str | Path, **options: Any) -> Config:
    chosen = {"model": str(model), "device": "cpu", "precision": "fp32", **options}
    return change_options(QUESTIONS, chosen)


def load(config: Config) -> tuple[pyarrow.Table, LoadedData]:
    data = load_splits(config.data)
    return data.splits["train"], data


def test_head_run_reuses_the_features_of_the_estimate(tiny_folder: Path, tmp_path: Path) -> None:
    options = {"max_train_samples": 64, "cache_dir": str(tmp_path / "cache"), "batch_size": "auto"}
    config = config_of(tiny_folder, **options, freeze_core=True)
    found = estimate_linear_head(config, *load(config))
    assert found
    assert (found.rows, found.sampled, found.classes, found.metric) == (64, 64, 6, "accuracy")
    assert 0 < found.low < found.value < found.high < 1
    assert found.lines[0].startswith("64 training rows, 6 classes: a linear head on the frozen ")
    assert "fitted" in found.method

    emitted: list[Event] = []
    run_tiny(
        tmp_path / "run", model=tiny_folder, **options | {"batch_size": 16}, freeze_core=True,
        validation_fraction=None, learning_rate=None, num_train_epochs=None,
        emit=emitted.append,
    )  # fmt: skip
    messages = [one.message for one in emitted if isinstance(one, Info)]
    assert "reusing frozen-layer features for 64 train rows" in messages


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([f"{number / 7:.3f}" for number in range(60)], "cross-validated: Off by "),
        (["a|b", "b", "a|c"] * 20, "cross-validated: Micro F1 "),
    ],
)
def test_regression_and_multi_label_estimates_have_their_own_metric(
    labels: list[str], words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "rows.csv"
    rows = (f"text {number} {number % 7},{label}" for number, label in enumerate(labels))
    table.write_text("\n".join(["text,label", *rows]))
    config = config_of(tiny_folder, data=str(table), long_texts="windows")
    found = estimate_linear_head(config, *load(config))
    assert found
    assert words in found.lines[0]
    assert np.isfinite([found.low, found.value, found.high, found.baseline]).all()
    assert found.low <= found.value <= found.high
    assert "plain" in found.lines[1]


@pytest.mark.parametrize(
    ("model", "rows", "reason"),
    [
        ("bert-base-uncased", 64, "not on this machine"),
        (".", 64, "config.json"),
        (None, 9, "9 training rows are too few"),
    ],
)
def test_missing_estimate_is_explained_and_not_an_error(
    model: str | None, rows: int, reason: str, tiny_folder: Path
) -> None:
    config = config_of(model or tiny_folder, max_train_samples=rows)
    emitted: list[Event] = []
    with sent_to(emitted.append):
        assert estimate_linear_head(config, *load(config)) is None
    assert isinstance(emitted[-1], Info)
    assert emitted[-1].message.startswith("no linear-head estimate")
    assert reason in emitted[-1].message
