"""Runs with enough validation rows for a temperature."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import run_tiny, weights_of

from finetune.evaluation.statistics import measure_reliability
from finetune.files import read_json, read_jsonl
from finetune.model.load import load_model
from finetune.runs.folder import RunFolder
from finetune.runs.results import read_results
from finetune.tasks.single import Single


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Path]:
    """Two runs that differ only in calibration."""
    parent = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"model": tiny_folder, "validation_fraction": 0.3}
    run_tiny(parent / "calibrated", **options)
    run_tiny(parent / "plain", calibrate=False, **options)
    return parent / "calibrated", parent / "plain"


def test_the_predictions_are_those_of_the_run_without(runs: tuple[Path, Path]) -> None:
    calibrated, plain = (read_jsonl(run / "predictions.jsonl") for run in runs)
    assert [row["predicted"] for row in calibrated] == [row["predicted"] for row in plain]
    assert [row["probability"] for row in calibrated] != [row["probability"] for row in plain]
    results, others = (read_results(RunFolder(run)) for run in runs)
    assert others.calibration is None
    assert results.calibration is not None
    assert results.test.accuracy == others.test.accuracy
    probabilities = [row["probability"] for row in plain]
    before = measure_reliability(
        np.array(probabilities), np.array([row["predicted"] == row["label"] for row in plain])
    )
    assert results.calibration.before.ece == pytest.approx(before.ece, rel=1e-4)
    assert results.validation
    assert others.validation
    assert results.validation.metrics["loss"] < others.validation.metrics["loss"]


def test_a_model_that_trains_on_begins_without_its_temperature(runs: tuple[Path, Path]) -> None:
    names = read_json(runs[0] / "all_results.json")["class_names"]

    loaded = load_model(
        str(runs[0] / "model"), revision=None, task=Single(names), from_scratch=False
    )

    expected = weights_of(runs[1])
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.allclose(loaded.model.get_parameter(name), expected[name], rtol=1e-6)
    assert loaded.model.config.task_specific_params["text-classification"]["temperature"] == 1
