"""Multi-label classification: each class is a separate binary decision."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError
from finetune.tasks.base import Logits, Outputs, Predict, Task
from finetune.tasks.labels import (
    distinct_values,
    find_separator,
    flat_values,
    is_number,
    map_values,
    name_classes,
    split_labels,
)
from finetune.tasks.metrics import MULTI, average_precisions

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column

Indicators = NDArray[np.float32]
DEFAULT_THRESHOLD = 0.5
# Without a limit, a class with 1 of 1,000 rows would outweigh all others.
MAX_POSITIVE_WEIGHT = 100.0
# A threshold chosen on few rows is mostly chance. The common threshold of all classes weighs as
# much as one chosen on this many rows of the class (tests/tasks/test_multi).
THRESHOLD_PRIOR_ROWS = 10
MIN_THRESHOLD = 1e-6


@dataclass(frozen=True)
class Multi(Task):
    """Any number of classes per text. Labels are float32 of shape [rows, classes], 0 or 1."""

    name = "multi"
    problem_type = MULTI
    result_name = "labels"
    limit = (
        "A text gets each class whose probability reaches the threshold above. The thresholds "
        "were chosen on the validation split and are stored in `config.json`. With `top_k=None` "
        "the pipeline returns the probability of each class, without applying thresholds."
    )
    mistakes_title = "Most wrong classes"
    error_name = "wrong classes"

    thresholds: Sequence[float] = ()

    @property
    def parameters(self) -> dict[str, Any]:
        thresholds = dict(zip(self.class_names, self._thresholds, strict=True))
        return {"thresholds": thresholds, **super().parameters}

    @property
    def _thresholds(self) -> Sequence[float]:
        return self.thresholds or [DEFAULT_THRESHOLD] * len(self.class_names)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Self:
        task, saved = super().from_config(config, parameters), parameters["thresholds"]
        return replace(task, thresholds=[saved[name] for name in task.class_names])

    @classmethod
    def parse(cls, columns: Sequence["Column"]) -> "list[Column]":
        import pyarrow

        distinct = distinct_values(columns)
        separator = find_separator(distinct)
        lists = {label: split_labels(label, separator) for label in distinct}
        classes = name_classes(name for names in lists.values() for name in names)
        rows = list(filter(None, lists.values()))
        repeats = any(len(names) > len({*names}) for names in rows)
        are_same = len(classes) > 1 and all(classes.keys() <= {*names} for names in rows)
        is_matrix = len({*map(len, rows)}) == 1 < len(rows) and all(map(is_number, classes))
        if is_matrix and (repeats or are_same):
            raise DataError(
                f"the labels are lists of numbers, such as {rows[0]}, not of classes",
                remedy="write a list of class names per row, or one column of 0 and 1 per class",
            )

        def name(label: str) -> list[str] | None:
            if not label.strip():
                return None  # unlabeled, unlike []
            return [*dict.fromkeys(filter(None, map(classes.get, lists[label])))]

        arrow_type = pyarrow.list_(pyarrow.string())
        return [map_values(column, name, arrow_type=arrow_type) for column in columns]

    def labels(self, column: "Column") -> Indicators:
        import pyarrow.compute as pc

        lengths = pc.list_value_length(column).to_numpy()
        return self._indicators(lengths, flat_values(column).to_numpy())

    def _indicators(self, lengths: NDArray[Any], numbers: NDArray[Any]) -> Indicators:
        labels = np.zeros((len(lengths), len(self.class_names)), np.float32)
        labels[np.repeat(np.arange(len(lengths)), lengths), numbers] = 1
        return labels

    def to_json(self, labels: NDArray[Any]) -> list[list[str]]:
        names = [self.class_names[number] for number in np.nonzero(labels)[1].tolist()]
        return _by_row(labels, names)

    def _columns_of(self, outputs: Outputs, name: str) -> dict[str, list[Any]]:
        assert outputs.probabilities is not None
        by_row = _by_row(outputs.predicted, outputs.probabilities[outputs.predicted].tolist())
        return super()._columns_of(outputs, name) | {"label_probabilities": by_row}

    def from_json(self, values: Sequence[Any]) -> Indicators:
        numbers = self.class_numbers
        flat = np.array([numbers[name] for names in values for name in names], np.int64)
        return self._indicators(np.array([*map(len, values)]), flat)

    def class_rows(self, labels: Indicators) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, numbers = np.nonzero(labels)
        return rows, numbers

    def describe(self, labels: Indicators) -> dict[str, float]:
        counts = labels.sum(axis=1)
        return {
            "classes per row (mean)": float(counts.mean()),
            "classes per row (max)": float(counts.max()),
            "rows without a class": float(np.count_nonzero(counts == 0)),
        }

    def balance(self, labels: Indicators) -> NDArray[np.float64]:
        """Return rows without the class / rows with it."""
        rows = labels.sum(axis=0, dtype=np.float64)
        weights: NDArray[np.float64] = (len(labels) - rows) / np.maximum(rows, 1)
        return weights.clip(max=MAX_POSITIVE_WEIGHT)

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the mean binary cross-entropy of the classes of each example, weighted."""
        import torch

        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        weights = _on_device(self.class_weights, logits.device)
        smoothing = self.options.label_smoothing
        smooth = labels * (1 - smoothing) + smoothing / 2
        losses = entropy(logits, smooth, reduction="none")
        if weights is not None:
            losses = losses * (1 + (weights - 1) * labels)
        if self.options.loss == "focal":
            # (1 - p) ** gamma, computed from the logit of the wrong label.
            wrong = torch.nn.functional.logsigmoid(logits * (1 - 2 * labels))
            losses = losses * (self.options.focal_gamma * wrong).exp()
        return losses.mean(dim=1)

    def sample_labels(self, count: int) -> Indicators:
        return np.eye(len(self.class_names), dtype=np.float32)[super().sample_labels(count)]

    def calibrate(self, predict: Predict, *, fits_temperature: bool) -> Self:
        """Choose the thresholds with the highest F1, and the temperature."""
        calibrated = super().calibrate(predict, fits_temperature=fits_temperature)
        logits, labels = predict()
        probabilities = sigmoid(logits / np.float32(calibrated.temperature))
        thresholds = find_thresholds(probabilities, labels > 0)
        return replace(calibrated, thresholds=thresholds.tolist())

    def read_logits(self, logits: Logits) -> Outputs:
        probabilities = sigmoid(logits)
        return Outputs(probabilities >= np.array(self._thresholds, np.float32), probabilities)

    def baseline_predictions(self, labels: Indicators) -> NDArray[np.bool_]:
        counts = labels.sum(axis=0, dtype=np.float64)
        order = np.argsort(-counts, kind="stable")
        answered = np.arange(1, len(counts) + 1) * len(labels)
        best = int((counts[order].cumsum() / (answered + counts.sum())).argmax())  # half of F1
        is_frequent = np.isin(np.arange(len(counts)), order[: best + 1])
        return np.broadcast_to(is_frequent, labels.shape)

    def class_columns(self, labels: Indicators, outputs: Outputs) -> Sequence[NDArray[Any]]:
        assert outputs.probabilities is not None
        precisions = average_precisions(labels, outputs.probabilities, np.ones(len(labels)))
        return np.array(self._thresholds), np.ma.masked_where(~labels.any(axis=0), precisions)


def sigmoid(logits: Logits) -> NDArray[np.float32]:
    """Return the probability of each class from independent logits."""
    return np.exp(-np.logaddexp(0, -logits))


def _by_row(labels: NDArray[Any], values: list[Any]) -> list[list[Any]]:
    """Group values of predicted classes, [values], into one list per row."""
    ends = np.cumsum(np.count_nonzero(labels, axis=1)).tolist()
    return [values[start:end] for start, end in pairwise([0, *ends])]


@cache
def _on_device(numbers: tuple[float, ...], device: "torch.device") -> "torch.Tensor | None":
    """Return numbers as a cached tensor, because a captured step can't copy to a device."""
    import torch

    return torch.tensor(numbers, device=device) if numbers else None


def find_thresholds(
    probabilities: NDArray[np.float32], true: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Choose the threshold of each class, shrunk to the common threshold for rare classes."""
    from scipy.special import expit, logit

    thresholds = list(map(find_threshold, probabilities.T, true.T))
    common = find_threshold(probabilities.ravel(), true.ravel())
    rows = true.sum(axis=0)
    weights = rows / (rows + THRESHOLD_PRIOR_ROWS)
    of_class, of_all = (
        logit(np.clip(threshold, MIN_THRESHOLD, 1 - MIN_THRESHOLD))
        for threshold in (thresholds, common)
    )
    return np.asarray(expit(weights * of_class + (1 - weights) * of_all))


def find_threshold(probabilities: NDArray[np.float32], true: NDArray[np.bool_]) -> float:
    """Return the threshold with the highest F1, halfway between two probabilities."""
    if not true.any() or true.all():
        return DEFAULT_THRESHOLD
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order].astype(np.float64)
    right = np.cumsum(true[order])
    f1 = 2 * right / (np.arange(1, len(true) + 1) + true.sum())
    is_cut = np.append(ranked[1:] < ranked[:-1], True)  # no threshold between equal probabilities
    best = int(np.where(is_cut, f1, -1.0).argmax())
    below = ranked[best + 1] if best + 1 < len(ranked) else 0.0
    return float((ranked[best] + below) / 2)
