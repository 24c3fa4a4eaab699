"""Files and results of finished runs, calibration, and texts longer than the model input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from prepared_runs import prepare_tiny
from tiny_runs import TEXTS, run_tiny, unfinished_files

import finetune
from finetune.errors import ConfigurationError
from finetune.evaluation.statistics import measure_reliability
from finetune.files import SCHEMA_VERSION, read_json, read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.results import read_results


def test_finished_run_contains_exactly_the_documented_files(finished_run: Path) -> None:
    files = "config.yaml manifest.json environment.json metrics.jsonl warnings.jsonl model"
    files += " predictions.jsonl all_results.json report.html SHA256SUMS"
    assert {path.name for path in finished_run.iterdir()} == {*files.split()}
    files = "confidences.json config.json inference.json model.safetensors README.md"
    files += " tokenizer.json tokenizer_config.json SHA256SUMS"
    assert {path.name for path in (finished_run / "model").iterdir()} == {*files.split()}
    assert unfinished_files(finished_run) == []


def test_result_keys_match_transformers_trainer(finished_run: Path) -> None:
    results = read_json(finished_run / "all_results.json")
    names = "epoch train_samples train_loss train_runtime train_samples_per_second"
    names += " train_steps_per_second eval_samples eval_loss eval_accuracy"
    assert results.keys() >= {*names.split()}
    assert results["schema_version"] == SCHEMA_VERSION
    assert (results["epoch"], results["train_samples"]) == (2.0, 64)
    assert (results["global_step"], results["max_steps"]) == (8, 8)
    seconds = results["train_runtime"]
    stages = results["stage_seconds"]
    assert 0 < stages["steps"] + stages["validation"] < seconds + stages["validation"]
    assert results["train_samples_per_second"] == pytest.approx(2 * 64 / seconds)
    assert results["train_steps_per_second"] == pytest.approx(8 / seconds)


@pytest.mark.parametrize("options", [{"max_steps": 1}, {"fit_head": "on"}, {}])
def test_speed_counts_only_trained_examples(
    options: dict[str, Any], tiny_folder: Path, tmp_path: Path
) -> None:
    few: dict[str, Any] = {"max_train_samples": 17, "batch_size": 32, "freeze_core": True}
    results = run_tiny(tmp_path / "run", model=tiny_folder, **(few | options))
    trained = results["train_samples_per_second"] * results["train_runtime"]
    assert trained == pytest.approx(17 * results["global_step"])


def test_pipeline_truncates_long_texts_like_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 12, "long_texts": "truncate"}
    run_tiny(tmp_path / "run", model=tiny_folder, **options)
    texts = ["who wrote the book of animals " + "where is the river " * 98, *TEXTS]
    classify = transformers.pipeline(
        "text-classification", str(tmp_path / "run" / "model"), truncation=True
    )
    for theirs, ours in zip(
        classify(texts), finetune.predict(tmp_path / "run", texts), strict=True
    ):
        assert theirs["label"] == ours.label
        assert theirs["score"] == pytest.approx(ours.probability, abs=1e-5)
    # The model itself can read more tokens.
    options["max_length"] = 40
    again = run_tiny(tmp_path / "again", model=tmp_path / "run" / "model", **options)
    assert again["details"]["lengths"]["train"]["longest"] > 12
    run_tiny(tmp_path / "third", model=tmp_path / "again" / "model", max_length=99, max_steps=1)
    assert read_json(tmp_path / "third" / "model" / "inference.json")["max_length"] == 64


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> tuple[Path, Path]:
    """Two runs that differ only in calibration."""
    parent = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {"model": tiny_folder, "validation_fraction": 0.3}
    run_tiny(parent / "calibrated", **options)
    run_tiny(parent / "plain", calibrate=False, **options)
    return parent / "calibrated", parent / "plain"


def test_calibration_keeps_predictions_and_improves_probabilities(runs: tuple[Path, Path]) -> None:
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


WINDOWS: dict[str, Any] = {
    "long_texts": "windows",
    "max_length": 10,
    "stride": 2,
    "batch_size": 4,
    "effective_batch_size": 16,
    "max_train_samples": 32,
    "num_train_epochs": 1,
}


def test_evaluate_uses_the_windows_of_the_run(tiny_folder: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", model=tiny_folder, **WINDOWS)
    results = read_json(tmp_path / "run" / "all_results.json")
    scores = finetune.evaluate(tmp_path / "run", device="cpu").scores
    assert scores.to_json()["loss"] == pytest.approx(results["test_loss"], abs=1e-6)


def test_windows_reject_pairs_and_large_strides(tiny_folder: Path) -> None:
    text_model = prepare_tiny(tiny_folder, max_train_samples=8).text_model
    with pytest.raises(ConfigurationError, match="windows can't be used with sentence pairs"):
        text_model.encode(["a"], ["b"], max_length=10, stride=2)
    with pytest.raises(ConfigurationError, match="--stride 8 is too large: a window contains"):
        prepare_tiny(tiny_folder, **WINDOWS | {"stride": 8})
