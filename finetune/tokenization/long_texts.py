"""What becomes of texts with more tokens than the model reads at once; free of numpy and torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

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


@dataclass(frozen=True)
class AggregationFunctions:
    """A window aggregation, in two forms with the same result: logits [examples, classes].

    Args:
        of_batch: In training, from the logits, [windows, classes], and which windows are of which
            example, bool of shape [examples, windows], one or more of each.
        of_all: In evaluation, from the logits of all windows, fp32 of shape [windows, classes], and
            the first window of each text and how many it has, both int64 of shape [texts].
    """

    of_batch: Callable[["Tensor", "Tensor"], "Tensor"]
    of_all: Callable[[Any, Any, Any], Any]


def _mean_of_all(logits: Any, firsts: Any, counts: Any) -> Any:
    import numpy as np

    return (np.add.reduceat(logits, firsts) / counts[:, None]).astype(np.float32)


def _max_of_all(logits: Any, firsts: Any, counts: Any) -> Any:
    import numpy as np

    return np.maximum.reduceat(logits, firsts)


# A new one is an entry here with its name in Aggregation.
AGGREGATIONS: Mapping[Aggregation, AggregationFunctions] = {
    "mean": AggregationFunctions(
        of_batch=lambda logits, members: (members / members.sum(1, keepdim=True)) @ logits,
        of_all=_mean_of_all,
    ),
    "max": AggregationFunctions(
        of_batch=lambda logits, members: logits.where(members[..., None], -math.inf).amax(1),
        of_all=_max_of_all,
    ),
}
