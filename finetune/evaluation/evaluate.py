"""Metrics from logits and the true classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.evaluation.metrics import compute_metrics


def evaluate_logits(
    logits: NDArray[np.float32], labels: NDArray[np.int64], *, class_names: Sequence[str]
) -> dict[str, Any]:
    """Return ``compute_metrics`` of the likeliest classes, and ``loss``, the mean cross-entropy.

    Args:
        logits: float32 of shape [rows, classes].
        labels: Numbers of the true classes: int64 of shape [rows].
        class_names: The classes in the order of their numbers.
    """
    metrics = compute_metrics(
        predictions=logits.argmax(axis=-1), references=labels, class_names=class_names
    )
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(labels))
    return {"loss": loss.item(), **metrics}
