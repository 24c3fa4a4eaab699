"""The interface of task types, such as single-label. Each type is one module."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import TrainingConfig
from finetune.tasks.explanation import Explanation, MarkedText
from finetune.tasks.labels import flat_values, map_values, sort_classes
from finetune.tasks.metrics import (
    METRICS,
    MULTI,
    NUMBERS,
    Array,
    Metric,
    Needs,
    ProblemType,
    WeightedMetrics,
    compute_metrics,
    user_metrics,
)
from finetune.tasks.scores import Scores
from finetune.tasks.tables import (
    MAX_LISTED,
    MAX_MISTAKES,
    DisplayMixin,
    Table,
    format_number,
    format_value,
    percent,
    text_of,
)

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column
    from transformers import PreTrainedConfig

T = TypeVar("T")
Labels = NDArray[Any]
Logits = NDArray[np.float32]
Predict = Callable[[], tuple[Logits, Labels]]
# The transformers pipeline for saved models.
PIPELINE = "text-classification"
# A temperature fitted on n rows costs 1 / 2n nats per row: with 100 rows, most models gain more.
# With hardly any mistakes, the temperature would be near 0 (tests/tasks/test_base).
MIN_ROWS = 100
MIN_MISTAKES = 5
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


@dataclass(frozen=True, repr=False)
class Prediction(DisplayMixin):
    """The prediction for a text. Each value, such as ``label``, is also an attribute.

    The label is None if the model abstains or the text is missing. ``explanation`` lists the words
    that decided. ``columns`` is the row of a table from which the text comes.
    """

    text: str
    values: Mapping[str, Any]
    probabilities: Mapping[str, float | None] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    text_pair: str | None = field(default=None, kw_only=True)
    explanation: Explanation | None = field(default=None, kw_only=True)

    def __getattr__(self, name: str) -> Any:
        if name not in vars(self).get("values", {}):
            raise AttributeError(f"this prediction has no {name!r}")
        return self.values[name]

    @property
    def result(self) -> dict[str, Any]:
        """All predicted values by name."""
        result = {**self.values}
        if self.probabilities is not None:
            result["probabilities"] = self.probabilities
        if self.explanation is not None:
            result["explanation"] = [change.to_json() for change in self.explanation]
        return result

    @property
    def texts(self) -> dict[str, str]:
        """The text, or both texts of a pair, by name."""
        pair = {} if self.text_pair is None else {"text_pair": self.text_pair}
        return {"text": self.text, **pair}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``finetune predict``."""
        row = self.columns or self.texts
        return {**row, **rename_taken(self.result, row)}

    def records(self) -> list[dict[str, Any]]:
        """Return the values, followed by the text or the columns of its row."""
        row = self.columns or self.texts
        return [{**rename_taken(self.result, row), **row}]


def rename_taken(values: Mapping[str, T], column_names: Collection[str]) -> dict[str, T]:
    """Add the prefix ``predicted_`` to values whose name is also a column name.

    Names are case-insensitive, because Excel rejects tables with columns ``Label`` and ``label``.
    """
    renamed, taken = {}, {name.casefold() for name in column_names}
    for name, value in values.items():
        while name.casefold() in taken:
            name = f"predicted_{name}"
        renamed[name] = value
    return renamed


class Predictions(DisplayMixin, list[Prediction]):
    """The predictions for texts, in order."""

    def records(self) -> list[dict[str, Any]]:
        """Return one row per text."""
        return [row for prediction in self for row in prediction.records()]


class Outputs(NamedTuple):
    """Predictions for each row. Fields that the task doesn't have are None."""

    # Class numbers [rows], booleans [rows, classes], or regression values [rows].
    predicted: NDArray[Any]
    probabilities: NDArray[np.float32] | None = None  # [rows, classes]


@dataclass(frozen=True)
class Task(ABC):
    """A task type with the classes of one dataset or, for regression, the range of values.

    A subclass registers under its ``name``, which ``--task`` and saved models use. Labels have
    three forms. ``parse`` turns labels from files into one Arrow type, ``encode`` turns these into
    the column of a split, and ``labels`` turns the column into an array for the loss and the
    metrics. Logits are divided by the temperature, by the model or here.
    """

    name: ClassVar[str]
    problem_type: ClassVar[ProblemType]
    result_name: ClassVar[str]  # name of a prediction in JSON
    can_abstain: ClassVar[bool] = False  # whether a text has exactly one class, with a probability
    limit: ClassVar[str]  # a sentence for the model card about limits of the predictions
    mistakes_title: ClassVar[str]
    error_name: ClassVar[str]  # what ``row_errors`` are

    class_names: Sequence[str] = ()
    temperature: float = field(default=1.0, kw_only=True)
    class_weights: tuple[float, ...] = field(default=(), kw_only=True)
    options: TrainingConfig = field(default=TrainingConfig(), kw_only=True)  # of the loss

    def __init_subclass__(cls) -> None:
        TASK_TYPES[cls.name] = cls

    @property
    def output_names(self) -> Sequence[str]:
        """The class names. transformers calls a single output ``LABEL_0``."""
        return self.class_names or ["LABEL_0"]

    @cached_property
    def class_numbers(self) -> dict[str, int]:
        """Class numbers by class name."""
        return {name: number for number, name in enumerate(self.class_names)}

    @property
    def parameters(self) -> dict[str, Any]:
        """Prediction parameters other than weights, as JSON."""
        return {"temperature": self.temperature}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Self:
        """Restore the task from a model's ``config.json`` and its ``parameters``."""
        names = config["id2label"]
        classes = [names[str(number)] for number in range(len(names))]
        return cls(classes, temperature=parameters.get("temperature", 1.0))

    def configure(self, config: "PreTrainedConfig") -> None:
        """Write class names and parameters into the model config, for transformers pipelines."""
        config.id2label = dict(enumerate(self.output_names))
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = self.problem_type
        config.task_specific_params = {PIPELINE: {"task": self.name, **self.parameters}}

    @classmethod
    @abstractmethod
    def parse(cls, columns: Sequence["Column"]) -> "list[Column]":
        """Parse the labels of each file into the task's Arrow type. Unlabeled rows are null."""

    @classmethod
    def of_labels(cls, labels: "Column", *, names: Sequence[str] | None = None) -> Self:
        """Create the task for parsed training labels, with class names from a file, if any."""
        return cls(names or sort_classes(flat_values(labels).unique().to_pylist()))

    def encode(self, labels: "Column") -> "Column":
        """Convert parsed labels to the column of a split: class numbers or values."""
        if self.problem_type == NUMBERS:
            return labels
        return map_values(labels, self.class_numbers.get, arrow_type="int64")

    def decode(self, column: "Column") -> "Column":
        """Undo ``encode``."""
        return map_values(column, self.class_names.__getitem__) if self.class_names else column

    @abstractmethod
    def labels(self, column: "Column") -> Labels:
        """Return the labels of a split as an array of shape [rows, ...]."""

    def find_unknown(self, labels: "Column", *, training: "Column") -> "Column":
        """Return, as text, the classes of each row that never occur in training. Null if none."""
        import pyarrow

        if not self.class_names:
            return pyarrow.chunked_array([pyarrow.nulls(len(labels), "string")])
        known = {*flat_values(training).unique().to_pylist()}
        unknown = map_values(labels, lambda name: None if name in known else name)
        if self.problem_type != MULTI:
            return unknown
        rows = (", ".join(filter(None, row)) or None for row in unknown.to_pylist())
        return pyarrow.chunked_array([pyarrow.array(rows, "string")])

    @abstractmethod
    def to_json(self, labels: Labels) -> list[Any]:
        """Convert labels or predictions to class names or values."""

    @abstractmethod
    def from_json(self, values: Sequence[Any]) -> Labels:
        """Undo ``to_json``. Raise KeyError for an unknown class."""

    def format_label(self, label: Any) -> str:
        """Format an item of ``labels`` as text."""
        return format_value(self.to_json(np.asarray(label)[None])[0])

    def class_rows(self, labels: Labels) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row number and class number of each label, in row order."""
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def strata(self, labels: Labels) -> NDArray[np.int64]:
        """Return the rarest class of each row, for stratified splits: [rows]."""
        rows, numbers = self.class_rows(labels)
        # If a row has several classes, the rarest is written last and wins.
        order = np.lexsort((numbers, np.bincount(numbers)[numbers]))[::-1]
        strata = np.full(len(labels), len(self.class_names), np.int64)
        strata[rows[order]] = numbers[order]
        return strata

    def count_classes(self, labels: Labels) -> dict[str, int]:
        """Return the number of rows per class, in class order."""
        _, numbers = self.class_rows(labels)
        counts = np.bincount(numbers, minlength=len(self.class_names)).tolist()
        return dict(zip(self.class_names, counts, strict=True))

    def first_rows(self, labels: Labels) -> dict[str, int]:
        """Return the first row of each class, without empty classes."""
        rows, numbers = self.class_rows(labels)
        _, places = np.unique(numbers, return_index=True)
        return {self.class_names[numbers[place]]: int(rows[place]) for place in places}

    def describe(self, labels: Labels) -> dict[str, float]:
        """Return label statistics other than the rows per class."""
        return {}

    def with_loss(self, training_labels: Labels, options: TrainingConfig) -> Self:
        """Return the task with its loss options."""
        is_balanced = options.class_weights == "balanced"
        weights = tuple(self.balance(training_labels).tolist()) if is_balanced else ()
        return replace(self, class_weights=weights, options=options)

    def balance(self, labels: Labels) -> NDArray[np.float64]:
        """Return class weights that balance the classes in the loss: [classes]."""
        return np.ones(len(self.class_names))

    @abstractmethod
    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Compute the training loss, [examples], of fp32 logits, [examples, outputs].

        A CUDA graph may capture this: don't read values of tensors, and don't copy from the CPU
        after the first call.
        """

    def example_weights(self, labels: Labels) -> NDArray[np.float32]:
        """Return the weight of each example in the loss: [examples]."""
        return np.ones(len(labels), np.float32)

    def sample_labels(self, count: int) -> Labels:
        """Return random labels for the loss: [count, ...]."""
        return np.arange(count) % len(self.output_names)

    def calibrate(self, predict: Predict, *, fits_temperature: bool) -> Self:
        """Choose thresholds and temperature on the validation rows.

        The temperature has the lowest mean loss: Guo et al., ICML 2017 (arXiv 1706.04599).
        """
        if not (fits_temperature and self.class_names):
            return self
        logits, labels = predict()
        mistakes = np.count_nonzero(self.read_logits(logits).predicted != labels)
        if len(labels) < MIN_ROWS or mistakes < MIN_MISTAKES:
            return self
        import torch
        from scipy.optimize import minimize_scalar

        outputs, true = torch.tensor(logits, dtype=torch.float64), torch.tensor(labels)

        def mean_loss(log_temperature: float) -> float:
            return self.plain_losses(outputs / np.exp(log_temperature), true).mean().item()

        # The loss is convex in 1 / temperature, so it has one minimum.
        bounds = np.log([MIN_TEMPERATURE, MAX_TEMPERATURE])
        optimum = minimize_scalar(mean_loss, bounds=bounds, options={"xatol": 1e-4})
        return replace(self, temperature=float(np.exp(optimum.x)))

    def scale_output_layer(self, parameters: "Sequence[torch.nn.Parameter]") -> Self:
        """Scale the output layer, by default by the temperature. Return the task to save."""
        scale_parameters(parameters, 1 / self.temperature)
        return self

    def unscale_output_layer(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        """Undo ``scale_output_layer`` of a task with ``saved`` parameters, to continue training."""
        scale_parameters(parameters, saved.get("temperature", 1.0) / self.temperature)

    @abstractmethod
    def read_logits(self, logits: Logits) -> Outputs:
        """Decode logits, [rows, outputs], into predictions."""

    @abstractmethod
    def baseline_predictions(self, labels: Labels) -> NDArray[Any]:
        """Return the best constant prediction for every row."""

    def class_columns(self, labels: Labels, outputs: Outputs) -> Sequence[NDArray[Any]]:
        """Return the last fields of ``ClassScores``, each [classes]."""
        return ()

    def plain_losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Compute the loss of each row, without weights and training options: [rows]."""
        return replace(self, class_weights=(), options=TrainingConfig()).losses(logits, labels)

    def evaluation_losses(self, logits: Logits, labels: Labels) -> NDArray[np.float32]:
        """Compute the loss of each row that results report: [rows]."""
        import torch

        # Copy, because PyTorch warns about read-only Arrow arrays.
        losses = self.plain_losses(torch.tensor(logits), torch.tensor(labels))
        return np.asarray(losses.numpy(), np.float32)

    def score(self, logits: Logits, labels: Labels, *, others: Sequence[Metric] = ()) -> Scores:
        """Score logits, [rows, outputs], against the true labels of at least one row."""
        losses, outputs = self.evaluation_losses(logits, labels), self.read_logits(logits)
        scores = self.score_outputs(outputs, losses, labels, others=others)
        if user := user_metrics():
            # Regression values are in label units.
            predictions = logits if self.class_names else outputs.predicted
            scores.metrics.update(user.compute(predictions, labels, known=scores.metrics))
        return scores

    def score_outputs(
        self, outputs: Outputs, losses: Array, labels: Labels, *, others: Sequence[Metric] = ()
    ) -> Scores:
        """Score predictions and the loss of each row against the true labels."""
        weights = np.ones(len(labels))
        needed: dict[Needs, NDArray[Any] | None] = {
            "predictions": outputs.predicted,
            "probabilities": outputs.probabilities,
            "losses": losses,
        }
        metrics = compute_metrics(self.problem_type, labels, needed, weights)
        for metric in others:
            metrics[metric.name] = float(metric.compute(labels, outputs.predicted, weights))
        baseline = self.baseline_predictions(labels)
        baselines = {
            name: float(METRICS[name].compute(labels, baseline, weights))
            for name in metrics
            if METRICS[name].baseline
        }
        scores = Scores(len(labels), metrics, baselines)
        if not self.class_names:
            return scores
        more = self.class_columns(labels, outputs)
        return scores.with_classes(self.class_names, labels, outputs.predicted, *more)

    def predict(
        self, texts: Sequence[str], logits: Logits, *, all_scores: bool = False
    ) -> list[Prediction]:
        """Return the prediction for each text from logits, [texts, outputs]."""
        outputs = self.read_logits(logits)
        values = _rows_of(self._columns_of(outputs, self.result_name))
        probabilities: Sequence[Mapping[str, float] | None] = [None] * len(texts)
        if all_scores and outputs.probabilities is not None:
            columns = outputs.probabilities.T.tolist()
            probabilities = _rows_of(dict(zip(self.class_names, columns, strict=True)))
        return [Prediction(*row) for row in zip(texts, values, probabilities, strict=True)]

    def prediction_rows(
        self, logits: Logits, labels: Labels, *, all_scores: bool = False
    ) -> list[dict[str, Any]]:
        """Return the rows of ``predictions.jsonl``, without their texts."""
        outputs = self.read_logits(logits)
        columns = {"label": self.to_json(labels)} | self._columns_of(outputs, "predicted")
        columns["loss"] = self.evaluation_losses(logits, labels).tolist()
        if all_scores and outputs.probabilities is not None:
            # With a thousand classes, nearly all probabilities are 0.
            rounded = outputs.probabilities.astype(np.float64).round(6)
            columns["probabilities"] = [
                {self.class_names[number]: row[number] for number in np.flatnonzero(row).tolist()}
                for row in rounded
            ]
        return _rows_of(columns)

    def _columns_of(self, outputs: Outputs, name: str) -> dict[str, list[Any]]:
        columns = {name: self.to_json(outputs.predicted)}
        if self.can_abstain and outputs.probabilities is not None:
            columns["probability"] = outputs.probabilities.max(axis=1).tolist()
        return columns

    def confidences(
        self, logits: Logits, labels: Labels
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return probabilities of the predicted class or of each class, and which are correct."""
        outputs = self.read_logits(logits)
        assert outputs.probabilities is not None, "regression has no probabilities"
        if self.can_abstain:
            return outputs.probabilities.max(axis=1), outputs.predicted == labels
        return outputs.probabilities.ravel(), labels.ravel() > 0

    def row_errors(self, rows: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the error of each row of ``predictions.jsonl``, 0 if correct: [rows]."""
        labels, predicted = self._read_rows(rows)
        errors = np.abs(np.asarray(labels, np.float64) - predicted)
        return errors if errors.ndim == 1 else np.asarray(errors.sum(axis=1))

    def weighted_metrics(self, rows: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return a function that computes metrics on resampled rows of ``predictions.jsonl``."""
        labels, predicted = self._read_rows(rows)
        losses = np.array([row["loss"] for row in rows])
        needed: dict[Needs, NDArray[Any]] = {"predictions": predicted, "losses": losses}
        return partial(compute_metrics, self.problem_type, labels, needed)

    def _read_rows(self, rows: Sequence[Mapping[str, Any]]) -> tuple[Labels, Labels]:
        label, predicted = ([row[name] for row in rows] for name in ("label", "predicted"))
        return self.from_json(label), self.from_json(predicted)

    @property
    def label_summary(self) -> str:
        """A short description of the labels."""
        if not self.class_names:
            return "one number each"
        count = f"{len(self.class_names)} classes"
        return f"any number of {count} each" if self.problem_type == MULTI else count

    def description(self, subject: str) -> str:
        """Describe a model for this task. ``subject`` is ``texts`` or ``sentence pairs``."""
        if not self.class_names:
            return f"A regression model of {subject}"
        return f"A classifier of {subject} with {self.label_summary}"

    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        """Return the rows of ``predictions.jsonl`` with the largest errors."""
        errors, show = self.row_errors(rows), percent if self.can_abstain else format_number
        wrong = np.argsort(-errors, kind="stable")[: np.count_nonzero(errors)].tolist()
        listed = wrong[: MAX_LISTED if self.class_names else MAX_MISTAKES]
        names = [name for name in ("split", "row", "id") if rows and name in rows[0]]
        cells = [
            (*(str(row[name]) for name in names),
             MarkedText.of(text_of(row), row.get("explanation", [])),
             format_value(row["label"]), format_value(row["predicted"]), error)
            for number in listed
            for row, error in [(rows[number], show(errors[number]))]
        ]  # fmt: skip
        columns = (*names, "text", "true", "predicted", self.error_name)
        if not self.class_names:
            return Table(self.mistakes_title, columns, cells, len(names) + 1)
        note = f"{len(wrong)} of {len(rows)} test rows are misclassified"
        if len(wrong) > MAX_MISTAKES:
            note += f"; these are the {MAX_MISTAKES} worst"
        if any("explanation" in rows[number] for number in listed):
            note += ". Without a marked word, the probability falls by at least 5 points"
        groups = [self.mistake_groups(rows[number]) for number in listed]
        return Table(self.mistakes_title, columns, cells, len(names) + 3, f"{note}.", groups)

    def mistake_groups(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the titles of the groups that a mistake belongs to, by ID in ``Table.groups``."""
        true, predicted = (np.atleast_1d(row[name]).tolist() for name in ("label", "predicted"))
        return {
            f"class-{self.class_numbers[name]}": f"Mistakes with {name}"
            for name in true + predicted
            if (name in true) != (name in predicted)
        }


TASK_TYPES: dict[str, type[Task]] = {}


def _rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Convert columns of equal length to rows."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def scale_parameters(
    parameters: "Sequence[torch.nn.Parameter]", factor: float, *, shift: float = 0.0
) -> None:
    """Multiply weight and bias of the output layer in place, and shift the bias."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)
            if parameter.ndim == 1:
                parameter.add_(shift)


def abstain(predictions: Sequence[Prediction], lowest: Mapping[str, float]) -> list[Prediction]:
    """Replace labels with a probability below the threshold of their class by None."""
    withheld = [_withhold(prediction.values, lowest) for prediction in predictions]
    return [
        replace(prediction, values=values, explanation=_explain_kept(prediction, values))
        for prediction, values in zip(predictions, withheld, strict=True)
    ]


def _explain_kept(prediction: Prediction, values: Mapping[str, Any]) -> Explanation | None:
    """Return the explanation without withheld classes."""
    explanation, kept = prediction.explanation, values.get("label", values.get("labels"))
    if explanation is None or kept is None:
        return explanation and Explanation.of(explanation.text, [])
    changes = (change for change in explanation if change.label is None or change.label in kept)
    return Explanation.of(explanation.text, changes)


def _withhold(values: Mapping[str, Any], lowest: Mapping[str, float]) -> Mapping[str, Any]:
    match values:
        case {"label": str(label), "probability": probability} if probability < lowest[label]:
            return {**values, "label": None}
        case {"labels": list(labels), "label_probabilities": probabilities} if labels:
            pairs = zip(labels, probabilities, strict=True)
            kept = {name: probability for name, probability in pairs if probability >= lowest[name]}
            return {**values, "labels": [*kept] or None, "label_probabilities": [*kept.values()]}
    return values
