"""What becomes of texts with more tokens than the model reads at once; free of numpy and torch."""

from dataclasses import dataclass
from typing import Literal

Handling = Literal["truncate", "head-tail", "windows"]
Aggregation = Literal["mean", "max"]


@dataclass(frozen=True)
class LongTexts:
    """What becomes of texts with more tokens than the maximum.

    Args:
        handling: ``truncate``: they lose their end. ``head-tail``: they lose their middle.
            ``windows``: they become windows that overlap.
        stride: Tokens of overlap between two windows.
        aggregation: How the logits of a text's windows become the text's.
    """

    handling: Handling
    stride: int
    aggregation: Aggregation


TRUNCATED = LongTexts("truncate", stride=0, aggregation="mean")
