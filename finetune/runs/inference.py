"""Files beside a run's model: how it reads texts, and how confident it was on validation rows."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from finetune.config.schema import Config, ModelConfig
from finetune.errors import UsageError
from finetune.evaluation.statistics import threshold_for_precision
from finetune.events import Emit, Info, WarningMessage
from finetune.files import write_json
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Task
from finetune.tokenization.long_texts import Aggregation, Handling

if TYPE_CHECKING:
    from finetune.runs.calibration import Predicted

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Inference:
    """How texts are read; ``max_length`` is at most the model's."""

    max_length: int
    long_texts: Handling
    stride: int
    pooling: Aggregation


def write_inference(folder: RunFolder, options: ModelConfig, *, max_tokens: int) -> None:
    """Write ``inference.json`` beside a run's model, which reads ``max_tokens`` at once."""
    max_length = min(options.max_length, max_tokens)
    inference = Inference(max_length, options.long_texts, options.stride, options.pooling)
    content = {"schema_version": SCHEMA_VERSION, **asdict(inference)}
    write_json(folder.inference_file, content)


def read_trained_config(folder: RunFolder) -> Config:
    """Return a run's configuration, with what its ``inference.json`` says of reading texts."""
    config = folder.read_config()
    if not folder.inference_file.is_file():
        return config
    inference = folder.read(folder.inference_file, TypeAdapter(Inference).validate_python)
    return replace(config, model=replace(config.model, **asdict(inference)))


def write_confidences(folder: RunFolder, task: Task, validation: "Predicted") -> None:
    """Write ``confidences.json`` beside a run's model, if it may abstain."""
    if not task.can_abstain:
        return
    probabilities, is_right = task.confidences(*validation)
    predicted = task.read_logits(validation[0]).predicted
    classes = {
        name: {
            "probabilities": probabilities[predicted == number].tolist(),
            "is_right": is_right[predicted == number].tolist(),
        }
        for number, name in enumerate(task.class_names)
    }
    write_json(folder.confidences_file, {"schema_version": SCHEMA_VERSION, "classes": classes})


@dataclass(frozen=True)
class ConfidenceLimits:
    """When a model abstains: below a probability, or below what gives each class a precision."""

    min_confidence: float | None = None
    target_precision: float | None = None

    def __post_init__(self) -> None:
        if self.min_confidence is not None and self.target_precision is not None:
            raise UsageError(
                "both --min-confidence and --target-precision were given",
                remedy="give one of them",
            )
        for option, value in asdict(self).items():
            if value is not None and not 0 <= value <= 1:
                raise UsageError(
                    f"--{option.replace('_', '-')} is {value:g}",
                    remedy="give a fraction from 0 to 1, such as 0.95",
                )

    @property
    def are_given(self) -> bool:
        """Whether there is one."""
        return self != ConfidenceLimits()


def find_lowest_probabilities(
    folder: RunFolder, task: Task, limits: ConfidenceLimits, *, emit: Emit
) -> Mapping[str, float]:
    """Return the probability of each class below which the model abstains.

    It is infinite for classes with too little evidence, of which a warning tells.
    """
    if not task.can_abstain:
        raise UsageError(
            f"a model of --task {task.name} does not give one label with a probability",
            remedy="leave out --min-confidence and --target-precision",
        )
    precision = limits.target_precision
    if precision is None:
        return dict.fromkeys(task.class_names, limits.min_confidence or 0.0)
    if not folder.confidences_file.is_file():
        raise UsageError(
            f"the run in {folder.path} has kept no confidences of validation rows",
            remedy="give --min-confidence, or make the run again with a --validation-fraction",
        )

    def parse(content: Any) -> dict[str, tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        rows = [(name, content["classes"][name]) for name in task.class_names]
        return {
            name: (np.array(of_class["probabilities"], float), np.array(of_class["is_right"], bool))
            for name, of_class in rows
        }

    classes = folder.read(folder.confidences_file, parse)
    thresholds = {
        name: threshold_for_precision(probabilities, is_right, precision=precision)
        for name, (probabilities, is_right) in classes.items()
    }
    reached = ", ".join(f"{name} {low:.3f}" for name, low in thresholds.items() if low is not None)
    emit(Info(f"lowest probability for precision {precision:g}: {reached or 'none'}"))
    missed = ", ".join(
        f"{name} ({len(classes[name][1]):,} rows)"
        for name, low in thresholds.items()
        if low is None
    )
    if missed:
        emit(
            WarningMessage(
                f"too few right validation rows for precision {precision:g}, always abstains: "
                f"{missed}",
                remedy="lower --target-precision, or train with more validation rows",
            )
        )
    return {name: math.inf if low is None else low for name, low in thresholds.items()}
