"""Summarizes a run in sentences: its accuracy, its weak classes and possible improvements."""

from collections.abc import Iterator
from math import sqrt
from shlex import quote

from finetune.runs.results import RunResults
from finetune.tasks.scores import ClassScores, Scores, missed_classes
from finetune.tasks.tables import Z_95, capitalize, percent, quote_name, wilson_interval

# With fewer rows, the interval of an accuracy is wider than about ten points.
FEW_ROWS = 100
# A class with this fraction of the rows dominates the accuracy.
LOPSIDED = 0.7
# Macro F1 this far below accuracy means that small classes are missed.
MACRO_F1_GAP = 0.1


def summarize(results: RunResults) -> str:
    """Return the first paragraph of the final output, the report and the model card."""
    return " ".join(filter(None, [results.test.describe(), *_hints(results)]))


def next_command(results: RunResults) -> str:
    """Return the command that classifies a file with the run's model."""
    return f"finetune predict {quote(results.output_dir)} FILE"


def _hints(results: RunResults) -> Iterator[str]:
    test = results.test
    if test.samples < FEW_ROWS:
        yield f"{test.samples:,} rows are few. `--folds 5` gives a more precise estimate."
    yield compare_with_validation(results)
    if weakest := _weakest(test):
        yield f"Weakest: {weakest}."
    yield _advise(results)


def _weakest(scores: Scores) -> str:
    """Return the weakest class and its figures: by recall, or by F1 if multi-label."""
    classes = {
        name: of_class
        for name, of_class in (scores.per_class or {}).items()
        if of_class.support and of_class.f1 < 1
    }
    if not classes:
        return ""
    is_multi_label = scores.confusion_matrix is None
    values = {
        name: of_class.f1 if is_multi_label else _recall_at_most(of_class)
        for name, of_class in classes.items()
    }
    name = min(values, key=values.__getitem__)
    weakest = classes[name]
    rows = f"{round(weakest.recall * weakest.support):,} of {weakest.support:,}"
    if is_multi_label:
        return f"{quote_name(name)}, F1 {percent(weakest.f1)}, {rows} found"
    others = confused_with(scores, name)[:1]
    confused = "".join(
        f", {count:,} misclassified as {quote_name(other)}" for other, count in others
    )
    return f"{quote_name(name)}, {rows}{confused}" if weakest.recall < 1 else ""


def _recall_at_most(scores: ClassScores) -> float:
    """Return the upper end of the interval: a class with one missed row may not be the weakest."""
    return float(wilson_interval(scores.recall * scores.support, scores.support)[1])


def _advise(results: RunResults) -> str:
    """Return options that may help against a weakness of the model."""
    test, details = results.test, results.details
    options = ["`--class-weights balanced`"] * (not details.is_balanced)
    if details.metric_for_best_model == "accuracy" and results.validation:
        options += ["`--metric-for-best-model macro_f1`", "`mcc`"]
    largest, metrics = test.baselines.get("accuracy", 0.0), test.metrics
    is_lopsided = largest >= LOPSIDED and metrics["macro_f1"] < metrics["accuracy"] - MACRO_F1_GAP
    if options and (is_lopsided or missed_classes(test)):
        right = [name for name, of_class in (test.per_class or {}).items() if of_class.f1]
        only = f"It only gets {quote_name(right[0])} right. " if len(right) == 1 else ""
        return f"{only}{' or '.join(options)} may help with the classes that it misses."
    if test.is_better:
        return ""
    return (
        "Try more rows, longer training, training more layers (`--train-layers`), or fixing what "
        "`finetune data check` reports."
    )


def confused_with(scores: Scores, name: str) -> list[tuple[str, int]]:
    """Return the classes that rows of a class are misclassified as, the most frequent first."""
    names = [*(scores.per_class or {})]
    if not scores.confusion_matrix:
        return []
    counts = zip(names, scores.confusion_matrix[names.index(name)], strict=True)
    others = [(other, count) for other, count in counts if count and other != name]
    return sorted(others, key=lambda item: -item[1])


def compare_with_validation(results: RunResults) -> str:
    """Return a sentence if validation and test accuracy differ (pooled test, 5% level)."""
    validation, test = results.validation, results.test
    shares = [value.metric for value in test.values if value.metric.is_proportion]
    if validation is None or results.validation_kind != "held out" or not shares:
        return ""
    rows, name = validation.samples + test.samples, shares[0].name
    first, second = validation.metrics[name], test.metrics[name]
    pooled = (first * validation.samples + second * test.samples) / rows
    error = sqrt(pooled * (1 - pooled) * rows / (validation.samples * test.samples))
    if abs(first - second) <= Z_95 * error:
        return ""
    return (
        f"{capitalize(shares[0].title)} is {percent(first)} on the validation rows. The "
        "difference from the test rows is significant, so the two splits may differ in kind."
    )
