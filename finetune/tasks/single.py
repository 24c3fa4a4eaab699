"""Single-label classification: each text has exactly one class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError
from finetune.tasks.base import Logits, Outputs, Task
from finetune.tasks.labels import are_lists, distinct_values, map_values, name_classes, split_labels
from finetune.tasks.metrics import SINGLE

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column

ClassNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class Single(Task):
    """One class per text. Labels are int64 of shape [rows]."""

    name = "single"
    problem_type = SINGLE
    result_name = "label"
    can_abstain = True
    limit = "Every text gets one of the classes above, even one that belongs to none of them."
    mistakes_title = "Most confident mistakes"
    error_name = "probability"

    @classmethod
    def parse(cls, columns: Sequence["Column"]) -> "list[Column]":
        distinct = distinct_values(columns)
        if are_lists(set(distinct) - {""}):
            lists = {label: split_labels(label, None) for label in distinct}
            if several := next((label for label in distinct if len(lists[label]) > 1), None):
                raise DataError(
                    f"a row has several labels ({several[:60]}), but --task {cls.name} allows one",
                    remedy="drop --task, or use --task multi",
                )
            joined = {label: "".join(names) for label, names in lists.items()}
            columns = [map_values(column, joined.__getitem__) for column in columns]
            distinct = [*joined.values()]
        classes = name_classes(distinct)
        return [map_values(column, lambda label: classes[label] or None) for column in columns]

    def labels(self, column: "Column") -> ClassNumbers:
        return np.asarray(column.to_numpy())

    def to_json(self, labels: ClassNumbers) -> list[str]:
        return [self.class_names[number] for number in labels.tolist()]

    def from_json(self, values: Sequence[Any]) -> ClassNumbers:
        return np.array([self.class_numbers[name] for name in values], np.int64)

    def class_rows(self, labels: ClassNumbers) -> tuple[ClassNumbers, ClassNumbers]:
        return np.arange(len(labels)), labels

    def strata(self, labels: ClassNumbers) -> NDArray[np.int64]:
        return labels

    def balance(self, labels: ClassNumbers) -> NDArray[np.float64]:
        """Return rows / (classes × rows of the class)."""
        counts = np.bincount(labels, minlength=len(self.class_names))
        weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return np.where(counts, weights, 0.0)

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        import torch

        entropy = torch.nn.functional.cross_entropy(
            logits, labels, reduction="none", label_smoothing=self.options.label_smoothing
        )
        if self.options.loss == "focal":
            # At a probability of 1, the gradient of the power would be infinite.
            others = (-torch.expm1(-entropy)).clamp(min=1e-6)
            return entropy * others**self.options.focal_gamma
        return entropy

    def example_weights(self, labels: ClassNumbers) -> NDArray[np.float32]:
        if not self.class_weights:
            return super().example_weights(labels)
        return np.array(self.class_weights, np.float32)[labels]

    def read_logits(self, logits: Logits) -> Outputs:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return Outputs(logits.argmax(axis=1), powers / powers.sum(axis=1, keepdims=True))

    def baseline_predictions(self, labels: ClassNumbers) -> ClassNumbers:
        return np.full_like(labels, np.bincount(labels).argmax())

    def row_errors(self, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the probability of the predicted class if it is wrong, otherwise 0."""
        errors = (row["probability"] * (row["predicted"] != row["label"]) for row in rows)
        return np.fromiter(errors, np.float64, len(rows))

    def mistake_groups(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the groups of both classes and of the confusion-matrix cell."""
        true, predicted = row["label"], row["predicted"]
        cell = f"cell-{self.class_numbers[true]}-{self.class_numbers[predicted]}"
        return {cell: f"{true} predicted as {predicted}", **super().mistake_groups(row)}
