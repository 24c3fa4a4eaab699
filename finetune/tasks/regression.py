"""A number for each text, such as a score or a price."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from finetune.errors import ConfigurationInvalid, DataError
from finetune.tasks.base import Logits, Outputs, Task, scale_parameters
from finetune.tasks.labels import NUMBER
from finetune.tasks.metrics import NUMBERS, ProblemType
from finetune.tasks.tables import MAX_MISTAKES, Table, format_number, text_of

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column

# If this fraction of rows has the same number, always predicting it looks good.
MAX_FRACTION_OF_ONE_NUMBER = 0.5


@dataclass(frozen=True)
class Regression(Task):
    """A number for each text; the labels are float32 of shape [rows], in their own units.

    A model learns them with mean 0 and standard deviation 1, those of the training rows. Afterwards
    ``scale_output_layer`` makes its output layer give the units themselves: ``is_scaled``.
    """

    name: ClassVar[str] = "regression"
    problem_type: ClassVar[ProblemType] = NUMBERS
    result_name: ClassVar[str] = "value"
    limit: ClassVar[str] = "A number may lie beyond those of the training rows."

    mean: float = 0.0
    deviation: float = 1.0
    is_scaled: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        return {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Self:
        return cls(mean=parameters["mean"], deviation=parameters["deviation"], is_scaled=True)

    @classmethod
    def parse(cls, columns: Sequence["Column"]) -> "list[Column]":
        return [_parse_numbers(column) for column in columns]

    @classmethod
    def of_labels(cls, labels: "Column", *, names: Sequence[str] | None = None) -> Self:
        return cls()

    @property
    def feature(self) -> Any:
        from datasets import Value

        return Value("float64")

    def labels(self, column: "Column") -> NDArray[np.float32]:
        return np.asarray(column.to_numpy(), np.float32)

    def to_json(self, labels: NDArray[Any]) -> list[float]:
        values: list[float] = labels.tolist()
        return values

    def from_json(self, values: Sequence[Any]) -> NDArray[np.float64]:
        return np.array(values, np.float64)

    def format_label(self, label: Any) -> str:
        return f"{label:g}"

    def describe(self, labels: NDArray[np.float32]) -> dict[str, float]:
        return {
            "lowest": float(labels.min()),
            "mean": float(labels.mean(dtype=np.float64)),
            "highest": float(labels.max()),
            "standard deviation": float(labels.std(dtype=np.float64)),
            "different numbers": float(len(np.unique(labels))),
        }

    def find_oddities(self, labels: NDArray[np.float32]) -> Iterator[tuple[str, str]]:
        """Yield the number that most rows have, if there is one."""
        numbers, counts = np.unique(labels, return_counts=True)
        fraction = counts.max() / len(labels)
        if fraction >= MAX_FRACTION_OF_ONE_NUMBER:
            number = f"the number {numbers[counts.argmax()]:g}"
            yield (
                f"{fraction:.0%} of the training rows have {number}",
                "check whether it stands for a missing one",
            )

    def with_training_labels(self, labels: NDArray[np.float32], *, is_balanced: bool) -> Self:
        """Return the task with mean and standard deviation of the training rows."""
        if is_balanced:
            raise ConfigurationInvalid(
                "--class-weights balanced is for classes, and the labels are numbers",
                remedy="leave it out, or add --task single",
            )
        mean, deviation = labels.mean(dtype=np.float64), labels.std(dtype=np.float64)
        return replace(self, mean=float(mean), deviation=float(deviation) or 1.0)

    def with_loss(self, *, focal_gamma: float, label_smoothing: float) -> Self:
        if focal_gamma or label_smoothing:
            raise ConfigurationInvalid(
                "--loss focal and --label-smoothing are for classes, and the labels are numbers",
                remedy="leave them out, or add --task single",
            )
        return self

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the squared error of each example, in squared standard deviations."""
        if self.is_scaled:
            return ((logits[:, 0] - labels) / self.deviation) ** 2
        return (logits[:, 0] - (labels - self.mean) / self.deviation) ** 2

    def sample_labels(self, count: int) -> NDArray[np.float32]:
        return np.linspace(0, 1, count, dtype=np.float32)

    def scale_output_layer(self, parameters: "Sequence[torch.nn.Parameter]") -> Self:
        """Make the output layer give units instead of standard deviations from the mean."""
        scale_parameters(parameters, self.deviation, shift=self.mean)
        return replace(self, is_scaled=True)

    def unscale_output_layer(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        if not self.is_scaled:
            scale_parameters(parameters, 1 / self.deviation, shift=-self.mean / self.deviation)

    def read_logits(self, logits: Logits) -> Outputs:
        """Return numbers in the units of the labels."""
        numbers = logits[:, 0].astype(np.float64)
        return Outputs(numbers if self.is_scaled else numbers * self.deviation + self.mean)

    def baseline_predictions(self, labels: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.full(len(labels), self.mean)

    @property
    def label_summary(self) -> str:
        return "a number each"

    def mistakes(self, rows: Sequence[Mapping[str, Any]]) -> Table:
        errors = [(row["predicted"] - row["label"], row) for row in rows]
        errors.sort(key=lambda one: abs(one[0]), reverse=True)
        cells = [
            (text_of(row), format_number(row["label"]), format_number(row["predicted"]),
             format_number(error, sign="+"))
            for error, row in errors[:MAX_MISTAKES]
        ]  # fmt: skip
        return Table("Largest errors", ("text", "true", "predicted", "error"), cells)


def _parse_numbers(column: "Column") -> "Column":
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(column)
    filled = pc.if_else(pc.equal(trimmed, ""), None, trimmed)
    is_number = pc.match_substring_regex(filled, f"^({NUMBER})$")
    numbers = pc.cast(pc.if_else(is_number, filled, "inf"), "float64")
    others = filled.filter(pc.greater(pc.abs(numbers), np.finfo(np.float32).max.item()))
    if len(others):
        raise DataError(
            f"the label {others[0].as_py()!r} is no number, or too large for fp32, and the "
            f"task is {Regression.name}",
            remedy="correct it, name another --label-column, or choose another --task",
        )
    return numbers
