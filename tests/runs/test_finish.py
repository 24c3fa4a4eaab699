"""The files of a finished run."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_runs import TEXTS, logged_metrics, run_tiny, unfinished_files

import finetune
from finetune.files import read_json


@pytest.fixture(scope="module")
def overfitted_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run whose validation loss is lowest before its end."""
    folder = tmp_path_factory.mktemp("runs") / "overfitted"
    run_tiny(
        folder, model=tiny_folder, metric_for_best_model="loss", learning_rate=5e-3,
        head_lr_multiplier=1, num_train_epochs=4, max_train_samples=32,
    )  # fmt: skip
    return folder


def test_a_run_leaves_all_that_it_should_and_nothing_else(finished_run: Path) -> None:
    files = "config.yaml manifest.json environment.json metrics.jsonl warnings.jsonl model"
    files += " predictions.jsonl all_results.json report.html"
    assert {path.name for path in finished_run.iterdir()} == {*files.split()}
    files = "confidences.json config.json inference.json model.safetensors README.md"
    files += " tokenizer.json tokenizer_config.json"
    assert {path.name for path in (finished_run / "model").iterdir()} == {*files.split()}
    assert unfinished_files(finished_run) == []


def test_the_results_have_the_names_that_trainer_gives_them(finished_run: Path) -> None:
    results = read_json(finished_run / "all_results.json")
    names = "epoch train_samples train_loss train_runtime train_samples_per_second"
    names += " train_steps_per_second eval_samples eval_loss eval_accuracy"
    assert results.keys() >= {*names.split()}
    assert results["schema_version"] == 1
    assert (results["epoch"], results["train_samples"]) == (2.0, 64)
    assert (results["global_step"], results["max_steps"]) == (8, 8)
    seconds = results["train_runtime"]
    stages = results["stage_seconds"]
    assert 0 < stages["steps"] + stages["validation"] < seconds + stages["validation"]
    assert results["train_samples_per_second"] == pytest.approx(2 * 64 / seconds)
    assert results["train_steps_per_second"] == pytest.approx(8 / seconds)


def test_a_pipeline_that_truncates_reads_as_much_of_a_long_text(
    tiny_folder: Path, tmp_path: Path
) -> None:
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


def test_the_best_model_by_validation_is_the_one_that_is_kept(overfitted_run: Path) -> None:
    rows = logged_metrics(overfitted_run)
    validations = [row for row in rows if row["kind"] == "validation"]
    best = min(validations, key=lambda row: row["eval_loss"])
    assert best is not validations[-1]  # otherwise this test would show nothing
    results = read_json(overfitted_run / "all_results.json")
    assert results["eval_loss"] == best["eval_loss"]
    assert results["best_global_step"] == best["step"]
