"""The results of a run, their JSON, and their summary in sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import hypot
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter

from finetune.config.modes import Mode
from finetune.config.schema import AutoTunedOption
from finetune.evaluation.statistics import RESAMPLES, Calibration, bootstrap, percentile_interval
from finetune.files import SCHEMA_VERSION
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Logits, Task
from finetune.tasks.labels import HARD
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import ClassScores, Scores, missed_classes, selection_score
from finetune.tasks.tables import (
    RunResultMixin,
    Table,
    duration,
    percent,
    quote_name,
    shorten_text,
    wilson_interval,
)

if TYPE_CHECKING:
    import pyarrow

# Total rows in all resamples. They take about a second.
MAX_RESAMPLED_ROWS = 1e7
# With fewer rows, the interval of an accuracy is wider than about ten points.
FEW_ROWS = 100
# A class with this fraction of the rows dominates the accuracy.
LOPSIDED = 0.7
# A linear head is suggested if training takes this many times longer.
CHEAPER = 5
# If macro F1 is this far below accuracy, small classes are missed.
MACRO_F1_GAP = 0.1
ValidationKind = Literal["held out", "cross-validated"]
Name = TypeVar("Name")
# Texts shown per class.
CERTAIN_TEXTS, UNCERTAIN_TEXTS = 3, 2


@dataclass(frozen=True)
class ClassTexts:
    """The unlabeled texts predicted as a class: their fraction, and examples."""

    fraction: float
    certain: Sequence[str]
    uncertain: Sequence[str]


@dataclass(frozen=True)
class UnlabeledTexts:
    """The texts of a run without labels: their number, and predictions by class.

    ``misfits`` are classes whose names don't resemble the texts predicted as them.
    """

    texts: int
    classes: Mapping[str, ClassTexts]
    misfits: Sequence[str]

    @property
    def table(self) -> Table:
        """Example texts of each class."""
        rows = []
        for name, of_class in self.classes.items():
            texts = [("certain", text) for text in of_class.certain]
            texts += [("unsure", text) for text in of_class.uncertain]
            starts = [[name, percent(of_class.fraction)], *[["", ""]] * (len(texts) - 1)]
            shown = zip(starts, texts or [("", "–")], strict=True)
            rows += [[*start, *text] for start, text in shown]
        note = "The most certain texts of each class, and two that the model is unsure about."
        columns = ("class", "texts", "model is", "text")
        return Table("Texts predicted as each class", columns, rows, text_columns=4, note=note)


@dataclass(frozen=True)
class ClassWord:
    """A word, the mean probability change without it, and the class rows that contain it.

    The mean is over all explained rows of the class.
    """

    word: str
    change: float
    rows: int


@dataclass(frozen=True)
class ClassWords:
    """The words without which a class probability falls most, and its explained rows."""

    rows: int
    words: Sequence[ClassWord]


@dataclass(frozen=True)
class RunDetails:
    """Data-dependent facts about a run.

    ``lengths`` describes the tokens of the texts or windows of each split, ``class_rows`` counts
    the training rows of each class. ``unlabeled`` has the number of unlabeled texts that a head was
    fitted on, and the fraction of test rows that a head without them predicts differently.
    ``names`` says whether the names of classes were training rows, and why. ``drawn`` counts the
    rows that ``finetune label`` drew at random; it is None for other tables. ``no_labels`` is for a
    run without labels. ``class_words`` has the decisive words of each class, from test rows.
    """

    choices: Sequence[AutoTunedOption]
    lengths: Mapping[str, Mapping[str, Any]]
    class_rows: Mapping[str, int] = field(default_factory=dict)
    metric_for_best_model: str = ""
    is_balanced: bool = False
    unlabeled: Mapping[str, float] | None = None
    names: str = ""
    drawn: int | None = None
    no_labels: UnlabeledTexts | None = None
    class_words: Mapping[str, ClassWords] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingMetrics:
    """Metrics of training, with Trainer names. Seconds include validation and saving.

    ``max_steps`` is the number of planned steps. The batch size is the last one used. The peak is
    None if the device doesn't track memory.
    """

    epoch: float
    global_step: int
    max_steps: int
    best_global_step: int | None
    train_samples: int
    train_runtime: float
    train_samples_per_second: float
    train_steps_per_second: float
    train_loss: float
    train_batch_size: int
    train_peak_bytes: int | None


@dataclass(frozen=True)
class RunFacts:
    """Facts about the model, data and machine of a run.

    The precision is ``auto`` in a dry run. ``precision_reason`` is None if the user set it. The
    share of real (non-padding) tokens is a fraction.
    """

    data: str
    class_names: Sequence[str]
    model: str
    mode: Mode
    device: str
    device_description: str
    precision: str
    precision_reason: str | None
    trained_parameters: int
    total_parameters: int
    real_token_share: float


@dataclass(frozen=True, repr=False)
class RunResults(RunResultMixin):
    """Results of a finished run, with the metrics of the saved best model.

    The validations in ``metrics.jsonl`` precede the calibration, which changes the loss. Training
    rows are cross-validated: each is predicted by a linear head that was fitted without it.
    """

    task: Task
    facts: RunFacts
    training: TrainingMetrics
    validation: Scores | None
    test: Scores
    output_dir: str
    details: RunDetails
    calibration: Calibration | None = None
    validation_kind: ValidationKind | None = None
    # Stages of the command that finished the run, from the start of its process.
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each split."""
        scores = {"test": self.test, "validation": self.validation}.items()
        return [{"split": name, **split.records()[0]} for name, split in scores if split]

    @property
    def validation_note(self) -> str:
        """The interval of the first validation metric, and which rows it is from."""
        assert self.validation
        rows = self.validation.samples
        note = f"on {rows:,} held-out rows"
        if self.validation_kind == "cross-validated":
            note = f"cross-validated on {rows:,} training rows (linear head only)"
        interval = self.validation.interval(self.validation.values[0].metric.name)
        return f"95% CI {interval}, {note}" if interval else note

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``all_results.json``, with Trainer names."""
        splits = {"eval": self.validation, "test": self.test}
        scores = {
            f"{split}_{name}": value
            for split, of_split in splits.items()
            for name, value in (of_split.to_json() if of_split else {}).items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            **asdict(self.facts),
            **asdict(self.training),
            "stage_seconds": self.stage_seconds,
            "details": asdict(self.details),
            **scores,
            "eval_kind": self.validation_kind,
            "calibration": self.calibration and asdict(self.calibration),
        }


def with_intervals(scores: Scores, task: Task, rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Add intervals and the metrics of distinct rows to scores of predicted rows."""
    if not rows:
        return scores
    resamples = int(np.clip(MAX_RESAMPLED_ROWS / len(rows), 100, RESAMPLES))
    drawn = bootstrap(task.weighted_metrics(rows), rows=len(rows), resamples=resamples)
    intervals = {}
    for name, values in drawn.items():
        if name in scores.metrics and name != "loss" and not METRICS[name].is_proportion:
            interval = percentile_interval(scores.metrics[name], values)
            intervals[name] = (interval.low, interval.high)
    return replace(with_distinct(scores, task, rows), intervals=intervals)


def with_distinct(scores: Scores, task: Task, rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Add metrics of rows without near duplicates in training to scores."""
    weights = np.array([not row.get("near_duplicate") for row in rows], float)
    if weights.all():
        return scores
    metrics = task.weighted_metrics(rows)(weights) if weights.any() else {}
    return replace(scores, distinct={"samples": int(weights.sum()), **metrics})


def describe_texts(
    task: Task, logits: Logits, texts: "pyarrow.Table", *, misfits: Sequence[str]
) -> UnlabeledTexts:
    """Summarize predictions of unlabeled texts by class, with the most and least certain texts."""
    outputs = task.read_logits(logits)
    assert outputs.probabilities is not None
    best = np.partition(outputs.probabilities, -2, axis=1)[:, -2:]
    margins, column, classes = best[:, 1] - best[:, 0], texts["text"], {}
    for number, name in enumerate(task.class_names):
        rows = np.flatnonzero(outputs.predicted == number)
        rows = rows[np.argsort(-margins[rows], kind="stable")]
        certain, rest = rows[:CERTAIN_TEXTS], rows[CERTAIN_TEXTS:]
        shown = (
            [shorten_text(text) for text in column.take(chosen).to_pylist()]
            for chosen in (certain, rest[::-1][:UNCERTAIN_TEXTS])
        )
        classes[name] = ClassTexts(len(rows) / len(column), *shown)
    without = [name for name, of_class in classes.items() if not of_class.fraction]
    return UnlabeledTexts(len(column), classes, [*dict.fromkeys([*misfits, *without])])


def read_results(folder: RunFolder) -> RunResults:
    """Read the results of a finished run. Raise ``NotARunError`` if they can't be read."""
    task = folder.read_task()

    def parse(content: dict[str, Any]) -> RunResults:
        def scores(prefix: str) -> Scores:
            names = [name for name in content if name.startswith(prefix)]
            return Scores.from_json({name.removeprefix(prefix): content[name] for name in names})

        return RunResults(
            task=task,
            facts=RunFacts(**{fact.name: content[fact.name] for fact in fields(RunFacts)}),
            training=TypeAdapter(TrainingMetrics).validate_python(content),
            details=TypeAdapter(RunDetails).validate_python(content["details"]),
            validation=scores("eval_") if content["eval_kind"] else None,
            test=scores("test_"),
            output_dir=str(folder.path),
            calibration=TypeAdapter(Calibration | None).validate_python(content["calibration"]),
            stage_seconds=content["stage_seconds"],
            validation_kind=content["eval_kind"],
        )

    return folder.read(folder.results_file, parse)


def best_of(runs: Mapping[Name, Sequence[RunResults]], metric: str | None) -> Name | None:
    """Return the best by mean validation metric, or None unless all have held-out rows."""
    scores = {
        name: fmean(
            selection_score(metric, run.task.problem_type, run.validation)
            for run in results
            if run.validation
        )
        for name, results in runs.items()
        if {run.validation_kind for run in results} == {"held out"}
    }
    return max(scores, key=scores.__getitem__) if scores and len(scores) == len(runs) else None


def summarize(results: RunResults) -> str:
    """Write the first paragraph of the final output, the report and the model card."""
    if results.details.no_labels and not results.test.samples:
        return _summarize_unlabeled(results, results.details.no_labels)
    test, drawn, hints = results.test, results.details.drawn, [results.test.describe()]
    if drawn is not None:
        fair = "Only these rows were drawn at random. The others" if drawn else "All rows"
        hints.append(f"{fair} were chosen {HARD}, so accuracy on them is no estimate.")
        hints += ["More labels give a narrower interval."] * (test.samples < FEW_ROWS)
    elif test.samples < FEW_ROWS:
        hints.append(f"{test.samples:,} rows are few. `--folds 5` gives a more precise estimate.")
    hints += [_compare_with_head(results), describe_weakest(test), _advise(results)]
    return " ".join(filter(None, hints))


def _summarize_unlabeled(results: RunResults, unlabeled: UnlabeledTexts) -> str:
    """Describe a model without labels, and how to measure its accuracy."""
    made = f"{len(unlabeled.classes):,} class names and {unlabeled.texts:,} unlabeled texts"
    unknown = "Its accuracy is unknown, and its probabilities are not calibrated."
    sentences = [
        f"No labels: {made} made this model. {unknown} To estimate the accuracy, label 200 texts"
        " with `finetune label`: it draws about 45 of them at random, and `finetune evaluate`"
        " measures the accuracy on these."
    ]
    if unlabeled.misfits:
        names = ", ".join(map(quote_name, unlabeled.misfits))
        sentences.append(
            f"These class names hardly resemble the texts predicted as them: {names}."
            " Describe these classes with `--class-descriptions`, or make up examples."
        )
    return " ".join(sentences)


def _compare_with_head(results: RunResults) -> str:
    """Suggest the linear head if it is significantly better, or much cheaper.

    The interval of the difference is from Newcombe 1998, method 10.
    """
    validation, test, name = results.validation, results.test, "accuracy"
    trains_encoder = Mode(results.facts.mode).trains_encoder
    if not validation or results.validation_kind != "cross-validated" or not trains_encoder:
        return ""
    head, value = validation.metrics[name], test.metrics[name]
    head_limits, limits = validation.limits(name), test.limits(name)
    if head <= value or not head_limits or not limits:
        return ""
    is_better = head - value > hypot(head - head_limits[0], limits[1] - value)
    seconds = results.stage_seconds.get("cross-validate", 0.0)
    is_cheap = 0 < CHEAPER * seconds < results.training.train_runtime
    if not is_better and not is_cheap:
        return ""
    reached = f"A linear head on the frozen encoder reached {percent(head)}, cross-validated"
    chance = ", significantly better" if is_better else ""
    took = f" in {duration(seconds)}" if seconds else ""
    return f"{reached}{chance}. `--freeze-core` trains only this head{took}."


def next_commands(results: RunResults) -> list[str]:
    """Return the commands to run next, of which the last classifies a file."""
    run, unlabeled = quote(results.output_dir), results.details.no_labels
    commands = [f"finetune predict {run} FILE"]
    if unlabeled and not results.test.samples:
        data, names = Path(results.facts.data), ",".join(unlabeled.classes)
        table = data.with_name(f"{data.stem}.labels.csv")
        label = f"finetune label {quote(str(data))} --classes {quote(names)}"
        commands = [label, f"finetune evaluate {run} {quote(str(table))}", *commands]
    return commands


def describe_weakest(scores: Scores) -> str:
    """Describe the weakest class, if any: by recall, or by F1 if multi-label."""
    is_multi_label = scores.confusion_matrix is None

    def strength(item: tuple[str, ClassScores]) -> float:
        of_class = item[1]
        if is_multi_label:
            return of_class.f1 or 0.0
        # Use the upper end of the interval: a class with one missed row may not be the weakest.
        right = (of_class.recall or 0.0) * of_class.support
        return float(wilson_interval(right, of_class.support)[1])

    classes = (scores.per_class or {}).items()
    imperfect = [item for item in classes if item[1].f1 is not None and item[1].f1 < 1]
    name, weakest = min(imperfect, key=strength, default=("", None))
    if weakest is None or weakest.f1 is None or weakest.recall is None:
        return ""
    rows = f"{round(weakest.recall * weakest.support):,} of {weakest.support:,}"
    if is_multi_label:
        return f"Weakest class: {quote_name(name)} (F1 {percent(weakest.f1)}, {rows} found)."
    confused = "".join(
        f", {count:,} misclassified as {quote_name(other)}"
        for other, count in confused_with(scores, name)[:1]
    )
    details = f"{rows} correct{confused}"
    return f"Weakest class: {quote_name(name)} ({details})." if weakest.recall < 1 else ""


def _advise(results: RunResults) -> str:
    """Suggest options against a weakness of the model."""
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
    """Return the classes that rows of a class are misclassified as, most frequent first."""
    names = [*(scores.per_class or {})]
    if not scores.confusion_matrix:
        return []
    counts = zip(names, scores.confusion_matrix[names.index(name)], strict=True)
    others = [(other, count) for other, count in counts if count and other != name]
    return sorted(others, key=lambda item: -item[1])
