"""Runs with enough validation rows for a temperature."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import run_tiny

from finetune.evaluation.statistics import measure_reliability
from finetune.files import read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.results import read_results


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
