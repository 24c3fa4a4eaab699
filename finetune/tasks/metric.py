"""Metrics as an ``evaluate.Metric`` of our own.

``evaluate.load("accuracy")`` fetches code from the Hub and fails offline; a class does not. This is
the only module that imports ``evaluate``, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import evaluate
import numpy as np
from datasets import Features, List, Value
from numpy.typing import NDArray

Compute = Callable[[NDArray[Any], NDArray[Any]], dict[str, Any]]


def compute_metrics(
    compute: Compute, *, predictions: NDArray[Any], references: NDArray[Any]
) -> dict[str, Any]:
    """Return what a function computes of predictions and references, through ``evaluate``.

    Raises:
        ValueError: If there are no rows.
    """
    if len(references) == 0:
        raise ValueError("there are no rows to compute metrics of")
    features = {"predictions": _type_of(predictions), "references": _type_of(references)}
    metrics: dict[str, Any] = _Metrics(compute, Features(features)).compute(
        predictions=predictions, references=references
    )
    return metrics


def _type_of(values: NDArray[Any]) -> Any:
    value = Value(str(values.dtype))
    return value if values.ndim == 1 else List(value)


class _Metrics(evaluate.Metric):  # type: ignore[misc]
    """All metrics of a kind.

    They are one metric, since evaluate copies the rows for each that it combines, which takes
    longer than to compute it.
    """

    def __init__(self, compute: Compute, features: Features) -> None:
        self._features = features
        super().__init__(keep_in_memory=True)
        self._compute_all = compute

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=self._features)

    def _build_data_dir(self) -> str:
        # evaluate 0.4.6 makes a folder in the user's cache even for metrics kept in memory.
        return ""

    def _compute(self, *, predictions: list[Any], references: list[Any]) -> dict[str, Any]:
        return self._compute_all(np.asarray(predictions), np.asarray(references))
