"""Which tokens of a long text the model reads, and in which windows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finetune.tokenization import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

# In training: the logits of texts from those of all windows in a batch, [windows, classes], and
# which windows are of which text, bool of shape [texts, windows]. A new one is an entry here with
# its name in Aggregation, which is one of ``torch.segment_reduce`` too.
AGGREGATIONS: "Mapping[Aggregation, Callable[[Tensor, Tensor], Tensor]]" = {
    "mean": lambda logits, members: (members / members.sum(1, keepdim=True)) @ logits,
    "max": lambda logits, members: logits.where(members[..., None], -math.inf).amax(1),
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
        import torch

        windows, counts = torch.from_numpy(logits), torch.from_numpy(self.counts)
        aggregated: NDArray[np.float32] = torch.segment_reduce(
            windows, self.aggregation, lengths=counts
        ).numpy()
        return aggregated


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
