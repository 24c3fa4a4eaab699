"""User metrics from ``compute_metrics``, which has the signature of ``transformers.Trainer``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import QUICK

import finetune
from finetune.errors import UsageError
from finetune.files import read_json, read_jsonl


def compute(evaluated: Any) -> dict[str, Any]:
    """Return a new metric, a metric with a built-in name, and a metric with a prefix."""
    predicted = evaluated.predictions.argmax(axis=-1)
    is_right = predicted == evaluated.label_ids
    return {"wrong": np.sum(~is_right), "accuracy": is_right.mean(), "eval_share": is_right.mean()}


def test_user_metric_selects_the_best_model_and_is_in_all_results(
    tiny_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**QUICK, "model": str(tiny_folder)}
    results = finetune.run(
        **options, output_dir=tmp_path / "run", compute_metrics=compute,
        metric_for_best_model="eval_share",
    )  # fmt: skip
    assert results.validation
    for scores in (results.validation, results.test):
        assert scores.metrics["share"] == scores.accuracy
        assert scores.wrong == pytest.approx(scores.samples * (1 - scores.accuracy))
    content = read_json(tmp_path / "run" / "all_results.json")
    assert content["test_wrong"] == results.test.wrong
    assert content["details"]["metric_for_best_model"] == "share"
    assert "Test wrong" in (tmp_path / "run" / "report.html").read_text()
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row for row in rows if "eval_wrong" in row]

    evaluation = finetune.evaluate(results, device="cpu", compute_metrics=compute)
    assert evaluation.scores.wrong == results.test.wrong
    assert "wrong" not in finetune.evaluate(results, device="cpu").scores.metrics
    again = finetune.run(resume_from_checkpoint=tmp_path / "run")
    assert again.test.metrics == results.test.metrics


@pytest.mark.parametrize("several", ["seeds", "folds"])
def test_seeds_and_folds_report_the_mean_of_a_user_metric(
    several: str, tiny_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**QUICK, "model": str(tiny_folder), "num_train_epochs": 1}
    results = finetune.run(**options, **{several: 2}, output_dir=tmp_path, compute_metrics=compute)
    values = [run.test.wrong for run in results.runs.values()]
    shown = results.test["wrong"].value if several == "seeds" else results.scores.wrong
    assert shown == pytest.approx(np.mean(values))
    assert finetune.compare(*(run.output_dir for run in results.runs.values())).groups


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (0.5, "compute_metrics returned 0.5, not a dict of finite numbers"),
        ({"f1": [0.5, 0.5]}, "compute_metrics returned .*, not a dict of finite numbers"),
        ({"f1": float("nan")}, "compute_metrics returned .*nan}, not a dict of finite numbers"),
        ({"accuracy": 2.0}, "compute_metrics returned 2 as accuracy, but results have another"),
        ({"samples": 2}, "compute_metrics returned 2 as samples, but results have another"),
    ],
)
def test_invalid_metric_value_is_rejected_before_training(
    returned: Any, words: str, tiny_folder: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**QUICK, "model": str(tiny_folder), "output_dir": tmp_path / "run"}
    with pytest.raises(UsageError, match=words):
        finetune.run(**options, compute_metrics=lambda evaluated: returned)
    assert not (tmp_path / "run").exists()
