"""Texts become token ids once, then batches of one padded length.

What becomes of long texts is here, free of numpy and torch.
"""

from dataclasses import dataclass
from typing import Literal

Handling = Literal["truncate", "head-tail", "windows"]
Aggregation = Literal["mean", "max"]


@dataclass(frozen=True)
class LongTexts:
    """What becomes of texts with more tokens than the maximum.

    They lose their end, or their middle (``head-tail``), or become windows that overlap by
    ``stride`` tokens and whose logits are aggregated.
    """

    handling: Handling
    stride: int
    aggregation: Aggregation


TRUNCATED = LongTexts("truncate", stride=0, aggregation="mean")
