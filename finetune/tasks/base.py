"""A task type, such as one label a text: the interface that each implements in one file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.events import Emit
from finetune.tasks.labels import find_odd_names
from finetune.tasks.metrics import METRICS, Needs, ProblemType, WeightedMetrics, compute_metrics
from finetune.tasks.scores import ClassScores, Scores
from finetune.tasks.tables import Table
from finetune.tasks.temperature import read_temperature, scale_parameters

if TYPE_CHECKING:
    import pyarrow
    import torch
    from transformers import PreTrainedConfig

Labels = NDArray[Any]
Logits = NDArray[np.float32]
# What makes all classes count the same in the loss.
BALANCE_CLASSES = "--class-weights balanced"
# The pipeline of transformers that a saved model is for.
PIPELINE = "text-classification"


@dataclass(frozen=True)
class Prediction:
    """What a model says of a text: each value is an attribute too, such as ``label``.

    Args:
        text: The text.
        values: ``label`` and its ``probability``, ``labels``, or ``value``. The label is None
            where the model abstains.
        probabilities: Of each class by name, if they were asked for.
        columns: The other columns of the text's row by name.
        text_pair: The second text of a pair.
    """

    text: str
    values: Mapping[str, Any]
    probabilities: Mapping[str, float] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    text_pair: str | None = field(default=None, kw_only=True)

    def __getattr__(self, name: str) -> Any:
        """Return one of the values, such as ``label``."""
        values = self.__dict__.get("values", {})
        if name not in values:
            raise AttributeError(f"this prediction has no {name!r}")
        return values[name]

    @property
    def result(self) -> dict[str, Any]:
        """All that the model says, by name."""
        given = {} if self.probabilities is None else {"probabilities": self.probabilities}
        return {**self.values, **given}

    @property
    def texts(self) -> dict[str, str]:
        """The text, or those of a pair, by name."""
        pair = {} if self.text_pair is None else {"text_pair": self.text_pair}
        return {"text": self.text, **pair}

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune predict --json`` prints."""
        own = {**self.texts, **self.result}
        return own | self.columns_beside(own)

    def columns_beside(self, taken: Collection[str]) -> dict[str, Any]:
        """Return the row's other columns; a name that is taken gets the prefix ``input_``."""
        columns: dict[str, Any] = {}
        for name, value in self.columns.items():
            while name in taken or name in columns:
                name = f"input_{name}"
            columns[name] = value
        return columns


@dataclass(frozen=True)
class Outputs:
    """What logits say of each row.

    Args:
        predicted: Class numbers [rows], yes or no for each class [rows, classes], or numbers.
        probabilities: Of each class, [rows, classes]; None where labels are numbers.
        confidences: The probability of the predicted class, [rows], where there is exactly one.
    """

    predicted: NDArray[Any]
    probabilities: NDArray[np.float32] | None = None
    confidences: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Task(ABC):
    """A task type, with the classes or numbers of one data set.

    A type is a subclass, which its ``name`` makes known to ``--task`` and to saved models. Labels
    have three forms: ``parse`` turns those of files into one Arrow type, ``encode`` these into the
    column of a ``Dataset``, and ``labels`` that into an array that the loss and the metrics read.

    Args:
        class_names: The classes in the order of their numbers; none where labels are numbers.
        temperature: By which the logits of its model have been, or are to be, divided.
    """

    name: ClassVar[str]
    problem_type: ClassVar[ProblemType]
    result_name: ClassVar[str]
    """The name of a prediction in JSON."""
    can_abstain: ClassVar[bool] = False
    """Whether a text has exactly one class, with a probability."""
    is_right_or_wrong: ClassVar[bool] = True
    """Whether a prediction is either right or wrong."""

    class_names: Sequence[str] = ()
    temperature: float = field(default=1.0, kw_only=True)

    def __init_subclass__(cls) -> None:
        TASK_TYPES[cls.name] = cls

    # What is saved with a model.

    @property
    def output_names(self) -> Sequence[str]:
        """A name for each of the model's outputs."""
        return self.class_names

    @property
    def class_numbers(self) -> dict[str, int]:
        """The number of each class by its name."""
        return {name: number for number, name in enumerate(self.class_names)}

    @property
    def parameters(self) -> dict[str, Any]:
        """What else the predictions depend on, in JSON's types."""
        return {"temperature": self.temperature}

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> "Task":
        """Return the task of a model's ``config.json``, with the ``parameters`` that it had."""

    def configure(self, config: "PreTrainedConfig") -> None:
        """Write into a model's config what its users, such as a pipeline, need to read its logits.

        What transformers has no name for is in ``task_specific_params``.
        """
        config.id2label = dict(enumerate(self.output_names))
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = self.problem_type
        config.task_specific_params = {PIPELINE: {"task": self.name, **self.parameters}}

    def has_outputs_of(self, config: "PreTrainedConfig") -> bool:
        """Return whether a pretrained head already gives what this task needs."""
        return list((config.id2label or {}).values()) == list(self.output_names)

    # How labels are read.

    @classmethod
    @abstractmethod
    def parse(cls, columns: Sequence["pyarrow.ChunkedArray"]) -> "list[pyarrow.ChunkedArray]":
        """Return the labels of each file in the Arrow type of this task, null if a row has none."""

    @classmethod
    @abstractmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Task":
        """Return the task of parsed training labels, none of them null.

        Args:
            labels: As ``parse`` returns them.
            names: All classes in their order, if a file names them.
        """

    @abstractmethod
    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return parsed labels as the column of a ``Dataset``, of the type of ``feature``."""

    @abstractmethod
    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Undo ``encode``."""

    @property
    @abstractmethod
    def feature(self) -> Any:
        """The type of the column ``label`` in a ``Dataset``."""

    @abstractmethod
    def labels(self, column: "pyarrow.ChunkedArray") -> Labels:
        """Return a ``Dataset``'s labels as an array: of shape [rows, ...]."""

    def find_unknown(
        self, labels: "pyarrow.ChunkedArray", *, training: "pyarrow.ChunkedArray"
    ) -> "pyarrow.ChunkedArray":
        """Return, as text, the classes of each row that no training row has; null if none."""
        import pyarrow

        return pyarrow.chunked_array([pyarrow.nulls(len(labels), "string")])

    @abstractmethod
    def to_json(self, labels: Labels) -> list[Any]:
        """Return labels or predictions as ``predictions.jsonl`` has them: names or numbers."""

    @abstractmethod
    def from_json(self, values: Sequence[Any]) -> Labels:
        """Undo ``to_json``.

        Raises:
            KeyError: If there is a class that the task lacks.
        """

    def format_label(self, label: Any) -> str:
        """Return one of ``labels`` as people write it."""
        return str(self.to_json(np.asarray(label)[None])[0])

    # What the labels of a split are like.

    def strata(self, labels: Labels) -> NDArray[np.int64]:
        """Return the group of each row, [rows]: a split takes its fraction of every group."""
        return np.zeros(len(labels), np.int64)

    def find_constant(self, labels: Labels) -> str | None:
        """Return what all rows have in common if there is nothing to learn from them."""
        is_constant = len(labels) > 0 and bool((labels == labels[0]).all())
        return f"the label {self.format_label(labels[0])!r}" if is_constant else None

    def count_classes(self, labels: Labels) -> dict[str, int]:
        """Return the rows of each class, in the order of the classes."""
        return {}

    def first_rows(self, labels: Labels) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        return {}

    def describe(self, labels: Labels) -> dict[str, float]:
        """Return statistics of the labels, beside the rows of each class."""
        return {}

    def find_oddities(self, labels: Labels) -> Iterator[tuple[str, str]]:
        """Yield what is odd about training labels, with a suggestion."""
        yield from find_odd_names(self.class_names)

    # How a model learns them.

    @abstractmethod
    def with_training_labels(self, labels: Labels, *, is_balanced: bool) -> "Task":
        """Return the task with what its loss takes from the training labels.

        Args:
            labels: Of the training rows.
            is_balanced: Whether all classes count the same, however many rows they have.

        Raises:
            ConfigurationInvalid: If they can't be balanced.
        """

    @abstractmethod
    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the training loss of each example: fp32 of shape [examples].

        Nothing here may depend on the values of the tensors, or copy to their device after the
        first call: a step may be captured.

        Args:
            logits: fp32 of shape [examples, outputs].
            labels: As ``labels`` gives them, on the same device.
        """

    def example_weights(self, labels: Labels) -> NDArray[np.float32]:
        """Return the weight of each example in the loss: [examples]."""
        return np.ones(len(labels), np.float32)

    def sample_labels(self, count: int) -> Labels:
        """Return made-up labels as the loss reads them: [count, ...]."""
        return np.arange(count) % len(self.output_names)

    def calibrate(
        self, predict: Callable[[], tuple[Logits, Labels]], *, fits_temperature: bool, emit: Emit
    ) -> "Task":
        """Return the task with thresholds and temperature of a trained model.

        Args:
            predict: Returns logits and labels of the validation split.
            fits_temperature: Whether a temperature is wanted.
            emit: Receives the reason if there is none.
        """
        return self

    def scale_output_layer(self, parameters: "Sequence[torch.nn.Parameter]") -> "Task":
        """Change the output layer in place so that its logits are what users of the model expect.

        By default it is divided by the temperature, which calibrates the logits.

        Returns:
            The task of the model as it is saved.
        """
        scale_parameters(parameters, 1 / self.temperature)
        return self

    def unscale_output_layer(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        """Undo ``scale_output_layer`` for a saved output layer that is trained further.

        Args:
            parameters: Of the output layer.
            saved: The ``parameters`` of the task that it was saved with, as far as known.
        """
        scale_parameters(parameters, read_temperature(saved) / self.temperature)

    # How logits are read.

    @abstractmethod
    def read_logits(self, logits: Logits) -> Outputs:
        """Return what logits, [rows, outputs], say of each row."""

    def evaluation_losses(self, logits: Logits, labels: Labels) -> NDArray[np.float32]:
        """Return the loss of each row without class weights: [rows]."""
        import torch

        # Copied: labels that Arrow holds are read-only, of which PyTorch warns.
        losses = self.losses(torch.tensor(logits), torch.tensor(labels))
        return np.asarray(losses.numpy(), np.float32)

    def score(self, logits: Logits, labels: Labels) -> Scores:
        """Compare logits, [rows, outputs], with the true labels.

        Raises:
            ValueError: If there are no rows.
        """
        if not len(labels):
            raise ValueError("there are no rows to compute metrics of")
        outputs = self.read_logits(logits)
        found: dict[Needs, NDArray[Any]] = {
            "predictions": outputs.predicted, "losses": self.evaluation_losses(logits, labels)
        }  # fmt: skip
        if outputs.probabilities is not None:
            found["probabilities"] = outputs.probabilities
        metrics = compute_metrics(self.problem_type, labels, found)
        baseline, weights = self.baseline_predictions(labels), np.ones((1, len(labels)))
        return Scores(
            samples=len(labels),
            metrics={name: value.item() for name, value in metrics.items()},
            baselines={
                name: METRICS[name].compute(labels, baseline, weights).item()
                for name in metrics
                if METRICS[name].baseline
            },
            per_class=self.score_classes(labels, outputs),
            confusion_matrix=self.confusion_matrix(labels, outputs),
        )

    @abstractmethod
    def baseline_predictions(self, labels: Labels) -> NDArray[Any]:
        """Return predictions that are the same for each row, as good as that can be."""

    def score_classes(self, labels: Labels, outputs: Outputs) -> dict[str, ClassScores] | None:
        """Return the metrics of each class."""
        return None

    def confusion_matrix(self, labels: Labels, outputs: Outputs) -> list[list[int]] | None:
        """Return the rows of each true class by predicted class."""
        return None

    def predict(
        self, texts: Sequence[str], logits: Logits, *, all_scores: bool = False
    ) -> list[Prediction]:
        """Return what logits, [texts, outputs], say of each text, if asked for of each class."""
        outputs = self.read_logits(logits)
        values = [{self.result_name: one} for one in self.to_json(outputs.predicted)]
        if outputs.confidences is not None:
            for own, confidence in zip(values, outputs.confidences.tolist(), strict=True):
                own["probability"] = confidence
        found: Sequence[Mapping[str, float] | None] = [None] * len(texts)
        if all_scores and outputs.probabilities is not None:
            rows = outputs.probabilities.tolist()
            found = [dict(zip(self.class_names, row, strict=True)) for row in rows]
        return [Prediction(*one) for one in zip(texts, values, found, strict=True)]

    def prediction_rows(self, logits: Logits, labels: Labels) -> list[dict[str, Any]]:
        """Return the rows of ``predictions.jsonl``, without their texts."""
        outputs = self.read_logits(logits)
        columns = {
            "label": self.to_json(labels),
            "predicted": self.to_json(outputs.predicted),
        }
        if outputs.confidences is not None:
            columns["probability"] = outputs.confidences.tolist()
        columns["loss"] = self.evaluation_losses(logits, labels).tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def confidences(
        self, logits: Logits, labels: Labels
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return the probabilities of predictions, and whether these are right: each [predictions].

        Only where labels are classes.
        """
        raise NotImplementedError

    # How models are compared.

    def row_errors(self, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return how wrong each row of ``predictions.jsonl`` is, 0 if it is right: [rows]."""
        labels, predicted = self._read_rows(rows)
        errors = np.abs(np.asarray(labels, np.float64) - predicted)
        return errors if errors.ndim == 1 else np.asarray(errors.sum(axis=1))

    def weighted_metrics(self, rows: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return a function that computes the metrics of resampled rows of ``predictions.jsonl``.

        Raises:
            KeyError: If a row has a class that the task lacks.
        """
        labels, predicted = self._read_rows(rows)
        found: dict[Needs, NDArray[Any]] = {
            "predictions": predicted, "losses": np.array([row["loss"] for row in rows])
        }  # fmt: skip
        return partial(compute_metrics, self.problem_type, labels, found)

    def _read_rows(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Labels, Labels]:
        label, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
        return self.from_json(label), self.from_json(predicted)

    # What people read about it.

    @property
    def label_summary(self) -> str:
        """What the labels are, in a few words."""
        return f"{len(self.class_names)} classes"

    def description(self, subject: str) -> str:
        """Return what a model of this task is; the subject is ``texts`` or ``pairs of texts``."""
        return f"A classifier of {subject} with {self.label_summary}"

    @property
    @abstractmethod
    def limits(self) -> Sequence[str]:
        """Sentences on what its predictions do not say."""

    @abstractmethod
    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return the worst of the rows of ``predictions.jsonl``."""


TASK_TYPES: dict[str, type[Task]] = {}


def read_class_names(config: Mapping[str, Any]) -> list[str]:
    """Return the classes of a model's ``config.json`` in the order of their numbers."""
    names = config["id2label"]
    return [names[str(number)] for number in range(len(names))]


def score_classes(
    names: Sequence[str],
    counts: Sequence[NDArray[np.float64]],
    **others: Sequence[float],
) -> dict[str, ClassScores]:
    """Return the metrics of each class from how often it is right, predicted and true.

    Args:
        names: Of the classes.
        counts: As ``metrics.count_classes`` returns them for one resample.
        others: Other fields of ``ClassScores``, a value for each class.
    """
    right, predicted, true = (one[0] for one in counts)
    columns = {
        "precision": right / np.maximum(predicted, 1),
        "recall": right / np.maximum(true, 1),
        "f1": 2 * right / np.maximum(predicted + true, 1),
        "support": true.astype(np.int64),
        **{name: np.asarray(values) for name, values in others.items()},
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    scores = (ClassScores(**dict(zip(columns, row, strict=True))) for row in rows)
    return dict(zip(names, scores, strict=True))


def abstain(predictions: Sequence[Prediction], lowest: Mapping[str, float]) -> list[Prediction]:
    """Return predictions without a label where it is less probable than the lowest of its class.

    Args:
        predictions: Of a task that ``can_abstain``.
        lowest: The lowest probability of a prediction of each class, by name.
    """
    return [
        replace(one, values={**one.values, "label": None})
        if one.values["probability"] < lowest[one.values["label"]]
        else one
        for one in predictions
    ]
