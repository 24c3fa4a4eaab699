"""One label a text: each text is of exactly one class."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit
from finetune.tasks.base import (
    Answer,
    Confidences,
    ProblemType,
    Scores,
    Task,
    WeightedMetrics,
    by_class,
    read_class_names,
)
from finetune.tasks.figures import (
    MAX_MISTAKES,
    Figure,
    Matrix,
    Table,
    choose_listed,
    percent,
    text_of,
)
from finetune.tasks.intervals import format_interval
from finetune.tasks.labels import distinct_values, map_values, name_classes, sort_classes
from finetune.tasks.resampled import count_classes, macro_f1
from finetune.tasks.temperature import fit_temperature, note_on_calibration, read_temperature

if TYPE_CHECKING:
    import pyarrow
    import torch

# The confusion matrix grows with the square of the classes: at 10,000 it would take gigabytes.
MAX_CLASSES_OF_MATRIX = 500


@dataclass(frozen=True)
class ClassScores:
    """The metrics of one class: the first three in 0..1, 0 where undefined; support in rows."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class SingleScores(Scores):
    """The metrics where each row has one class.

    Args:
        samples: Rows of the split.
        loss: Mean cross-entropy.
        accuracy: Share of the rows whose class is right, in 0..1.
        macro_f1: Mean F1 over the classes that are predicted or true, in 0..1.
        per_class: By class name.
        confusion_matrix: Rows of each true class by predicted class: [classes, classes], and empty
            with more than ``MAX_CLASSES_OF_MATRIX`` classes.
    """

    accuracy: float
    macro_f1: float
    per_class: Mapping[str, ClassScores]
    confusion_matrix: Sequence[Sequence[int]]

    @property
    def baseline_accuracy(self) -> float:
        """Accuracy of always answering with the largest class, in 0..1."""
        return max(scores.support for scores in self.per_class.values()) / self.samples

    @property
    def figures(self) -> Sequence[Figure]:
        """Accuracy and macro F1."""
        interval = format_interval(self.accuracy, self.samples)
        note = (
            f"95% interval {interval} on {self.samples} rows; largest class "
            f"{percent(self.baseline_accuracy)}"
        )
        return (
            Figure("accuracy", "accuracy", "accuracy", self.accuracy, note),
            Figure("macro_f1", "macro F1", "f1", self.macro_f1),
        )

    @property
    def table(self) -> Table:
        """The metrics of each class."""
        rows = [
            (name, percent(one.precision), percent(one.recall),
             format_interval(one.recall, one.support), percent(one.f1), str(one.support))
            for name, one in self.per_class.items()
        ]  # fmt: skip
        columns = ("class", "precision", "recall", "95% interval", "F1", "rows")
        return Table("Classes of the test split", columns, rows)

    @property
    def warning(self) -> str:
        """Says that always answering with the largest class is as good."""
        if self.accuracy > self.baseline_accuracy:
            return ""
        return (
            f"accuracy {self.accuracy:.1%} is not better than always answering with the largest "
            f"class, {self.baseline_accuracy:.1%}"
        )

    @property
    def matrix(self) -> Matrix | None:
        """The confusion matrix, unless there are too many classes."""
        if not self.confusion_matrix:
            return None
        return Matrix(list(self.per_class), self.confusion_matrix)


@dataclass(frozen=True)
class ClassAnswer(Answer):
    """The most probable class of a text.

    Args:
        label: Name of the class; None where the answer is not sure enough.
        probability: Of the most probable class, in 0..1.
        probabilities: Of all classes by name, where they were asked for.
    """

    label: str | None
    probability: float
    probabilities: Mapping[str, float] | None = None

    @property
    def result(self) -> dict[str, Any]:
        """Label and probability, and maybe those of all classes."""
        result: dict[str, Any] = {"label": self.label, "probability": self.probability}
        return result if self.probabilities is None else {
            **result, "probabilities": self.probabilities
        }  # fmt: skip


@dataclass(frozen=True)
class Single(Task):
    """One class a text; the labels are int64 of shape [rows].

    Args:
        class_names: The classes in the order of their numbers.
        class_weights: What a row of each class counts in the loss; none for 1.
    """

    name: ClassVar[str] = "single"
    problem_type: ClassVar[ProblemType] = "single_label_classification"
    metric_names: ClassVar[Sequence[str]] = ("accuracy", "macro_f1", "loss")
    scores_type: ClassVar[type[Scores]] = SingleScores
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
        """Return the task whose classes are those that occur, unless they have names."""
        return cls(names or sort_classes(labels.unique().to_pylist()))

    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return the numbers of classes."""
        return map_values(labels, self.class_numbers.get, kind="int64")

    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return the names of classes."""
        return map_values(column, self.class_names.__getitem__)

    @property
    def feature(self) -> Any:
        """A ``ClassLabel``."""
        from datasets import ClassLabel

        return ClassLabel(names=list(self.class_names))

    def labels(self, column: "pyarrow.ChunkedArray") -> NDArray[np.int64]:
        """Return the numbers of classes."""
        labels: NDArray[np.int64] = column.to_numpy()
        return labels

    def format_label(self, label: Any) -> str:
        """Return the name of a class."""
        return self.class_names[int(label)]

    def find_unknown(
        self, labels: "pyarrow.ChunkedArray", *, training: "pyarrow.ChunkedArray"
    ) -> "pyarrow.ChunkedArray":
        """Return the classes that no training row has, by name."""
        import pyarrow.compute as pc

        return pc.if_else(pc.is_in(labels, value_set=training.unique()), None, labels)

    def strata(self, labels: NDArray[np.int64]) -> NDArray[np.int64]:
        """Each class gives its share."""
        return labels

    def count_classes(self, labels: NDArray[np.int64]) -> dict[str, int]:
        """Return the rows of each class."""
        counts = np.bincount(labels, minlength=len(self.class_names))
        return dict(zip(self.class_names, counts.tolist(), strict=True))

    def first_rows(self, labels: NDArray[np.int64]) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        numbers, rows = np.unique(labels, return_index=True)
        return {
            self.class_names[number]: row
            for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)
        }

    def tuned(
        self,
        validate: Callable[[], tuple[NDArray[np.float32], NDArray[np.int64]]],
        *,
        calibrates: bool,
        emit: Emit,
    ) -> "Single":
        """Return the task with the temperature of the lowest cross-entropy on validation rows."""
        if not calibrates:
            return self
        logits, labels = validate()
        wrong = int(np.count_nonzero(~self.confidences(logits, labels).is_right))
        temperature = fit_temperature(self.losses, logits, labels, wrong_answers=wrong, emit=emit)
        return replace(self, temperature=temperature)

    def fitted(self, labels: NDArray[np.int64], *, is_balanced: bool) -> "Single":
        """Return the task whose classes all count the same, if balanced."""
        if not is_balanced:
            return self
        weights = balanced_class_weights(labels, classes=len(self.class_names))
        return replace(self, class_weights=tuple(weights.tolist()))

    def example_weights(self, labels: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the weights of the examples' classes: [examples]."""
        if not self.class_weights:
            return super().example_weights(labels)
        return np.array(self.class_weights, np.float32)[labels]

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the cross-entropy of each example."""
        return cross_entropy(logits, labels)

    def score(self, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> SingleScores:
        """Compare the most probable classes with the true ones."""
        import torch

        from finetune.tasks.metric import compute_metrics

        metrics = compute_metrics(
            self._compute, predictions=logits.argmax(axis=-1), references=labels
        )
        # Copied: labels that Arrow holds are read-only, of which PyTorch warns.
        loss = self.losses(torch.tensor(logits), torch.tensor(labels)).mean()
        return SingleScores(samples=len(labels), loss=loss.item(), **metrics)

    def _compute(
        self, predictions: NDArray[np.int64], references: NDArray[np.int64]
    ) -> dict[str, Any]:
        # Each of scikit-learn's metrics checks the labels anew, which takes longer than to count.
        classes = len(self.class_names)
        count = partial(np.bincount, minlength=classes)
        is_right = references == predictions
        right, predicted, true = count(references[is_right]), count(predictions), count(references)
        f1 = 2 * right / np.maximum(predicted + true, 1)
        columns = right / np.maximum(predicted, 1), right / np.maximum(true, 1), f1, true
        scores = (ClassScores(*row) for row in zip(*map(np.ndarray.tolist, columns), strict=True))
        matrix = []
        if classes <= MAX_CLASSES_OF_MATRIX:
            pairs = np.bincount(references * classes + predictions, minlength=classes**2)
            matrix = pairs.reshape(classes, classes).tolist()
        return {
            "accuracy": float(is_right.mean()),
            "macro_f1": float(f1[predicted + true > 0].mean()),
            "per_class": dict(zip(self.class_names, scores, strict=True)),
            "confusion_matrix": matrix,
        }

    def answers(
        self, texts: Sequence[str], logits: NDArray[np.float32], *, all_scores: bool = False
    ) -> list[ClassAnswer]:
        """Return each text's most probable class, maybe with the probabilities of all."""
        import torch

        probabilities = torch.from_numpy(logits).softmax(dim=-1)
        best, labels = probabilities.max(dim=-1)
        scores = by_class(self.class_names, probabilities.numpy(), is_wanted=all_scores)
        found = zip(texts, labels.tolist(), best.tolist(), scores, strict=True)
        return [
            ClassAnswer(text, self.class_names[label], probability, own)
            for text, label, probability, own in found
        ]

    def confidences(self, logits: NDArray[np.float32], labels: NDArray[np.int64]) -> Confidences:
        """Return the probability of each row's most probable class."""
        answers = self.answers([""] * len(logits), logits)
        numbers = self.class_numbers
        predicted = np.array([numbers[answer.label or ""] for answer in answers])
        probabilities = np.array([answer.probability for answer in answers])
        return Confidences(predicted, probabilities, predicted == labels)

    def abstain(self, answers: Sequence[Answer], lowest: Mapping[str, float]) -> list[Answer]:
        """Return the answers; those below the lowest probability of their class have no label."""
        return [
            replace(answer, label=None)
            if isinstance(answer, ClassAnswer)
            and answer.label is not None
            and answer.probability < lowest[answer.label]
            else answer
            for answer in answers
        ]

    def predictions(
        self, logits: NDArray[np.float32], labels: NDArray[np.int64]
    ) -> Iterator[dict[str, Any]]:
        """Yield true class, most probable class and its probability."""
        answers = self.answers([""] * len(logits), logits)
        for answer, label in zip(answers, labels.tolist(), strict=True):
            yield {"label": self.class_names[label], "predicted": answer.label,
                   "probability": answer.probability}  # fmt: skip

    def row_errors(self, predictions: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the probability of the class that was predicted in place of the true one."""
        errors = (row["probability"] * (row["predicted"] != row["label"]) for row in predictions)
        return np.fromiter(errors, np.float64, len(predictions))

    def weighted_metrics(self, predictions: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return what computes accuracy and macro F1."""
        numbers = self.class_numbers
        true, predicted = (
            np.array([numbers[row[column]] for row in predictions], np.int64)
            for column in ("label", "predicted")
        )
        is_right = true == predicted

        def compute(weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
            count = partial(count_classes, classes=len(numbers))
            right = count(weights[:, is_right], true[is_right])
            answers = count(weights, true) + count(weights, predicted)
            accuracy = right.sum(axis=1) / weights.sum(axis=1)
            return {"accuracy": accuracy, "macro_f1": macro_f1(right, answers)}

        return compute

    @property
    def limits(self) -> Sequence[str]:
        """Sentences on what its answers do not say."""
        return (
            "Every text gets one of the classes above, even one that belongs to none of them.",
            note_on_calibration(self.temperature),
        )

    def mistakes(self, predictions: Sequence[Mapping[str, Any]]) -> Table:
        """Return the mistakes of the highest probability."""
        mistakes = [row for row in predictions if row["predicted"] != row["label"]]
        mistakes.sort(key=itemgetter("probability"), reverse=True)
        numbers = self.class_numbers
        groups = [_groups_of(row, numbers) for row in mistakes]
        listed = choose_listed(groups)
        note = f"None of the {len(predictions)} test rows is misclassified."
        if mistakes:
            note = f"{len(mistakes)} of {len(predictions)} test rows are misclassified"
            if len(mistakes) > MAX_MISTAKES:
                note += f"; these are the {MAX_MISTAKES} with the highest probability"
            note += "."
        return Table(
            "Most confident mistakes",
            ("text", "true", "predicted", "probability"),
            [
                (text_of(row), row["label"], row["predicted"], percent(row["probability"]))
                for row in map(mistakes.__getitem__, listed)
            ],
            text_columns=3,
            note=note,
            groups=[groups[number] for number in listed],
        )


def _groups_of(mistake: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, str]:
    """Return the groups that a page can show alone: of both classes, and of the cell."""
    names = mistake["label"], mistake["predicted"]
    cell = "-".join(str(numbers[name]) for name in names)
    return {
        f"cell-{cell}": "{} predicted as {}".format(*names),
        **{f"class-{numbers[name]}": f"{name} missed, or predicted wrongly" for name in names},
    }


def cross_entropy(logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    """Return the cross-entropy of each example: of shape [examples]."""
    import torch

    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def balanced_class_weights(labels: NDArray[np.int64], *, classes: int) -> NDArray[np.float32]:
    """Return a weight for each class that makes all count the same: rows / (classes × its rows).

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
