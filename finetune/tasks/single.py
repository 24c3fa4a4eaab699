"""One label per text: each text has exactly one class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.base import Logits, Outputs, Task
from finetune.tasks.labels import distinct_values, map_values, name_classes
from finetune.tasks.metrics import SINGLE, ProblemType
from finetune.tasks.tables import MAX_LISTED, MAX_MISTAKES, Table, percent, text_of

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column

ClassNumbers = NDArray[np.int64]


@dataclass(frozen=True)
class Single(Task):
    """One class per text; the labels are int64 of shape [rows].

    In the loss a row has the weight of its class, by default 1.
    """

    name: ClassVar[str] = "single"
    problem_type: ClassVar[ProblemType] = SINGLE
    result_name: ClassVar[str] = "label"
    can_abstain: ClassVar[bool] = True
    limit: ClassVar[str] = (
        "Every text gets one of the classes above, even one that belongs to none of them."
    )

    class_weights: tuple[float, ...] = ()

    @classmethod
    def parse(cls, columns: Sequence["Column"]) -> "list[Column]":
        classes = name_classes(distinct_values(columns))
        return [map_values(column, lambda label: classes[label] or None) for column in columns]

    @property
    def feature(self) -> Any:
        from datasets import ClassLabel

        return ClassLabel(names=list(self.class_names))

    def labels(self, column: "Column") -> ClassNumbers:
        return np.asarray(column.to_numpy())

    def to_json(self, labels: ClassNumbers) -> list[str]:
        return [self.class_names[number] for number in labels.tolist()]

    def from_json(self, values: Sequence[Any]) -> ClassNumbers:
        return np.array([self.class_numbers[name] for name in values], np.int64)

    def class_rows(self, labels: ClassNumbers) -> tuple[ClassNumbers, ClassNumbers]:
        return np.arange(len(labels)), labels

    def strata(self, labels: ClassNumbers) -> ClassNumbers:
        return labels

    def with_training_labels(self, labels: ClassNumbers, *, is_balanced: bool) -> Self:
        """Return the task with class weights rows / (classes × rows of the class), if balanced."""
        if not is_balanced:
            return self
        counts = np.bincount(labels, minlength=len(self.class_names))
        weights = len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1))
        return replace(self, class_weights=tuple(np.where(counts, weights, 0.0).tolist()))

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        import torch

        entropy = cross_entropy(logits, labels, smoothing=self.label_smoothing)
        if not self.focal_gamma:
            return entropy
        # At a probability of 1 the gradient of the power would be infinite.
        others = (-torch.expm1(-entropy)).clamp(min=1e-6)
        return entropy * others**self.focal_gamma

    def example_weights(self, labels: ClassNumbers) -> NDArray[np.float32]:
        if not self.class_weights:
            return super().example_weights(labels)
        return np.array(self.class_weights, np.float32)[labels]

    def read_logits(self, logits: Logits) -> Outputs:
        import torch

        probabilities = torch.from_numpy(logits).softmax(dim=1).numpy()
        return Outputs(logits.argmax(axis=1), probabilities, probabilities.max(axis=1))

    def baseline_predictions(self, labels: ClassNumbers) -> ClassNumbers:
        return np.full_like(labels, np.bincount(labels).argmax())

    def row_errors(self, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the probability of the predicted class where it is wrong, else 0."""
        errors = (row["probability"] * (row["predicted"] != row["label"]) for row in rows)
        return np.fromiter(errors, np.float64, len(rows))

    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        wrong = [row for row in rows if row["predicted"] != row["label"]]
        wrong.sort(key=itemgetter("probability"), reverse=True)
        cells, groups = [], []
        for row in wrong[:MAX_LISTED]:
            true, predicted = pair = (row["label"], row["predicted"])
            cell = "cell-{}-{}".format(*map(self.class_numbers.__getitem__, pair))
            groups.append({cell: f"{true} predicted as {predicted}", **self.class_groups(pair)})
            cells.append((text_of(row), *pair, percent(row["probability"])))
        note = f"{len(wrong)} of {len(rows)} test rows are misclassified"
        if len(wrong) > MAX_MISTAKES:
            note += f"; these are the {MAX_MISTAKES} with the highest probability"
        columns = ("text", "true", "predicted", "probability")
        return Table("Most confident mistakes", columns, cells, 3, f"{note}.", groups)


def cross_entropy(
    logits: "torch.Tensor", labels: "torch.Tensor", *, smoothing: float = 0.0
) -> "torch.Tensor":
    """Return the cross-entropy of each example: of shape [examples]."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits, labels, reduction="none", label_smoothing=smoothing
    )
