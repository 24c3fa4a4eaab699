"""Whether an exported model answers as the run's own does, and how fast."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from finetune.runs.trained import TrainedModel
from finetune.tasks.base import Task
from finetune.tokenization.examples import Examples

# So many texts are timed one by one, on both sides in turn.
TIMED_TEXTS = 100


@dataclass(frozen=True)
class Verification:
    """An exported model beside the one that it was made from, on the same rows.

    Args:
        samples: Rows that were compared.
        same_labels: Share of the rows that get the same labels, in 0..1.
        largest_logit_difference: Over all rows and outputs; where logits go beyond 1, as numbers
            in their own units may, relative to the largest.
        metrics: Of the exported model, by name.
        pytorch_metrics: Of the run's model, in fp32.
        milliseconds_per_text: Of the exported model at batch size 1: a median.
        pytorch_milliseconds_per_text: Of the run's model on the CPU, in turn with the other.
    """

    samples: int
    same_labels: float
    largest_logit_difference: float
    metrics: dict[str, float]
    pytorch_metrics: dict[str, float]
    milliseconds_per_text: float
    pytorch_milliseconds_per_text: float


def verify(trained: TrainedModel, exported: nn.Module, examples: Examples) -> Verification:
    """Run the same examples through a run's model and through what was exported of it.

    Args:
        trained: On the CPU, in fp32.
        exported: In its place: takes the same inputs.
        examples: One or more.
    """
    task, model = trained.text_model.task, trained.predictor.model
    logits, exported_logits = (
        replace(trained, predictor=replace(trained.predictor, model=one)).logits(examples)
        for one in (model, exported)
    )
    seconds, exported_seconds = _time_in_turn([model, exported], examples)
    is_same = map(dict.__eq__, _labels(task, logits), _labels(task, exported_logits))
    return Verification(
        samples=len(logits),
        same_labels=statistics.mean(map(float, is_same)),
        largest_logit_difference=float(
            np.abs(logits - exported_logits).max() / max(1.0, np.abs(logits).max())
        ),
        metrics=task.score(exported_logits, examples.labels).metrics,
        pytorch_metrics=task.score(logits, examples.labels).metrics,
        milliseconds_per_text=1000 * exported_seconds,
        pytorch_milliseconds_per_text=1000 * seconds,
    )


def _labels(task: Task, logits: NDArray[np.float32]) -> list[dict[str, Any]]:
    """Return what of each row's answer is not a number."""
    answers = task.predict([""] * len(logits), logits)
    return [
        {name: one for name, one in answer.result.items() if not isinstance(one, float)}
        for answer in answers
    ]


def _time_in_turn(models: Sequence[nn.Module], examples: Examples) -> list[float]:
    """Return each model's median seconds for one text."""
    seconds: list[list[float]] = [[] for _ in models]
    with torch.inference_mode():
        for index in range(min(TIMED_TEXTS, len(examples.lengths))):
            inputs = examples.inputs_of(np.array([index]), int(examples.lengths[index]))
            for own, model in zip(seconds, models, strict=True):
                own.append(_seconds_of(partial(model, **inputs)))
    return list(map(statistics.median, seconds))


def _seconds_of(forward: Callable[[], Any]) -> float:
    started = time.perf_counter()
    forward()
    return time.perf_counter() - started
