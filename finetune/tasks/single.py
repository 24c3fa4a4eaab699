"""One label a text: each text is of exactly one class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit
from finetune.tasks.base import Logits, Outputs, Task, read_class_names, score_classes
from finetune.tasks.labels import distinct_values, map_values, name_classes, sort_classes
from finetune.tasks.metrics import SINGLE, ProblemType, count_classes
from finetune.tasks.scores import ClassScores
from finetune.tasks.tables import MAX_MISTAKES, Table, list_mistakes, percent, text_of
from finetune.tasks.temperature import describe_calibration, fit_temperature, read_temperature

if TYPE_CHECKING:
    import pyarrow
    import torch

ClassNumbers = NDArray[np.int64]
# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MAX_CLASSES_OF_MATRIX = 500


@dataclass(frozen=True)
class Single(Task):
    """One class a text; the labels are int64 of shape [rows].

    Args:
        class_names: The classes in the order of their numbers.
        class_weights: The weight of a row of each class in the loss; none for 1.
    """

    name: ClassVar[str] = "single"
    problem_type: ClassVar[ProblemType] = SINGLE
    result_name: ClassVar[str] = "label"
    can_abstain: ClassVar[bool] = True

    class_weights: tuple[float, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> "Single":
        """Return the task of a model's ``config.json``."""
        return cls(read_class_names(config), temperature=read_temperature(parameters))

    @classmethod
    def parse(cls, columns: Sequence["pyarrow.ChunkedArray"]) -> "list[pyarrow.ChunkedArray]":
        """Return the class of each label, by name."""
        classes = name_classes(distinct_values(columns))
        return [map_values(column, lambda label: classes[label] or None) for column in columns]

    @classmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Single":
        """Return the task whose classes are those that occur, unless they are named."""
        return cls(names or sort_classes(labels.unique().to_pylist()))

    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return class numbers."""
        return map_values(labels, self.class_numbers.get, arrow_type="int64")

    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return class names."""
        return map_values(column, self.class_names.__getitem__)

    @property
    def feature(self) -> Any:
        """A ``ClassLabel``."""
        from datasets import ClassLabel

        return ClassLabel(names=list(self.class_names))

    def labels(self, column: "pyarrow.ChunkedArray") -> ClassNumbers:
        """Return class numbers."""
        labels: ClassNumbers = column.to_numpy()
        return labels

    def find_unknown(
        self, labels: "pyarrow.ChunkedArray", *, training: "pyarrow.ChunkedArray"
    ) -> "pyarrow.ChunkedArray":
        """Return the classes that no training row has, by name."""
        import pyarrow.compute as pc

        return pc.if_else(pc.is_in(labels, value_set=training.unique()), None, labels)

    def to_json(self, labels: ClassNumbers) -> list[str]:
        """Return class names."""
        return [self.class_names[number] for number in labels.tolist()]

    def from_json(self, values: Sequence[Any]) -> ClassNumbers:
        """Return class numbers."""
        numbers = self.class_numbers
        return np.array([numbers[name] for name in values], np.int64)

    def strata(self, labels: ClassNumbers) -> ClassNumbers:
        """Return the classes: a split takes its fraction of each."""
        return labels

    def count_classes(self, labels: ClassNumbers) -> dict[str, int]:
        """Return the rows of each class."""
        counts = np.bincount(labels, minlength=len(self.class_names))
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    def first_rows(self, labels: ClassNumbers) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        numbers, rows = np.unique(labels, return_index=True)
        return dict(zip(self.to_json(numbers), rows.tolist(), strict=True))

    def with_training_labels(self, labels: ClassNumbers, *, is_balanced: bool) -> "Single":
        """Return the task with class weights, if balanced."""
        if not is_balanced:
            return self
        weights = balanced_class_weights(labels, classes=len(self.class_names))
        return replace(self, class_weights=tuple(weights.tolist()))

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the cross-entropy of each example."""
        return cross_entropy(logits, labels)

    def example_weights(self, labels: ClassNumbers) -> NDArray[np.float32]:
        """Return the weights of the examples' classes: [examples]."""
        if not self.class_weights:
            return super().example_weights(labels)
        return np.array(self.class_weights, np.float32)[labels]

    def calibrate(
        self,
        predict: Callable[[], tuple[Logits, ClassNumbers]],
        *,
        fits_temperature: bool,
        emit: Emit,
    ) -> "Single":
        """Return the task with the temperature of the lowest cross-entropy on validation rows."""
        if not fits_temperature:
            return self
        logits, labels = predict()
        mistakes = int(np.count_nonzero(logits.argmax(axis=1) != labels))
        temperature = fit_temperature(self.losses, logits, labels, mistakes=mistakes, emit=emit)
        return replace(self, temperature=temperature)

    def read_logits(self, logits: Logits) -> Outputs:
        """Return each row's most probable class and its probability."""
        import torch

        probabilities = torch.from_numpy(logits).softmax(dim=1).numpy()
        return Outputs(logits.argmax(axis=1), probabilities, probabilities.max(axis=1))

    def baseline_predictions(self, labels: ClassNumbers) -> ClassNumbers:
        """Return the largest class."""
        return np.full_like(labels, np.bincount(labels).argmax())

    def score_classes(self, labels: ClassNumbers, outputs: Outputs) -> dict[str, ClassScores]:
        """Return the metrics of each class."""
        weights, classes = np.ones((1, len(labels))), len(self.class_names)
        counts = count_classes(labels, outputs.predicted, weights, classes=classes)
        return score_classes(self.class_names, counts)

    def confusion_matrix(self, labels: ClassNumbers, outputs: Outputs) -> list[list[int]]:
        """Return the rows of each true class by predicted class; none for very many classes."""
        classes = len(self.class_names)
        if classes > MAX_CLASSES_OF_MATRIX:
            return []
        pairs = np.bincount(labels * classes + outputs.predicted, minlength=classes**2)
        matrix: list[list[int]] = pairs.reshape(classes, classes).tolist()
        return matrix

    def confidences(
        self, logits: Logits, labels: ClassNumbers
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the probability of each row's most probable class, and whether it is right."""
        outputs = self.read_logits(logits)
        return np.asarray(outputs.confidences, np.float64), outputs.predicted == labels

    def row_errors(self, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the probability of the class that was predicted in place of the true one."""
        errors = (row["probability"] * (row["predicted"] != row["label"]) for row in rows)
        return np.fromiter(errors, np.float64, len(rows))

    @property
    def limits(self) -> Sequence[str]:
        """Sentences on what its predictions do not say."""
        return (
            "Every text gets one of the classes above, even one that belongs to none of them.",
            describe_calibration(self.temperature),
        )

    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return the mistakes of the highest probability."""
        mistakes = [row for row in rows if row["predicted"] != row["label"]]
        mistakes.sort(key=itemgetter("probability"), reverse=True)
        note = f"{len(mistakes)} of {len(rows)} test rows are misclassified"
        if len(mistakes) > MAX_MISTAKES:
            note += f"; these are the {MAX_MISTAKES} with the highest probability"
        return list_mistakes(
            "Most confident mistakes",
            ("text", "true", "predicted", "probability"),
            [
                (text_of(row), row["label"], row["predicted"], percent(row["probability"]))
                for row in mistakes
            ],
            groups=self._groups_of(mistakes),
            note=f"{note}.",
        )

    def _groups_of(self, mistakes: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Return the groups that a page can show alone: of both classes, and of the cell."""
        numbers, groups = self.class_numbers, []
        for row in mistakes:
            true, predicted = row["label"], row["predicted"]
            title = f"{true} predicted as {predicted}"
            groups.append(
                {f"cell-{numbers[true]}-{numbers[predicted]}": title}
                | {f"class-{numbers[one]}": f"mistakes with {one}" for one in (true, predicted)}
            )
        return groups


def cross_entropy(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """Return the cross-entropy of each example: of shape [examples]."""
    import torch

    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def balanced_class_weights(labels: ClassNumbers, *, classes: int) -> NDArray[np.float32]:
    """Return the weight of each class that makes all count the same: rows / (classes × its rows).

    Args:
        labels: int64 of shape [rows].
        classes: How many there are; one without rows gets weight 0.

    >>> balanced_class_weights(np.array([0, 0, 0, 1]), classes=2).tolist()
    [0.6666666865348816, 2.0]
    """
    counts = np.bincount(labels, minlength=classes)
    present = np.count_nonzero(counts)
    weights = np.divide(len(labels), present * counts, where=counts > 0, out=np.zeros(classes))
    return np.asarray(weights, np.float32)
