"""How sure a run's model was of its answers to validation rows, in a file beside it.

With these, ``predict`` finds from which probability on its answers have a precision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from pydantic import TypeAdapter

from finetune.errors import ModelUnsupported, UsageError
from finetune.evaluation.calibration import threshold_for_precision
from finetune.events import Emit, Info, WarningMessage
from finetune.files import read_json, write_json
from finetune.runs.calibration import Predicted
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Task

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ClassConfidences:
    """The validation rows that were answered with a class.

    Args:
        probabilities: Of the answers, in 0..1.
        is_right: Whether each is right.
    """

    probabilities: Sequence[float]
    is_right: Sequence[bool]

    def __post_init__(self) -> None:
        if len(self.probabilities) != len(self.is_right):
            raise ValueError("rows lack a probability, or whether they are right")


@dataclass(frozen=True)
class ConfidenceLimits:
    """From which probability on answers are given: by one of the two, or all without both.

    Args:
        min_confidence: That probability of all classes, in 0..1.
        target_precision: The share of right answers among those of a class, in 0..1.

    Raises:
        UsageError: If both are given, or one is not in its range.
    """

    min_confidence: float | None = None
    target_precision: float | None = None

    def __post_init__(self) -> None:
        if self.min_confidence is not None and self.target_precision is not None:
            raise UsageError(
                "both --min-confidence and --target-precision were given",
                remedy="give one of them",
            )
        _check_range("--min-confidence", self.min_confidence)
        _check_range("--target-precision", self.target_precision)

    @property
    def are_given(self) -> bool:
        """Whether there is one."""
        return self != ConfidenceLimits()


def write_confidences(folder: RunFolder, task: Task, validation: Predicted) -> None:
    """Write ``confidences.json`` beside a run's model, if it may abstain.

    Args:
        folder: The run.
        task: Of the model as it is saved.
        validation: Logits and labels of the validation split.
    """
    if not task.can_abstain:
        return
    probabilities, is_right = task.confidences(*validation)
    predicted = task.read_logits(validation[0]).predicted
    classes = {}
    for number, name in enumerate(task.class_names):
        own = predicted == number
        classes[name] = asdict(
            ClassConfidences(probabilities[own].tolist(), is_right[own].tolist())
        )
    content = {"schema_version": SCHEMA_VERSION, "classes": classes}
    write_json(folder.confidences_file, content)


def find_lowest_probabilities(
    folder: RunFolder, task: Task, limits: ConfidenceLimits, *, emit: Emit
) -> Mapping[str, float]:
    """Return from which probability on the answers of each class are given, by its name.

    Args:
        folder: A run with a model.
        task: Of that model.
        limits: By which they are found.
        emit: Receives the thresholds, and a warning of classes that are never answered, whose
            lowest probability is infinite.

    Raises:
        UsageError: If the task has not one answer with a probability, or the run has kept none of
            validation rows.
    """
    if not task.can_abstain:
        raise UsageError(
            f"a model of --task {task.name} does not give one label with a probability",
            remedy="leave out --min-confidence and --target-precision",
        )
    if limits.target_precision is None:
        return dict.fromkeys(task.class_names, limits.min_confidence or 0.0)
    return _find_with_precision(folder, task, limits.target_precision, emit=emit)


def _check_range(option: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= 1:
        raise UsageError(f"{option} is {value:g}", remedy="give a share from 0 to 1, such as 0.95")


def _find_with_precision(
    folder: RunFolder, task: Task, precision: float, *, emit: Emit
) -> Mapping[str, float]:
    classes = _read_confidences(folder, task)
    lowest = {
        name: threshold_for_precision(
            np.array(own.probabilities), np.array(own.is_right, bool), precision=precision
        )
        for name, own in classes.items()
    }
    _report(lowest, classes, precision=precision, emit=emit)
    return {name: math.inf if low is None else low for name, low in lowest.items()}


def _report(
    lowest: Mapping[str, float | None],
    classes: Mapping[str, ClassConfidences],
    *,
    precision: float,
    emit: Emit,
) -> None:
    reached = ", ".join(f"{name} {low:.3f}" for name, low in lowest.items() if low is not None)
    emit(Info(f"lowest probability for precision {precision:g}: {reached or 'none'}"))
    missed = ", ".join(
        f"{name} ({len(classes[name].is_right):,} rows)"
        for name, low in lowest.items()
        if low is None
    )
    if missed:
        message = f"too few right validation rows for precision {precision:g}, never answered"
        remedy = "lower --target-precision, or train with more validation rows"
        emit(WarningMessage(f"{message}: {missed}", remedy=remedy))


def _read_confidences(folder: RunFolder, task: Task) -> Mapping[str, ClassConfidences]:
    if not folder.confidences_file.is_file():
        raise UsageError(
            f"the run in {folder.path} has kept no confidences of validation rows",
            remedy="give --min-confidence, or make the run again with a --validation-fraction",
        )
    try:
        found = read_json(folder.confidences_file)["classes"]
        classes = {name: found[name] for name in task.class_names}
        return TypeAdapter(dict[str, ClassConfidences]).validate_python(classes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnsupported(
            f"{folder.confidences_file} can't be read",
            remedy="restore the file, or make the run again",
        ) from error
