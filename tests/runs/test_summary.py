from dataclasses import replace

import numpy as np
import pytest
from report.example_run import DETAILS, example_results

from finetune.runs.results import RunResults
from finetune.runs.summary import compare_with_validation, next_command, summarize
from finetune.tasks.base import Task
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single


def results_of(task: Task, logits: np.ndarray, labels: np.ndarray) -> RunResults:
    """Return the results of a run with logits and labels of its test rows."""
    scores = task.score(logits.astype(np.float32), labels)
    return replace(example_results(), task=task, test=scores, validation=None, details=DETAILS)


def test_the_weakest_class_is_named_with_what_it_is_taken_for() -> None:
    labels = np.array([0] * 10 + [1] * 7 + [2] * 3)
    predicted = np.where(np.arange(20) >= 18, 0, labels)
    text = summarize(results_of(Single(["bill", "ship", "back"]), np.eye(3)[predicted], labels))
    assert text.startswith("90% right on 20 test rows (95%: 70–97%), above always")
    for words in ("answering `bill` (50%)", "20 rows are few: `--folds 5`",
                  "Weakest: `back`, 1 of 3, 2 taken for `bill`."):  # fmt: skip
        assert words in text


def test_a_model_that_answers_one_class_alone_learns_what_helps() -> None:
    labels = np.array([0] * 160 + [1] * 40)
    results = results_of(Single(["a", "b"]), np.eye(2)[np.zeros(200, int)], labels)
    assert "gets `a` right alone: `--class-weights balanced` may help" in summarize(results)
    chosen = replace(results, validation=results.test)
    assert "or `--metric-for-best-model macro_f1` or `mcc` may help" in summarize(chosen)
    # What was tried already is not named.
    tried = replace(DETAILS, metric_for_best_model="mcc", is_balanced=True)
    text = summarize(replace(chosen, details=tried))
    assert "balanced" not in text
    assert "finetune data check" in text


def test_several_labels_and_numbers_have_sentences_of_their_own() -> None:
    labels = np.tile(np.eye(2, dtype=np.float32), (100, 1))
    several = summarize(results_of(Multi(["a", "b"]), labels * 2 - 1, labels))
    assert several.startswith("Micro F1 100.0% on 200 test rows, far above always answering the")
    numbers = np.arange(200, dtype=np.float32)
    task = Regression(mean=99.5, deviation=1.0, is_scaled=True)
    text = summarize(results_of(task, numbers[:, None] + 1, numbers))
    assert (
        text
        == "Off by 1 on average on 200 test rows, far better than always answering the mean (50)."
    )


@pytest.mark.parametrize(("right", "differs"), [(0.94, False), (0.7, True)])
def test_validation_and_test_are_said_to_differ_if_by_more_than_chance(
    right: float, differs: bool
) -> None:
    results = example_results()
    scores = replace(results.test, samples=100)
    validation, test = (replace(scores, metrics={"accuracy": one}) for one in (0.97, right))
    sentence = compare_with_validation(replace(results, validation=validation, test=test))
    assert ("97.0% on the validation rows" in sentence) == differs


def test_the_next_command_can_be_pasted() -> None:
    results = replace(example_results(), output_dir="runs/a run")
    assert next_command(results) == "finetune predict 'runs/a run' FILE"
