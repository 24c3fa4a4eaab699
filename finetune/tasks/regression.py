"""A number for each text, such as a score or a price."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationInvalid, DataError
from finetune.tasks.base import Answer, ProblemType, Scores, Task, WeightedMetrics
from finetune.tasks.figures import MAX_MISTAKES, Figure, Table, plain, text_of
from finetune.tasks.labels import NUMBER
from finetune.tasks.resampled import correlation, ranks

if TYPE_CHECKING:
    import pyarrow
    import torch
    from transformers import PreTrainedConfig

# So many of the rows with one number: a model that always gives it looks better than it is.
LARGE_SHARE = 0.5


@dataclass(frozen=True)
class RegressionScores(Scores):
    """The metrics where each row has a number.

    Args:
        samples: Rows of the split.
        loss: Mean squared error over the variance of the training rows.
        pearson: Linear correlation of predicted and true numbers, in -1..1; 0 if undefined.
        spearman: That of their ranks.
        mae: Mean absolute error, in the units of the numbers.
        baseline_mae: That of always answering with the mean of the training rows.
    """

    pearson: float
    spearman: float
    mae: float
    baseline_mae: float

    @property
    def figures(self) -> Sequence[Figure]:
        """The correlations and the mean absolute error."""
        note = f"{self.samples} rows; always the mean: {plain(self.baseline_mae)}"
        return (
            Figure("pearson", "Pearson", "pearsonr", self.pearson, is_share=False),
            Figure("spearman", "Spearman", "spearmanr", self.spearman, is_share=False),
            Figure("mae", "mean absolute error", "mae", self.mae, note, False, has_curve=False),
        )

    @property
    def table(self) -> None:
        """There are no classes."""
        return

    @property
    def warning(self) -> str:
        """Says that always answering with the mean is as good."""
        if self.mae < self.baseline_mae:
            return ""
        return (
            f"a mean absolute error of {plain(self.mae)} is not better than always answering with "
            f"the mean of the training rows, {plain(self.baseline_mae)}"
        )


@dataclass(frozen=True)
class NumberAnswer(Answer):
    """The number of a text, in the units of the training rows."""

    value: float

    @property
    def result(self) -> dict[str, Any]:
        """The number."""
        return {"value": self.value}


@dataclass(frozen=True)
class Regression(Task):
    """A number for each text; the labels are float32 of shape [rows], in their own units.

    A model learns them with the mean 0 and the standard deviation 1. When it has, ``fold`` makes
    its last layer give the units themselves, so that whoever loads it needs neither.

    Args:
        class_names: None.
        mean: Of the training rows.
        deviation: Their standard deviation.
        is_folded: Whether the logits are in the units of the labels.
    """

    name: ClassVar[str] = "regression"
    problem_type: ClassVar[ProblemType] = "regression"
    metric_names: ClassVar[Sequence[str]] = ("pearson", "spearman", "mae", "loss")
    lower_is_better: ClassVar[frozenset[str]] = frozenset({"mae", "loss"})
    scores_type: ClassVar[type[Scores]] = RegressionScores
    has_right_answers: ClassVar[bool] = False

    mean: float = 0.0
    deviation: float = 1.0
    is_folded: bool = False

    @property
    def output_names(self) -> Sequence[str]:
        """The name that transformers gives a single output."""
        return ["LABEL_0"]

    @property
    def parameters(self) -> dict[str, Any]:
        """What the loss is relative to."""
        return {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> "Regression":
        """Return the task of a model's ``config.json``; a saved model gives units."""
        return cls(mean=parameters["mean"], deviation=parameters["deviation"], is_folded=True)

    def has_outputs_of(self, config: "PreTrainedConfig") -> bool:
        """Return whether a pretrained head gives one number."""
        return bool(config.num_labels == 1)

    @classmethod
    def parse(cls, columns: Sequence["pyarrow.ChunkedArray"]) -> "list[pyarrow.ChunkedArray]":
        """Return numbers, null for an empty text."""
        return [cls._parse_column(column) for column in columns]

    @classmethod
    def _parse_column(cls, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        import pyarrow.compute as pc

        trimmed = pc.utf8_trim_whitespace(column)
        filled = pc.if_else(pc.equal(trimmed, ""), None, trimmed)
        is_number = pc.match_substring_regex(filled, f"^({NUMBER})$")
        numbers = pc.cast(pc.if_else(is_number, filled, "inf"), "float64")
        others = filled.filter(pc.greater(pc.abs(numbers), np.finfo(np.float32).max.item()))
        if len(others):
            raise DataError(
                f"the label {others[0].as_py()!r} is no number, or too large for fp32, and the "
                f"task is {cls.name}",
                remedy="correct it, name another --label-column, or choose another --task",
            )
        return numbers

    @classmethod
    def of_labels(
        cls, labels: "pyarrow.ChunkedArray", *, names: Sequence[str] | None = None
    ) -> "Regression":
        """Return a task that is yet to be fitted."""
        return cls()

    def encode(self, labels: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return the numbers."""
        return labels

    def decode(self, column: "pyarrow.ChunkedArray") -> "pyarrow.ChunkedArray":
        """Return the numbers."""
        return column

    @property
    def feature(self) -> Any:
        """A float64."""
        from datasets import Value

        return Value("float64")

    def labels(self, column: "pyarrow.ChunkedArray") -> NDArray[np.float32]:
        """Return the numbers."""
        return np.asarray(column.to_numpy(), np.float32)

    def format_label(self, label: Any) -> str:
        """Return a number."""
        return f"{label:g}"

    @property
    def label_kinds(self) -> str:
        """That there are no classes."""
        return "a number each"

    def describe(self, labels: NDArray[np.float32]) -> dict[str, float]:
        """Return where the numbers lie."""
        return {
            "lowest": float(labels.min()),
            "mean": float(labels.mean(dtype=np.float64)),
            "highest": float(labels.max()),
            "standard deviation": float(labels.std(dtype=np.float64)),
            "different numbers": float(len(np.unique(labels))),
        }

    def find_oddities(self, labels: NDArray[np.float32]) -> Iterator[tuple[str, str]]:
        """Yield a number that most of the rows have."""
        numbers, counts = np.unique(labels, return_counts=True)
        share = counts.max() / len(labels)
        if share >= LARGE_SHARE:
            found = f"{share:.0%} of the training rows have the number {numbers[counts.argmax()]:g}"
            yield found, "look whether it stands for a missing one"

    def fitted(self, labels: NDArray[np.float32], *, is_balanced: bool) -> "Regression":
        """Return the task with mean and standard deviation of the training rows."""
        if is_balanced:
            raise ConfigurationInvalid(
                "--class-weights balanced is for classes, and the labels are numbers",
                remedy="leave it out, or add --task single",
            )
        mean, deviation = labels.mean(dtype=np.float64), labels.std(dtype=np.float64)
        return replace(self, mean=float(mean), deviation=float(deviation) or 1.0)

    def fold(self, parameters: "Sequence[torch.nn.Parameter]") -> "Regression":
        """Make the last layer give units instead of standard deviations from the mean."""
        import torch

        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(self.deviation)
                if parameter.ndim == 1:
                    parameter.add_(self.mean)
        return replace(self, is_folded=True)

    def unfold(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        """Undo ``fold``, for a pretrained head that trains on."""
        if self.is_folded:
            return
        import torch

        with torch.no_grad():
            for parameter in parameters:
                if parameter.ndim == 1:
                    parameter.sub_(self.mean)
                parameter.div_(self.deviation)

    def sample_labels(self, count: int) -> NDArray[np.float32]:
        """Return different numbers."""
        return np.linspace(0, 1, count, dtype=np.float32)

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the squared error of each example, in squared standard deviations."""
        return (logits[:, 0] - (labels - self.mean) / self.deviation) ** 2

    def _numbers(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        outputs = logits[:, 0].astype(np.float64)
        return outputs if self.is_folded else outputs * self.deviation + self.mean

    def score(self, logits: NDArray[np.float32], labels: NDArray[np.float32]) -> RegressionScores:
        """Compare numbers with the true ones."""
        from finetune.tasks.metric import compute_metrics

        metrics = compute_metrics(
            self._compute, predictions=self._numbers(logits), references=labels
        )
        return RegressionScores(samples=len(labels), **metrics)

    def _compute(
        self, predictions: NDArray[np.float64], references: NDArray[np.float32]
    ) -> dict[str, float]:
        from scipy.stats import rankdata

        errors = predictions - references
        return {
            "loss": float(np.mean((errors / self.deviation) ** 2)),
            "pearson": _correlation(predictions, references),
            "spearman": _correlation(rankdata(predictions), rankdata(references)),
            "mae": float(np.abs(errors).mean()),
            "baseline_mae": float(np.abs(references - self.mean).mean()),
        }

    def answers(
        self, texts: Sequence[str], logits: NDArray[np.float32], *, all_scores: bool = False
    ) -> list[NumberAnswer]:
        """Return each text's number."""
        numbers = self._numbers(logits).tolist()
        return [NumberAnswer(text, value) for text, value in zip(texts, numbers, strict=True)]

    def predictions(
        self, logits: NDArray[np.float32], labels: NDArray[np.float32]
    ) -> Iterator[dict[str, Any]]:
        """Yield true and predicted numbers."""
        for true, own in zip(labels.tolist(), self._numbers(logits).tolist(), strict=True):
            yield {"label": true, "predicted": own}

    def row_errors(self, predictions: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
        """Return the distance of each predicted number from the true one."""
        true, predicted = _columns(predictions)
        return np.abs(predicted - true)

    def weighted_metrics(self, predictions: Sequence[Mapping[str, Any]]) -> WeightedMetrics:
        """Return what computes the correlations and the mean absolute error."""
        true, predicted = _columns(predictions)
        errors = np.abs(predicted - true)

        def compute(weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
            ranked = ranks(weights, true), ranks(weights, predicted)
            return {
                "pearson": correlation(weights, true, predicted),
                "spearman": correlation(weights, *ranked),
                "mae": weights @ errors / weights.sum(axis=1),
            }

        return compute

    def description(self, subject: str) -> str:
        """Return that it gives numbers."""
        return f"A regression model of {subject}"

    @property
    def limits(self) -> Sequence[str]:
        """Sentences on what its answers do not say."""
        return ("A number may lie beyond those of the training rows.",)

    def mistakes(self, predictions: Sequence[Mapping[str, Any]]) -> Table:
        """Return the largest errors."""
        shown = nlargest(
            MAX_MISTAKES, predictions, key=lambda row: abs(row["predicted"] - row["label"])
        )
        rows = [
            (text_of(row), plain(row["label"]), plain(row["predicted"]),
             plain(row["predicted"] - row["label"], sign="+"))
            for row in shown
        ]  # fmt: skip
        return Table("Largest errors", ("text", "true", "predicted", "error"), rows)

    def points(self, predictions: Sequence[Mapping[str, Any]]) -> Sequence[tuple[float, float]]:
        """Return each row's true and predicted number."""
        return [(row["label"], row["predicted"]) for row in predictions]


def _columns(predictions: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.float64], ...]:
    """Return true and predicted numbers of rows of ``predictions.jsonl``."""
    return tuple(
        np.array([row[column] for row in predictions], np.float64)
        for column in ("label", "predicted")
    )


def _correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the linear correlation of two columns, 0 if one of them is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])
