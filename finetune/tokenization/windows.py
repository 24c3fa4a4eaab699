"""Which tokens of a long text the model reads, and in which windows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetune.tokenization.long_texts import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    Floats = NDArray[np.floating[Any]]
    OfAll = Callable[[Floats, NDArray[np.int64], NDArray[np.int64]], Floats]


@dataclass(frozen=True)
class AggregationFunctions:
    """A window aggregation, in two forms with the same result: logits [examples, classes].

    Args:
        of_batch: In training, from the logits, [windows, classes], and which windows are of which
            example, bool of shape [examples, windows], one or more of each.
        of_all: In evaluation, from the logits of all windows, and the first window of each text and
            how many it has, both of shape [texts].
    """

    of_batch: Callable[["Tensor", "Tensor"], "Tensor"]
    of_all: "OfAll"


# A new one is an entry here with its name in Aggregation.
AGGREGATIONS: Mapping[Aggregation, AggregationFunctions] = {
    "mean": AggregationFunctions(
        of_batch=lambda logits, members: (members / members.sum(1, keepdim=True)) @ logits,
        of_all=lambda logits, firsts, counts: np.add.reduceat(logits, firsts) / counts[:, None],
    ),
    "max": AggregationFunctions(
        of_batch=lambda logits, members: logits.where(members[..., None], -math.inf).amax(1),
        of_all=lambda logits, firsts, counts: np.maximum.reduceat(logits, firsts),
    ),
}


@dataclass(frozen=True)
class Windows:
    """Which windows are of which text, and how their logits become the text's.

    ``counts`` are the windows of each text, 1 or more: int64 of shape [texts]. Those of a text
    follow each other, in the order of the texts.
    """

    counts: NDArray[np.int64]
    aggregation: Aggregation

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """The first window of each text: int64 of shape [texts]."""
        return np.cumsum(self.counts) - self.counts

    def of(self, texts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows of some texts, text by text: int64 of shape [windows]."""
        counts = self.counts[texts]
        ends = np.cumsum(counts)
        return np.repeat(self.firsts[texts] - (ends - counts), counts) + np.arange(counts.sum())

    def aggregate(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits of texts, [texts, classes], from those of all windows."""
        of_all = AGGREGATIONS[self.aggregation].of_all
        aggregated = of_all(logits, self.firsts, self.counts)
        return aggregated.astype(np.float32)


def head_tokens(max_length: int) -> int:
    """Return how many tokens of a long text are its head, the first special one included.

    It is a quarter, as 128 of 510 tokens are in Sun et al. 2019 (arXiv:1905.05583).
    """
    return max_length // 4 + 1


def head_and_tail(lengths: NDArray[np.int64], *, max_length: int) -> NDArray[np.bool_]:
    """Return which tokens, bool of shape [all tokens], are left of texts of some lengths."""
    head = head_tokens(max_length)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    from_end = np.repeat(lengths, lengths) - positions
    is_short = np.repeat(lengths <= max_length, lengths)
    is_left: NDArray[np.bool_] = is_short | (positions < head) | (from_end <= max_length - head)
    return is_left
