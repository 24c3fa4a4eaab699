"""What a kind of text classification is: the interface that each kind implements in one file."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationInvalid
from finetune.events import Emit, WarningMessage
from finetune.tasks.figures import Figure, Matrix, Table
from finetune.tasks.labels import find_odd_names
from finetune.tasks.temperature import read_temperature, scale_parameters

if TYPE_CHECKING:
    import pyarrow
    import torch
    from transformers import PreTrainedConfig

Labels = NDArray[Any]
# Metrics by name, [resamples], of how often each row counts: [resamples, rows].
WeightedMetrics = Callable[[NDArray[np.float64]], dict[str, NDArray[np.float64]]]
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
# What makes all classes count the same in the loss.
BALANCE_CLASSES = "--class-weights balanced"
# The pipeline of transformers that a saved model is for.
PIPELINE = "text-classification"


@dataclass(frozen=True)
class Scores(ABC):
    """The metrics of a model on a split of ``samples`` rows; its fields are those of JSON files."""

    samples: int
    loss: float

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what only metrics of its kind have, such as ``accuracy``."""

    @property
    @abstractmethod
    def figures(self) -> Sequence[Figure]:
        """The metrics of the whole split, the most telling first."""

    @property
    @abstractmethod
    def table(self) -> Table | None:
        """The metrics of its classes."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the whole split by name, ``loss`` among them."""
        return {figure.key: figure.value for figure in self.figures} | {"loss": self.loss}

    @property
    def warning(self) -> str:
        """What a model that is no better than an answer without a model is; empty if it is."""
        return ""

    @property
    def matrix(self) -> Matrix | None:
        """The confusion matrix, where there is one."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the metrics by name, as ``finetune evaluate --json`` prints them."""
        return asdict(self)


@dataclass(frozen=True)
class Answer(ABC):
    """What a model says of a text.

    Args:
        text: The text.
        columns: The other columns of the text's row by name.
        text_pair: The second text of a pair.
    """

    text: str
    columns: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    text_pair: str | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return what only answers of its kind have, such as ``label``."""

    @property
    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The answer by name: texts, lists of texts, numbers, or numbers of each class."""

    @property
    def texts(self) -> dict[str, str]:
        """The text, or those of a pair, by name."""
        pair = {} if self.text_pair is None else {"text_pair": self.text_pair}
        return {"text": self.text, **pair}

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune predict --json`` prints."""
        answer = {**self.texts, **self.result}
        return answer | self.columns_beside(answer)

    def columns_beside(self, answer: Collection[str]) -> dict[str, Any]:
        """Return the row's other columns under names that the answer leaves.

        The true ``label`` beside a label becomes ``input_label``, which a row that was an answer
        before may have already.
        """
        columns: dict[str, Any] = {}
        for name, value in self.columns.items():
            while name in answer or name in columns:
                name = f"input_{name}"
            columns[name] = value
        return columns


@dataclass(frozen=True)
class Confidences:
    """How sure a model is of its answers, and whether they are right.

    Args:
        classes: The number of the class that each is about: int64 of shape [answers].
        probabilities: That the answer is right, as the model says, in 0..1: float64 of [answers].
        is_right: Whether it is: of shape [answers].
    """

    classes: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    is_right: NDArray[np.bool_]


@dataclass(frozen=True)
class Task(ABC):
    """A kind of text classification, with the classes or numbers of one data set.

    A kind is a subclass, which its ``name`` makes known to ``--task`` and to saved models. Labels
    pass through three forms: ``parse`` makes those of files into one Arrow type, ``encode`` these
    into the column of a ``Dataset``, and ``labels`` that into an array that the loss reads.

    Args:
        class_names: The classes in the order of their numbers; none where labels are numbers.
        temperature: By which the logits of its model have been, or are to be, divided.
    """

    name: ClassVar[str]
    problem_type: ClassVar[ProblemType]
    metric_names: ClassVar[Sequence[str]]
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"loss"})
    scores_type: ClassVar[type[Scores]]
    can_abstain: ClassVar[bool] = False
    """Whether a text has one answer, with a probability."""
    has_right_answers: ClassVar[bool] = True
    """Whether an answer is either right or wrong."""

    class_names: Sequence[str] = ()
    temperature: float = field(default=1.0, kw_only=True)

    def __init_subclass__(cls) -> None:
        KINDS[cls.name] = cls

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
        """What else the answers depend on, in JSON's types: by default the temperature."""
        return {"temperature": self.temperature}

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> "Task":
        """Return the task of a model's ``config.json``, with the ``parameters`` that it had."""

    def configure(self, config: "PreTrainedConfig") -> None:
        """Write into a model's config what its users, such as a pipeline, need to read its logits.

        What transformers has no name for stands in ``task_specific_params``.
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
        """Return the labels of each file in the type of this kind, null where a row has none."""

    @classmethod
    @abstractmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Task":
        """Return the task that parsed training labels make.

        Args:
            labels: As ``parse`` returns them, none of them null.
            names: All classes in their order, where a file names them.
        """

    @abstractmethod
    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return parsed labels as the column of a ``Dataset``, of the type of ``feature``."""

    @abstractmethod
    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return what ``encode`` was given."""

    @property
    @abstractmethod
    def feature(self) -> Any:
        """The type of the column ``label`` in a ``Dataset``."""

    @abstractmethod
    def labels(self, column: "pyarrow.ChunkedArray") -> Labels:
        """Return a ``Dataset``'s labels as the loss reads them: of shape [rows, ...]."""

    @abstractmethod
    def format_label(self, label: Any) -> str:
        """Return one of ``labels`` as people write it."""

    def find_unknown(
        self, labels: "pyarrow.ChunkedArray", *, training: "pyarrow.ChunkedArray"
    ) -> "pyarrow.ChunkedArray":
        """Return what of each row's parsed label no training row has, as text; null if nothing."""
        import pyarrow

        return pyarrow.chunked_array([pyarrow.nulls(len(labels), "string")])

    # How rows are split, and what is odd about their labels.

    def strata(self, labels: Labels) -> NDArray[np.int64]:
        """Return the group of each row; a split takes its share of every group: [rows]."""
        return np.zeros(len(labels), np.int64)

    def find_constant(self, labels: Labels) -> str | None:
        """Return what all rows have in common if nothing can be learned of them."""
        is_constant = len(labels) > 0 and bool((labels == labels[0]).all())
        return f"the label {self.format_label(labels[0])!r}" if is_constant else None

    def count_classes(self, labels: Labels) -> dict[str, int]:
        """Return the rows of each class, in the order of the classes."""
        return {}

    def first_rows(self, labels: Labels) -> dict[str, int]:
        """Return the first row of each class that has rows."""
        return {}

    def describe(self, labels: Labels) -> dict[str, float]:
        """Return figures of the labels of a split, beside the rows of each class."""
        return {}

    def find_oddities(self, labels: Labels) -> Iterator[tuple[str, str]]:
        """Yield what is odd about training labels, and what can be done: by default, odd names."""
        yield from find_odd_names(self.class_names)

    # How a model learns them.

    @abstractmethod
    def fitted(self, labels: Labels, *, is_balanced: bool) -> "Task":
        """Return the task with what its loss takes from the training rows.

        Args:
            labels: Of the training rows.
            is_balanced: Whether all classes are to count the same, however many rows they have.

        Raises:
            ConfigurationInvalid: If they are to be balanced, and this kind has no way to.
        """

    def chosen_metric(self, name: str | None) -> str:
        """Return the metric that chooses the best model, by default the first.

        Raises:
            ConfigurationInvalid: If this kind has no such metric.
        """
        if name is None:
            return self.metric_names[0]
        name = name.replace("-", "_")
        if name not in self.metric_names:
            raise ConfigurationInvalid(
                f"--task {self.name} has no metric {name!r} for --metric-for-best-model",
                remedy=f"choose one of {', '.join(self.metric_names)}",
            )
        return name

    def sign_of(self, metric: str) -> int:
        """Return 1, or -1 for a metric of which a lower value is better."""
        return -1 if metric in self.lower_is_better else 1

    def tuned(
        self,
        validate: Callable[[], tuple[NDArray[np.float32], Labels]],
        *,
        calibrates: bool,
        emit: Emit,
    ) -> "Task":
        """Return the task with what is chosen on the validation split, once a model has learned.

        Args:
            validate: Returns logits and labels of that split.
            calibrates: Whether a temperature is fitted too.
            emit: Receives the reason where none is.
        """
        return self

    def fold(self, parameters: "Sequence[torch.nn.Parameter]") -> "Task":
        """Change the last layer's parameters, in place, so that its users need not know the task.

        By default they are divided by the temperature: the logits are calibrated.

        Returns:
            The task of the model as it is saved.
        """
        scale_parameters(parameters, 1 / self.temperature)
        return self

    def unfold(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        """Undo ``fold``, in place, for a pretrained head that trains on with another task.

        Args:
            parameters: Those of the head's last layer.
            saved: The ``parameters`` of the task that the head was saved with, as far as known.
        """
        scale_parameters(parameters, read_temperature(saved) / self.temperature)

    def sample_labels(self, count: int) -> Labels:
        """Return labels as the loss reads them, of examples that are none: [count, ...].

        By default they are numbers of classes.
        """
        return np.arange(count) % len(self.output_names)

    def example_weights(self, labels: Labels) -> NDArray[np.float32]:
        """Return what each example counts in the loss, by default 1: [examples]."""
        return np.ones(len(labels), np.float32)

    @abstractmethod
    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the loss of each example, without weights: fp32 of shape [examples].

        Nothing here may depend on the values of the tensors, or copy to their device after the
        first call: a step may be captured.

        Args:
            logits: fp32 of shape [examples, outputs].
            labels: As ``labels`` gives them, on the same device.
        """

    # How its logits are read.

    @abstractmethod
    def score(self, logits: NDArray[np.float32], labels: Labels) -> Scores:
        """Compare logits, [rows, outputs], with the true labels.

        Raises:
            ValueError: If there are no rows.
        """

    @abstractmethod
    def answers(
        self, texts: Sequence[str], logits: NDArray[np.float32], *, all_scores: bool = False
    ) -> Sequence[Answer]:
        """Return what logits, [texts, outputs], say of each text, maybe of each class."""

    @abstractmethod
    def predictions(self, logits: NDArray[np.float32], labels: Labels) -> Iterator[dict[str, Any]]:
        """Yield true label and answer of each row, as ``predictions.jsonl`` has them."""

    def confidences(self, logits: NDArray[np.float32], labels: Labels) -> Confidences | None:
        """Return how sure the answers are; None where they have no probability."""
        return None

    def abstain(self, answers: Sequence[Answer], lowest: Mapping[str, float]) -> list[Answer]:
        """Return the answers, those without a label that are less sure than the lowest of a class.

        Only where ``can_abstain``.

        Args:
            answers: Of this task.
            lowest: The lowest probability of an answer of each class, by name.
        """
        raise NotImplementedError

    # How two models are compared.

    @abstractmethod
    def row_errors(self, predictions: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return how wrong each row of ``predictions.jsonl`` is, 0 where it is right: [rows]."""

    @abstractmethod
    def weighted_metrics(self, predictions: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return, of the metrics that rows of ``predictions.jsonl`` decide, what computes them.

        Raises:
            KeyError: If a row has a class that the task lacks.
        """

    # What people read about it.

    @property
    def label_kinds(self) -> str:
        """What the labels are, in a few words."""
        return f"{len(self.class_names)} classes"

    def description(self, subject: str) -> str:
        """Return what a model of this task is; the subject is ``texts`` or ``pairs of texts``."""
        return f"A classifier of {subject} with {self.label_kinds}"

    @property
    @abstractmethod
    def limits(self) -> Sequence[str]:
        """Sentences on what its answers do not say."""

    @abstractmethod
    def mistakes(self, predictions: Sequence[Mapping[str, Any]]) -> Table:
        """Return the worst of the rows of ``predictions.jsonl``."""

    def points(self, predictions: Sequence[Mapping[str, Any]]) -> Sequence[tuple[float, float]]:
        """Return each row's true and predicted number, where labels are numbers."""
        return ()


KINDS: dict[str, type[Task]] = {}


def read_class_names(config: Mapping[str, Any]) -> list[str]:
    """Return the classes of a model's ``config.json`` in the order of their numbers."""
    names = config["id2label"]
    return [names[str(number)] for number in range(len(names))]


def by_class(
    names: Sequence[str], probabilities: NDArray[np.float32], *, is_wanted: bool
) -> list[dict[str, float] | None]:
    """Return the probabilities of each row, [rows, classes], by name; None unless wanted."""
    if not is_wanted:
        return [None] * len(probabilities)
    return [dict(zip(names, row, strict=True)) for row in probabilities.tolist()]


def warn_unless_better(scores: Scores, *, emit: Emit) -> None:
    """Emit a warning where a model is no better than an answer without a model."""
    if scores.warning:
        remedy = "train longer, train more of the model, or look at finetune data check"
        emit(WarningMessage(scores.warning, remedy=remedy))
