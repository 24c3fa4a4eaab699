"""The results of a run, and their JSON in its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import TypeAdapter

from finetune.config.mode import Mode
from finetune.config.schema import AutoTunedOption
from finetune.evaluation.statistics import RESAMPLES, Calibration, bootstrap, percentile_interval
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Task
from finetune.tasks.metrics import METRICS
from finetune.tasks.scores import Scores, selection_score
from finetune.tasks.tables import RunResultMixin

SCHEMA_VERSION = 1
# Total rows of all resamples, which take about a second.
MAX_RESAMPLED_ROWS = 1e7
ValidationKind = Literal["held out", "cross-validated"]
Name = TypeVar("Name")


@dataclass(frozen=True)
class TextLengths:
    """Token counts of texts or windows in a split, and the number of truncated texts."""

    texts: int
    windows: int | None
    cut: int
    median: float
    p95: float
    longest: int


@dataclass(frozen=True)
class UnlabeledTexts:
    """Unlabeled texts that a head was fitted on, and their effect.

    ``changed`` is the fraction of test rows that a head without them predicts differently.
    """

    texts: int
    changed: float

    @property
    def sentence(self) -> str:
        """The texts in words."""
        return (
            f"the head also learned from {self.texts:,} unlabeled texts, which changed "
            f"{self.changed:.1%} of the predictions on test rows"
        )


@dataclass(frozen=True)
class RunDetails:
    """What a report shows about a run in addition to its metrics."""

    choices: Sequence[AutoTunedOption]
    lengths: Mapping[str, TextLengths]
    # Training rows per class.
    class_rows: Mapping[str, int] = field(default_factory=dict)
    metric_for_best_model: str = ""
    is_balanced: bool = False
    unlabeled: UnlabeledTexts | None = None
    # Whether the names of classes were training rows, and why.
    names: str = ""


@dataclass(frozen=True)
class TrainingMetrics:
    """Metrics of training, with Trainer names. Seconds include validation and saving.

    ``max_steps`` is the number of planned steps. The batch size is the last one used. The peak is
    None if the device does not count its memory.
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
    """Facts about the model, the data and the machine of a run.

    The precision is ``auto`` in a dry run. There is no reason if the user set it. The share of real
    tokens, which are not padding, is a fraction.
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
    """Results of a finished run, with the metrics of the best model as saved.

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
    # Stages of the command that finished the run, since the start of its process.
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        """Return the metrics of each split."""
        scores = {"test": self.test, "validation": self.validation}
        return [
            {"split": name, **of_split.records()[0]}
            for name, of_split in scores.items()
            if of_split
        ]

    @property
    def validation_note(self) -> str:
        """The interval of the first validation metric, and the kind of its rows."""
        assert self.validation
        rows = self.validation.samples
        note = f"on {rows:,} held-out rows"
        if self.validation_kind == "cross-validated":
            note = f"cross-validated on {rows:,} training rows (linear head only)"
        interval = self.validation.interval(self.validation.values[0].metric.name)
        return f"95% CI {interval}, {note}" if interval else note

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``all_results.json``, with Trainer names."""
        scores = {"eval": self.validation, "test": self.test}
        of_splits = {split: of_split.to_json() for split, of_split in scores.items() if of_split}
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            **asdict(self.facts),
            **asdict(self.training),
            "stage_seconds": self.stage_seconds,
            "details": asdict(self.details),
            **{
                f"{split}_{name}": value
                for split, of_split in of_splits.items()
                for name, value in of_split.items()
            },
            "eval_kind": self.validation_kind,
            "calibration": self.calibration and asdict(self.calibration),
        }


def with_intervals(scores: Scores, task: Task, rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Return the scores of predicted rows with intervals of metrics that are not proportions."""
    if not rows:
        return scores
    resamples = int(np.clip(MAX_RESAMPLED_ROWS / len(rows), 100, RESAMPLES))
    drawn = bootstrap(task.weighted_metrics(rows), rows=len(rows), resamples=resamples)
    intervals = {}
    for name, values in drawn.items():
        if name in scores.metrics and name != "loss" and not METRICS[name].is_proportion:
            interval = percentile_interval(scores.metrics[name], values)
            intervals[name] = (interval.low, interval.high)
    return replace(scores, intervals=intervals)


def read_results(folder: RunFolder) -> RunResults:
    """Read the results of a finished run; raise ``NotARunError`` if they can't be read."""
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


def best_of(runs: Mapping[Name, RunResults], metric: str | None) -> Name | None:
    """Return the best run by a validation metric; None unless all have held-out rows."""
    scores = {
        name: selection_score(metric, run.task.problem_type, run.validation)
        for name, run in runs.items()
        if run.validation and run.validation_kind == "held out"
    }
    return max(scores, key=scores.__getitem__) if scores and len(scores) == len(runs) else None
