"""Files next to a saved model: its options, and its confidence on validation rows."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from finetune.config.schema import OPTIONS, Config, change_options
from finetune.errors import UsageError
from finetune.evaluation.statistics import threshold_for_precision
from finetune.events import Info, WarningMessage, emit
from finetune.files import write_json
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Labels, Logits, Task

SCHEMA_VERSION = 1
_OPTIONS = {name: option for name, option in OPTIONS.items() if option.saved_with_model}


def write_inference(
    folder: RunFolder, config: Config, *, max_tokens: int, reads_pairs: bool
) -> None:
    """Write ``inference.json`` next to a saved model, which reads ``max_tokens`` at once."""
    content = {name: option.value_in(config) for name, option in _OPTIONS.items()}
    content["max_length"] = min(config.model.max_length, max_tokens)
    facts = {"schema_version": SCHEMA_VERSION, "reads_pairs": reads_pairs}
    write_json(folder.inference_file, {**facts, **content})


def reads_pairs(folder: RunFolder) -> bool:
    """Return whether the model of a run reads pairs of texts."""
    return folder.read(folder.inference_file, lambda content: bool(content["reads_pairs"]))


def read_trained_config(folder: RunFolder) -> Config:
    """Return the configuration of a run with the options of its ``inference.json``."""
    config = folder.read_config()

    def parse(content: Any) -> Config:
        changes = {name: content[name] for name in _OPTIONS}
        changed = asdict(change_options(config, changes))
        return TypeAdapter(Config).validate_python(changed)

    return folder.read(folder.inference_file, parse)


def write_confidences(folder: RunFolder, task: Task, logits: Logits, labels: Labels) -> None:
    """Write ``confidences.json`` next to a saved model, if it may abstain."""
    if not task.can_abstain:
        return
    probabilities, is_right = task.confidences(logits, labels)
    predicted = task.read_logits(logits).predicted
    classes = {
        name: {
            "probabilities": probabilities[predicted == number].tolist(),
            "is_right": is_right[predicted == number].tolist(),
        }
        for number, name in enumerate(task.class_names)
    }
    write_json(folder.confidences_file, {"schema_version": SCHEMA_VERSION, "classes": classes})


def find_lowest_probabilities(
    folder: RunFolder, *, min_confidence: float | None = None, target_precision: float | None = None
) -> Mapping[str, float] | None:
    """Return the probability per class below which the model abstains (maybe infinite), or None."""
    if min_confidence is None and target_precision is None:
        return None
    if min_confidence is not None and target_precision is not None:
        raise UsageError(
            "--min-confidence and --target-precision can't be combined", remedy="drop one of them"
        )
    task = folder.read_task()
    if not (task.can_abstain if target_precision is not None else task.class_names):
        option = "--min-confidence" if target_precision is None else "--target-precision"
        raise UsageError(
            f"{option} can't be used with a model of --task {task.name}", remedy="drop it"
        )
    if target_precision is None:
        return dict.fromkeys(task.class_names, min_confidence or 0.0)
    if not folder.confidences_file.is_file():
        raise UsageError(
            f"the run in {folder.path} has no confidences of validation rows",
            remedy="use --min-confidence, or repeat the run with --validation-fraction 0.1",
        )

    def parse(content: Any) -> dict[str, float | None]:
        rows = {name: content["classes"][name] for name in task.class_names}
        return {
            f"{name} ({len(of_class['is_right']):,} rows)": threshold_for_precision(
                np.array(of_class["probabilities"], float),
                np.array(of_class["is_right"], bool),
                precision=target_precision,
            )
            for name, of_class in rows.items()
        }

    thresholds = folder.read(folder.confidences_file, parse)
    reached = ", ".join(f"{name} {low:.3f}" for name, low in thresholds.items() if low is not None)
    emit(Info(f"confidence thresholds for precision {target_precision:g}: {reached or 'none'}"))
    if missed := ", ".join(name for name, low in thresholds.items() if low is None):
        message = "too few correct validation rows, so the model always abstains from"
        remedy = "lower --target-precision, or train with more validation rows"
        emit(WarningMessage(f"{message}: {missed}", remedy=remedy))
    lowest = (math.inf if low is None else low for low in thresholds.values())
    return dict(zip(task.class_names, lowest, strict=True))
