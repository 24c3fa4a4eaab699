"""What a model must beat: always answering with the largest class."""

from collections.abc import Sequence

from finetune.events import Emit, WarningMessage


def baseline_accuracy(confusion_matrix: Sequence[Sequence[int]]) -> float:
    """Return the share of the largest class in a split, in 0..1.

    Args:
        confusion_matrix: Rows of the split by true class and predicted class; not all 0.

    >>> baseline_accuracy([[2, 1], [0, 1]])
    0.75
    """
    rows_by_class = list(map(sum, confusion_matrix))
    return max(rows_by_class) / sum(rows_by_class)


def warn_unless_better(
    accuracy: float, confusion_matrix: Sequence[Sequence[int]], *, emit: Emit
) -> None:
    """Emit a warning where a model is no better than the largest class."""
    baseline = baseline_accuracy(confusion_matrix)
    if accuracy <= baseline:
        emit(
            WarningMessage(
                f"accuracy {accuracy:.1%} is not better than always answering with the largest "
                f"class, {baseline:.1%}",
                remedy="train longer, train more of the model, or look at finetune data check",
            )
        )
