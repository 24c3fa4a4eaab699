"""Metrics compared with scikit-learn and SciPy, on all rows and on resamples."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats
from sklearn import metrics as sklearn_metrics

from finetune.errors import ConfigurationError
from finetune.tasks.base import Task
from finetune.tasks.metrics import METRICS, MULTI, SINGLE, choose_metric, pearson, spearman
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.scores import Scores, missed_classes, selection_score
from finetune.tasks.single import Single
from finetune.tasks.tables import wilson_interval

ROWS = 40
NAMES = ["a", "b", "c", "d"]
TASKS = pytest.mark.parametrize(
    "task", [Single(NAMES), Multi(NAMES), Regression(is_scaled=True)], ids=lambda task: task.name
)


def draw_rows(task: Task, random: np.random.Generator) -> tuple[NDArray[np.float32], Any]:
    """Return logits and labels. Class ``d`` never occurs, and regression values have ties."""
    if isinstance(task, Regression):
        labels = random.integers(0, 8, ROWS).astype(np.float32)
        return (labels + random.integers(-3, 3, ROWS)).astype(np.float32)[:, None], labels
    logits = random.normal(size=(ROWS, 4)).round(1).astype(np.float32)
    logits[:, 3] = -9
    if isinstance(task, Single):
        return logits, random.integers(0, 3, ROWS)
    return logits, (random.random((ROWS, 4)) < [0.5, 0.3, 0.1, 0]).astype(np.float32)


def expected_metrics(task: Task, logits: NDArray[np.float32], labels: Any) -> dict[str, float]:
    outputs = task.read_logits(logits)
    f1 = lambda average: sklearn_metrics.f1_score(  # noqa: E731
        labels, outputs.predicted, average=average, zero_division=np.nan
    )
    match task:
        case Single():
            accuracy = sklearn_metrics.accuracy_score(labels, outputs.predicted)
            loss = sklearn_metrics.log_loss(labels, outputs.probabilities, labels=range(4))
            return {
                "accuracy": accuracy,
                "macro_f1": f1("macro"),
                "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(
                    labels, outputs.predicted
                ),
                "mcc": sklearn_metrics.matthews_corrcoef(labels, outputs.predicted),
                "loss": loss,
            }
        case Multi():
            precision = sklearn_metrics.average_precision_score
            return {
                "micro_f1": f1("micro"),
                "macro_f1": f1("macro"),
                "subset_accuracy": sklearn_metrics.accuracy_score(labels, outputs.predicted),
                "mean_average_precision": precision(labels[:, :3], outputs.probabilities[:, :3]),
            }
    return {
        "pearson": stats.pearsonr(labels, outputs.predicted).statistic,
        "spearman": stats.spearmanr(labels, outputs.predicted).statistic,
        "mae": sklearn_metrics.mean_absolute_error(labels, outputs.predicted),
    }


@pytest.mark.filterwarnings("error:The given NumPy array is not writable")
@TASKS
def test_metrics_match_scikit_learn_and_scipy(task: Task) -> None:
    logits, labels = draw_rows(task, np.random.default_rng(0))
    labels.flags.writeable = False  # read-only like Arrow arrays
    scores = task.score(logits, labels)
    expected = expected_metrics(task, logits, labels)
    assert scores.metrics == pytest.approx({"loss": scores.loss, **expected}, rel=1e-5)


@TASKS
def test_row_with_weight_two_equals_two_rows(task: Task) -> None:
    random = np.random.default_rng(0)
    logits, labels = draw_rows(task, random)
    counts = random.integers(0, 4, size=ROWS)
    found = task.weighted_metrics(task.prediction_rows(logits, labels))(counts.astype(float))
    scores = task.score(logits.repeat(counts, axis=0), labels.repeat(counts, axis=0)).metrics
    assert found == pytest.approx({name: scores[name] for name in found})
    # The file doesn't contain the probabilities of all classes.
    assert found.keys() == scores.keys() - {"mean_average_precision"}


@TASKS
def test_batched_resamples_match_single_resamples(task: Task) -> None:
    random = np.random.default_rng(0)
    compute = task.weighted_metrics(task.prediction_rows(*draw_rows(task, random)))
    counts = random.integers(0, 4, size=(5, ROWS)).astype(float)
    expected = [compute(one) for one in counts]
    for name, values in compute(counts).items():
        assert values == pytest.approx([metrics[name] for metrics in expected], rel=1e-6)


def test_constant_values_have_zero_correlation() -> None:
    labels, predicted, weights = np.array([0.1, 0.1]), np.array([0.7, 0.2]), np.ones(2)
    assert pearson(labels, predicted, weights) == 0
    assert spearman(predicted, labels, weights) == 0
    # Only one row has a nonzero weight.
    assert pearson(predicted, predicted, np.array([3.0, 0.0])) == 0


@TASKS
def test_best_model_is_chosen_by_the_first_metric_by_default(task: Task) -> None:
    expected = {"single": "accuracy", "multi": "micro_f1", "regression": "pearson"}
    assert choose_metric(None, task.problem_type).name == expected[task.name]
    assert choose_metric("loss", task.problem_type).sign == -1
    assert choose_metric("macro-f1", Single.problem_type) is METRICS["macro_f1"]
    with pytest.raises(ConfigurationError, match="bleu is not a metric"):
        choose_metric("bleu", task.problem_type)


def score_classes(task: Single | Multi, answers: str, *, rows: int = 20) -> Scores:
    """Score rows. Every fifth row has class ``b``, and the others have ``a``."""
    labels = (np.arange(rows) % 5 == 0).astype(np.int64)
    predicted = np.array(["ab".index(one) for one in (answers * rows)[:rows]])
    logits = np.eye(2, dtype=np.float32)[predicted]
    if isinstance(task, Multi):
        return task.score(logits - 2, np.eye(2, dtype=np.float32)[labels])
    return task.score(logits, labels)


def test_model_that_misses_a_large_class_is_not_selected_by_accuracy() -> None:
    task = Single(["a", "b"])
    majority, useful = score_classes(task, "a"), score_classes(task, "ba")
    assert majority.accuracy > useful.accuracy
    assert missed_classes(majority) == {"b": 0.2}
    assert selection_score(None, SINGLE, majority) < selection_score(None, SINGLE, useful)
    assert selection_score("accuracy", SINGLE, majority) == majority.accuracy
    assert selection_score(None, SINGLE, useful) == useful.accuracy
    # If both models miss the class, the model with the higher macro F1 is chosen.
    worse = score_classes(task, "abbbb")
    assert selection_score(None, SINGLE, majority) > selection_score(None, SINGLE, worse)
    few = score_classes(task, "a", rows=10)
    assert selection_score(None, SINGLE, few) == few.accuracy


def test_multi_label_model_without_predictions_is_ranked_by_map() -> None:
    task = Multi(["a", "b"])
    better, worse = score_classes(task, "baaaa"), score_classes(task, "abbbb")
    assert better.micro_f1 == worse.micro_f1 == 0
    assert selection_score(None, MULTI, worse) < selection_score(None, MULTI, better) <= 0


def test_chance_predictions_are_not_reported_above_baseline() -> None:
    claims = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        labels, predicted = random.integers(0, 2, (2, 40 + 3 * seed))
        scores = Single(["a", "b"]).score(np.eye(2, dtype=np.float32)[predicted], labels)
        claims += scores.is_better
    assert claims <= 1
    six = score_classes(Single(["a", "b"]), "baaaa", rows=6)
    assert six.accuracy == 1
    assert six.describe().endswith("6 rows are too few to tell.")


def test_multi_label_baseline_predicts_the_most_frequent_classes() -> None:
    labels = (np.random.default_rng(0).random((200, 3)) < [0.6, 0.5, 0.05]).astype(np.float32)
    scores = Multi(["a", "b", "c"]).score(np.full((200, 3), [1, 1, -1], np.float32), labels)
    assert scores.baseline_micro_f1 == scores.micro_f1
    assert "no better than always predicting the most frequent" in scores.describe()


@pytest.mark.parametrize(("right", "rows"), [(0, 10), (19, 19), (95, 100)])
def test_wilson_interval_matches_scipy(right: int, rows: int) -> None:
    expected = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    assert wilson_interval(right, rows) == pytest.approx(expected, abs=1e-7)
