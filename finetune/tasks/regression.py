"""Regression: one number per text, such as a score or a price."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from finetune.config.schema import TrainingConfig
from finetune.errors import ConfigurationError, DataError
from finetune.tasks.base import Logits, Outputs, Task, scale_parameters
from finetune.tasks.labels import MISSING, NUMBER, distinct_values, has_decimal_commas
from finetune.tasks.metrics import NUMBERS

if TYPE_CHECKING:
    import torch
    from pyarrow import ChunkedArray as Column


@dataclass(frozen=True)
class Regression(Task):
    """Regression. Labels are float32 of shape [rows], in their own units.

    Models are trained on standardized labels (mean 0, standard deviation 1). Afterwards,
    ``scale_output_layer`` makes the output layer return the original units: ``is_scaled``.
    """

    name = "regression"
    problem_type = NUMBERS
    result_name = "value"
    limit = "A prediction may lie outside the range of the training rows."
    mistakes_title = "Largest errors"
    error_name = "error"

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
        distinct = {label.strip() for label in distinct_values(columns)}
        numbers = {label for label in distinct if label.casefold() not in {"", *MISSING}}
        decimal_comma = has_decimal_commas(numbers)
        return [_parse_numbers(column, numbers, decimal_comma=decimal_comma) for column in columns]

    @classmethod
    def of_labels(cls, labels: "Column", *, names: Sequence[str] | None = None) -> Self:
        return cls()

    def labels(self, column: "Column") -> NDArray[np.float32]:
        return np.asarray(column.to_numpy(), np.float32)

    def to_json(self, labels: NDArray[Any]) -> list[float]:
        values: list[float] = labels.tolist()
        return values

    def from_json(self, values: Sequence[Any]) -> NDArray[np.float64]:
        return np.array(values, np.float64)

    def describe(self, labels: NDArray[np.float32]) -> dict[str, float]:
        return {
            "lowest": float(labels.min()),
            "mean": float(labels.mean(dtype=np.float64)),
            "highest": float(labels.max()),
            "standard deviation": float(labels.std(dtype=np.float64)),
            "distinct values": float(len(np.unique(labels))),
        }

    def with_loss(self, training_labels: NDArray[np.float32], options: TrainingConfig) -> Self:
        """Return the task with the mean and standard deviation of the training labels."""
        names = ("class_weights", "loss", "label_smoothing")
        if any(getattr(options, name) != getattr(TrainingConfig, name) for name in names):
            raise ConfigurationError(
                "--class-weights, --loss and --label-smoothing only apply to classification, but "
                "this is regression",
                remedy="drop them, or add --task single",
            )
        mean = float(training_labels.mean(dtype=np.float64))
        deviation = float(training_labels.std(dtype=np.float64))
        return replace(self, mean=mean, deviation=deviation or 1.0)

    def losses(self, logits: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        """Return the squared error of each example, in squared standard deviations."""
        if self.is_scaled:
            return ((logits[:, 0] - labels) / self.deviation) ** 2
        return (logits[:, 0] - (labels - self.mean) / self.deviation) ** 2

    def sample_labels(self, count: int) -> NDArray[np.float32]:
        return np.linspace(0, 1, count, dtype=np.float32)

    def scale_output_layer(self, parameters: "Sequence[torch.nn.Parameter]") -> Self:
        """Make the output layer return values in label units."""
        scale_parameters(parameters, self.deviation, shift=self.mean)
        return replace(self, is_scaled=True)

    def unscale_output_layer(
        self, parameters: "Sequence[torch.nn.Parameter]", *, saved: Mapping[str, Any]
    ) -> None:
        if not self.is_scaled:
            scale_parameters(parameters, 1 / self.deviation, shift=-self.mean / self.deviation)

    def read_logits(self, logits: Logits) -> Outputs:
        """Return values in label units."""
        numbers = logits[:, 0].astype(np.float64)
        return Outputs(numbers if self.is_scaled else numbers * self.deviation + self.mean)

    def baseline_predictions(self, labels: NDArray[np.float32]) -> NDArray[np.float64]:
        return np.full(len(labels), self.mean)


def _parse_numbers(column: "Column", numbers: set[str], *, decimal_comma: bool) -> "Column":
    import pyarrow
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(column)
    is_filled = pc.is_in(trimmed, value_set=pyarrow.array(numbers, "string"))
    filled = pc.if_else(is_filled, trimmed, None)
    if decimal_comma:
        filled = pc.replace_substring(filled, ",", ".")
    is_number = pc.match_substring_regex(filled, f"^({NUMBER})$")
    numbers = pc.cast(pc.if_else(is_number, filled, "inf"), "float64")
    others = filled.filter(pc.greater(pc.abs(numbers), np.finfo(np.float32).max.item()))
    if len(others):
        raise DataError(
            f"the label {others[0].as_py()!r} is not a number, or is too large for fp32",
            remedy="fix it, or choose another --label-column or --task",
        )
    return numbers
