"""What a run found, and the JSON that its folder and the command line show of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from finetune.config.mode import Mode
from finetune.errors import NotARun
from finetune.evaluation.calibration import Calibration
from finetune.files import read_json
from finetune.runs.details import RunDetails
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Task
from finetune.tasks.metrics import choose_metric
from finetune.tasks.scores import Scores
from finetune.training.precision_result import PrecisionTiming

if TYPE_CHECKING:
    from finetune.runs.plan import TrainingPlan
    from finetune.runs.preparation import Preparation
    from finetune.training.snapshot import Progress

SCHEMA_VERSION = 1
Name = TypeVar("Name")


@dataclass(frozen=True)
class TrainingMetrics:
    """What training took, under the Trainer's names.

    Args:
        epoch: Passes over the training split.
        train_runtime: Seconds, without validation.
        train_loss: Mean loss of all steps.
        train_batch_size: Examples in one forward and backward at the end.
        train_peak_bytes: Peak memory, None where the device does not count it.
    """

    epoch: float
    train_samples: int
    train_runtime: float
    train_samples_per_second: float
    train_steps_per_second: float
    train_loss: float
    train_batch_size: int
    train_peak_bytes: int | None

    @classmethod
    def of(
        cls, progress: "Progress", plan: "TrainingPlan", batch_size: int, peak_bytes: int | None
    ) -> "TrainingMetrics":
        """Return what the steps of a run took."""
        samples, epochs = len(plan.examples.labels), progress.steps / plan.steps_per_epoch
        return cls(
            epoch=epochs,
            train_samples=samples,
            train_runtime=progress.seconds,
            train_samples_per_second=samples * epochs / progress.seconds,
            train_steps_per_second=progress.steps / progress.seconds,
            train_loss=progress.loss_sum / progress.steps,
            train_batch_size=batch_size,
            train_peak_bytes=peak_bytes,
        )


@dataclass(frozen=True)
class RunFacts:
    """What was trained, on what, and where.

    Args:
        precision: ``auto`` in a dry run.
        precision_timing: What it was chosen by; None where it was given.
        real_token_share: Share of the tokens that are not padding, in 0..1.
    """

    data: str
    class_names: Sequence[str]
    model: str
    mode: Mode
    device: str
    device_description: str
    precision: str
    precision_timing: PrecisionTiming | None
    trained_parameters: int
    total_parameters: int
    real_token_share: float

    @classmethod
    def of(cls, preparation: "Preparation") -> "RunFacts":
        """Return the facts of a run."""
        from finetune.model.freeze import count_parameters

        config, text_model = preparation.config, preparation.text_model
        trained, total = count_parameters(text_model.model)
        return cls(
            data=config.data.data,
            class_names=list(text_model.task.class_names),
            model=config.model.model,
            mode=preparation.mode,
            device=preparation.device.name,
            device_description=preparation.device.description,
            precision=config.training.precision,
            precision_timing=preparation.precision_timing,
            trained_parameters=trained,
            total_parameters=total,
            real_token_share=preparation.plan.real_token_share(),
        )


@dataclass(frozen=True)
class RunResults:
    """What a finished run found: the metrics are those of the best model, as it is saved.

    The validations of ``metrics.jsonl`` come before its calibration, which changes their loss.

    Args:
        details: None of a run of an older version.
        calibration: None where no temperature was fitted.
    """

    task: Task
    facts: RunFacts
    training: TrainingMetrics
    validation: Scores | None
    test: Scores
    output_dir: str
    details: RunDetails | None = None
    calibration: Calibration | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``all_results.json``, under the Trainer's names."""
        splits = {"eval": self.validation, "test": self.test}
        return {
            "schema_version": SCHEMA_VERSION,
            "task": self.task.name,
            **asdict(self.facts),
            **asdict(self.training),
            "details": None if self.details is None else asdict(self.details),
            **{
                f"{prefix}_{name}": value
                for prefix, scores in splits.items()
                if scores is not None
                for name, value in scores.to_json().items()
            },
            "calibration": self.calibration and asdict(self.calibration),
        }


def best_of(runs: Mapping[Name, RunResults], metric: str | None) -> Name | None:
    """Return which run has the best model on its validation split, the first of equals.

    Args:
        runs: Of one task.
        metric: What chose their models; None for the task's first.

    Returns:
        None if there are no runs, or one has no validation split.
    """
    scores = {name: run.validation.metrics for name, run in runs.items() if run.validation}
    if not runs or len(scores) < len(runs):
        return None
    task = next(iter(runs.values())).task
    chosen = choose_metric(metric, task)
    return max(scores, key=lambda name: chosen.sign * scores[name][chosen.name])


def read_results(folder: RunFolder) -> RunResults:
    """Return what a finished run found.

    Raises:
        NotARun: If its file can't be read.
    """
    try:
        found = read_json(folder.results_file)
        facts, training = (
            {one.name: found[one.name] for one in fields(part)}
            for part in (RunFacts, TrainingMetrics)
        )
        timing = TypeAdapter(PrecisionTiming | None).validate_python(facts["precision_timing"])
        task = folder.read_task()
        return RunResults(
            task=task,
            facts=RunFacts(**facts | {"precision_timing": timing}),
            training=TypeAdapter(TrainingMetrics).validate_python(training),
            validation=_read_scores(found, "eval") if "eval_loss" in found else None,
            test=_read_scores(found, "test"),
            output_dir=str(folder.path),
            details=TypeAdapter(RunDetails | None).validate_python(found.get("details")),
            calibration=TypeAdapter(Calibration | None).validate_python(found.get("calibration")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotARun(
            f"{folder.results_file} can't be read", remedy="restore it, or make the run again"
        ) from error


def _read_scores(found: Mapping[str, Any], split: str) -> Scores:
    prefix = f"{split}_"
    own = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
    return Scores.from_json(own)
