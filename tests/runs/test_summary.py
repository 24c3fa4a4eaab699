from dataclasses import replace

import numpy as np
import pytest
from report.example_run import DETAILS, example_results

from finetune.config.modes import Mode
from finetune.runs.results import RunResults, summarize, with_distinct, with_intervals
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.scores import Scores
from finetune.tasks.single import Single


def results_of(task: Task, logits: np.ndarray, labels: np.ndarray) -> RunResults:
    """Return the results of a run with these test logits and labels."""
    scores = task.score(logits.astype(np.float32), labels)
    return replace(example_results(), task=task, test=scores, validation=None, details=DETAILS)


def test_weakest_class_is_reported_with_its_most_common_mistake() -> None:
    labels = np.array([0] * 10 + [1] * 7 + [2] * 3)
    predicted = np.where(np.arange(20) >= 18, 0, labels)
    text = summarize(results_of(Single(["bill", "ship", "back"]), np.eye(3)[predicted], labels))
    assert text.startswith("Accuracy 90% on 20 test rows (95% CI 70–97%), above the")
    weakest = "Weakest class: `back` (1 of 3 correct, 2 misclassified as `bill`)."
    for words in ("baseline (`bill`, 50%)", "20 rows are few. `--folds 5`", weakest):
        assert words in text


@pytest.mark.parametrize(
    ("right", "of_head", "head_seconds", "proposed"),
    [
        (60, 85, 0.0, "significantly better. `--freeze-core` trains only this head."),
        (80, 85, 1.0, "85.0%, cross-validated. `--freeze-core` trains only this head in 1.0 s."),
        (80, 85, 0.0, ""),
        (80, 85, 100.0, ""),
        (90, 85, 1.0, ""),
    ],
)
def test_linear_head_is_suggested_if_it_is_better_or_cheaper(
    right: int, of_head: int, head_seconds: float, proposed: str
) -> None:
    labels, task = np.arange(100) % 2, Single(["a", "b"])

    def of(correct: int) -> RunResults:
        predicted = np.where(np.arange(100) < correct, labels, 1 - labels)
        return results_of(task, np.eye(2)[predicted], labels)

    example = of(right)
    results = replace(
        example,
        facts=replace(example.facts, mode=Mode("full")),
        training=replace(example.training, train_runtime=60.0),
        validation=of(of_head).test,
        validation_kind="cross-validated",
        stage_seconds={"cross-validate": head_seconds},
    )
    text = summarize(results)
    assert proposed in text
    assert ("--freeze-core" in text) == bool(proposed)
    frozen = replace(results, facts=replace(results.facts, mode=Mode("head")))
    assert "--freeze-core" not in summarize(frozen)


def test_model_that_predicts_only_one_class_gets_suggestions() -> None:
    labels = np.array([0] * 160 + [1] * 40)
    results = results_of(Single(["a", "b"]), np.eye(2)[np.zeros(200, int)], labels)
    assert "only gets `a` right. `--class-weights balanced` may help" in summarize(results)
    chosen = replace(results, validation=results.test)
    assert "or `--metric-for-best-model macro_f1` or `mcc` may help" in summarize(chosen)
    # Options that were already used are not suggested.
    tried = replace(DETAILS, metric_for_best_model="mcc", is_balanced=True)
    text = summarize(replace(chosen, details=tried))
    assert "balanced" not in text
    assert "finetune data check" in text


def test_weakest_multi_label_class_has_the_lowest_f1() -> None:
    labels = np.zeros((100, 2), np.float32)
    labels[:20, 0] = labels[:50, 1] = 1
    predicted = labels.copy()
    predicted[:6, 0], predicted[:, 1] = 0, 1  # F1 of 0.82 and 0.67, recall of 0.7 and 1
    text = summarize(results_of(Multi(["a", "b"]), predicted * 2 - 1, labels))
    assert "Weakest class: `b` (F1 66.7%, 50 of 50 found)." in text


@pytest.mark.parametrize("task", [Multi(["a", "b"]), Regression(mean=9.5, deviation=1.0)])
def test_metrics_that_are_not_proportions_have_intervals_in_the_summary(task: Task) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (200, 2)).astype(np.float32)
    logits = labels * 2 - 1 + random.normal(0, 2, labels.shape)
    if isinstance(task, Regression):
        labels, logits = labels[:, 0], logits[:, :1]
    scores = task.score(logits.astype(np.float32), labels)
    rows = task.prediction_rows(logits.astype(np.float32), labels)
    scores = Scores.from_json(with_intervals(scores, task, rows).to_json())
    others = {"loss", "subset_accuracy", "mean_average_precision"}
    assert scores.intervals.keys() >= scores.metrics.keys() - others
    for name, (low, high) in scores.intervals.items():
        assert low <= scores.metrics[name] <= high
    text = summarize(replace(example_results(), task=task, test=scores, validation=None))
    assert " on 200 test rows (95% CI " in text


def test_accuracy_without_near_duplicates_is_reported_if_they_are_many() -> None:
    task, labels = Single(["a", "b"]), np.arange(40) % 2
    predicted = np.where(np.isin(np.arange(40), (1, 2, 3)), 1 - labels, labels)
    logits = np.eye(2, dtype=np.float32)[predicted]
    scores, rows = task.score(logits, labels), task.prediction_rows(logits, labels)

    def describe(near: int) -> str:
        listed = [row | {"near_duplicate": place >= 40 - near} for place, row in enumerate(rows)]
        return Scores.from_json(with_distinct(scores, task, listed).to_json()).describe()

    assert describe(1) == describe(0) == scores.describe()
    text = describe(30)
    assert " 30 of these rows differ from a training row only in numbers or punctuation. " in text
    assert text.endswith("Accuracy 70.0% on the other 10 (95% CI 40–89%).")
    assert "it is unknown how well the model does on other texts" in describe(40)
