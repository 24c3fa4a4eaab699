"""What each class counts in the loss."""

import numpy as np
from numpy.typing import NDArray


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


def example_weights(
    labels: NDArray[np.int64], *, classes: int, is_balanced: bool
) -> NDArray[np.float32]:
    """Return what each example counts in the loss: float32 of shape [examples].

    Args:
        labels: int64 of shape [examples].
        classes: How many classes there are.
        is_balanced: Whether every class counts the same, instead of every example.
    """
    if not is_balanced:
        return np.ones(len(labels), np.float32)
    weights: NDArray[np.float32] = balanced_class_weights(labels, classes=classes)[labels]
    return weights
