"""What a task takes of the best model at the end of a run: thresholds, temperature, units."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.events import Emit, Info, WarningMessage
from finetune.model.load import TextModel
from finetune.tasks.base import Labels, Task

# How far logits may be from proportional, as a share of the largest: bf16 rounds by less.
MAX_DEVIATION = 0.03

Predicted = tuple[NDArray[np.float32], Labels]


def finish_task(
    text_model: TextModel, predict: Callable[[], Predicted], *, calibrates: bool, emit: Emit
) -> tuple[Task, Predicted]:
    """Let a task choose what it takes from validation rows, and change the last layer by that.

    Args:
        text_model: The best model of a run.
        predict: Returns logits and labels of the validation split.
        calibrates: Whether a temperature is fitted.
        emit: Receives what was found.

    Returns:
        The task of the model as it is now, and its logits and labels.
    """
    parameters, predict_first = text_model.output_parameters, cache(predict)
    tuned = text_model.task.calibrate(predict_first, fits_temperature=calibrates, emit=emit)
    if tuned.temperature == 1:
        return tuned.scale_output_layer(parameters), predict()
    before, labels = predict_first()
    saved = [one.detach().clone() for one in parameters]
    folded = tuned.scale_output_layer(parameters)
    after, _ = predict()
    if not are_proportional(before, after, factor=folded.temperature):
        emit(Info("the probabilities are not calibrated: the logits do not follow the last layer"))
        _restore(parameters, saved)
        return replace(tuned, temperature=1.0).scale_output_layer(parameters), (before, labels)
    temperature = f"{folded.temperature:.3g}, a temperature that is fitted on the validation rows"
    emit(Info(f"calibration: the logits are divided by {temperature}"))
    changed = _count_changes((tuned, before), (folded, after), labels)
    if changed:
        message = f"rounding has changed {changed:,} of {len(labels):,} answers to validation rows"
        emit(WarningMessage(message, remedy="train with --precision fp32 or --no-calibrate"))
    return folded, (after, labels)


def are_proportional(
    before: NDArray[np.float32], after: NDArray[np.float32], *, factor: float
) -> bool:
    """Return whether logits are others times a factor, but for rounding."""
    deviation = np.abs(before - factor * after).max()
    return bool(deviation <= MAX_DEVIATION * np.abs(before).max())


def _restore(parameters: Sequence[torch.nn.Parameter], saved: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, values in zip(parameters, saved, strict=True):
            parameter.copy_(values)


def _count_changes(
    before: tuple[Task, NDArray[np.float32]],
    after: tuple[Task, NDArray[np.float32]],
    labels: Labels,
) -> int:
    """Return how many rows have another answer."""
    answers = zip(
        *([row["predicted"] for row in task.prediction_rows(logits, labels)]
          for task, logits in (before, after)), strict=True,
    )  # fmt: skip
    return sum(one != other for one, other in answers)
