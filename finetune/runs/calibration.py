"""Calibrates the best model at the end of a run: its temperature, thresholds or units."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.events import Emit, Info
from finetune.model.load import TextModel
from finetune.tasks.base import Labels, Task

# How far logits may be from proportional, as a fraction of the largest: bf16 rounds by less.
MAX_DEVIATION = 0.03

Predicted = tuple[NDArray[np.float32], Labels]


def calibrate_model(
    text_model: TextModel, predict: Callable[[], Predicted] | None, *, calibrates: bool, emit: Emit
) -> tuple[Task, Predicted | None]:
    """Calibrate the task of a model on validation rows, and scale the output layer accordingly.

    ``predict`` returns logits and labels of those rows, as this does for the scaled model; None if
    there are none.
    """
    parameters, task = text_model.output_parameters, text_model.task
    if predict is None:
        return task.scale_output_layer(parameters), None
    predict_first = cache(predict)
    task = task.calibrate(predict_first, fits_temperature=calibrates, emit=emit)
    if task.temperature == 1:
        return task.scale_output_layer(parameters), predict()
    before, labels = predict_first()
    saved = [parameter.detach().clone() for parameter in parameters]
    scaled = task.scale_output_layer(parameters)
    after, _ = predict()
    deviation = np.abs(before - scaled.temperature * after).max()
    if deviation <= MAX_DEVIATION * np.abs(before).max():
        emit(
            Info(
                f"calibration: the logits are divided by {scaled.temperature:.3g}, a temperature "
                "chosen on the validation rows"
            )
        )
        return scaled, (after, labels)
    emit(Info("calibration skipped: scaling the output layer did not scale the logits"))
    with torch.no_grad():
        for parameter, values in zip(parameters, saved, strict=True):
            parameter.copy_(values)
    return replace(task, temperature=1.0).scale_output_layer(parameters), (before, labels)
