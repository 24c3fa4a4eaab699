"""Chooses the task type for a model or a label column."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from finetune.errors import DataError, UsageError
from finetune.tasks.base import PIPELINE, TASK_TYPES, Task
from finetune.tasks.labels import (
    MISSING,
    are_lists,
    find_separator,
    has_decimal_commas,
    is_number,
    split_labels,
)
from finetune.tasks.multi import Multi
from finetune.tasks.regression import Regression
from finetune.tasks.single import Single

AUTO = "auto"
# Ratings from 0 to 10 in half steps have 21 values.
MAX_RATINGS = 21
# Whole numbers with at least this many rows each are classes.
MIN_ROWS_PER_NUMBER = 3
# Maximum fraction of distinct values in a numeric column that are not numbers (typing errors).
MAX_MISTAKES = 0.1
# 1,234.50, $ 1.20 and 3%: numbers as people write them, which are not plain decimal numbers.
WRITTEN_NUMBER = r"[+-]?[$€£¥]?\s?-?\d{1,3}([,.'\s]?\d{3})*([.,]\d+)?\s?[%$€£¥]?"


def read_task(config: Mapping[str, Any]) -> Task:
    """Return the task in a model's ``config.json``, or ``single`` if it specifies none."""
    parameters = (config.get("task_specific_params") or {}).get(PIPELINE, {})
    return TASK_TYPES[parameters.get("task", Single.name)].from_config(config, parameters)


def task_of_shape(name: str, *, outputs: int) -> Task:
    """Return a task with this many outputs, for timing. Unknown types become ``single``."""
    return TASK_TYPES.get(name, Single)([*map(str, range(outputs))])


def choose_task_type(
    name: str, labels: Iterable[str], *, names: Sequence[str] | None, rows: int = 0
) -> tuple[type[Task], str]:
    """Choose the task type for distinct labels. Also return the reason if it is a guess."""
    if name in TASK_TYPES:
        return TASK_TYPES[name], ""
    if name != AUTO:
        remedy = f"choose one of {', '.join((AUTO, *TASK_TYPES))}"
        raise UsageError(f"unknown --task {name!r}", remedy=remedy)
    distinct = {label.strip() for label in labels} - {""}
    if are_lists(distinct):
        if all(len(split_labels(label, None)) == 1 for label in distinct):
            return Single, "each row has one label; --task multi allows several"
        return Multi, "rows have several labels, or none"
    if names:
        return Single, f"the file lists {len(names)} classes"
    numbers = {label for label in distinct if label.casefold() not in MISSING}
    are_decimal = has_decimal_commas(numbers)
    if are_decimal:
        numbers = {label.replace(",", ".") for label in numbers}
    if numbers and all(map(is_number, numbers)):
        kind, reason = _task_of_numbers(numbers, rows)
        return kind, f"{reason} (the commas are decimal)" if are_decimal else reason
    _reject_mistaken_numbers(distinct)
    if separator := find_separator(distinct):
        shown = separator.strip(" ") or separator
        reason = f"some rows have several labels, with {shown!r} between them"
        return Multi, f"{reason}; --task single treats each combination as a class"
    return Single, f"{len(distinct)} different labels"


def _reject_mistaken_numbers(distinct: set[str]) -> None:
    numbers = set(filter(is_number, distinct))
    wrong = sorted(distinct - numbers)
    written = [label for label in wrong if re.fullmatch(WRITTEN_NUMBER, label)]
    is_mostly_numbers = len(wrong) - len(written) <= MAX_MISTAKES * len(distinct)
    if len(numbers) + len(written) <= MAX_RATINGS or not is_mostly_numbers:
        return
    if written or _task_of_numbers(numbers, len(numbers))[0] is Regression:
        raise DataError(
            f"most labels are numbers, but these are not: {', '.join(map(repr, wrong[:3]))}",
            remedy="write them as -1234.5, or use --task single to treat each value as a class",
        )


def _task_of_numbers(distinct: Iterable[str], rows: int) -> tuple[type[Task], str]:
    """Return the single-label task for few, evenly spaced or recurring numbers, else regression."""
    values = sorted(set(map(float, distinct)))
    reason = f"the labels are {len(values)} numbers, {values[0]:g} to {values[-1]:g}"
    if not isfinite(values[-1] - values[0]):
        return Single, reason
    has_steps = values[-1] - values[0] == len(values) - 1
    recur = rows >= MIN_ROWS_PER_NUMBER * len(values) and all(map(float.is_integer, values))
    if len(values) > MAX_RATINGS and not has_steps and not recur:
        return Regression, f"{reason}; --task single treats each as a class"
    if len(values) > 2:
        reason += ", each is treated as a class; --task regression predicts a number"
    return Single, reason
