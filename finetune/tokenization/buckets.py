"""Plans batches: which examples go through the model together, and at which padded length."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.devices.base import BatchShapes

# Examples are sorted by length only within a pool of this many batches, so that texts of one length
# meet others in every epoch. On TREC at batch size 32, padded to the longest of each batch, 97% of
# the tokens are real with pools of 50, and 99% with the whole epoch sorted (docs/measurements.md).
BATCHES_PER_POOL = 50
# With this few padded lengths, each has many texts in random order, so the epoch is one pool.
FEW_PADDED_LENGTHS = 16


@dataclass(frozen=True)
class Batch:
    """Examples that go through the model together: ``indices`` is int64 of shape [examples].

    If the examples have to share one loss, ``parts`` of them have their own padded lengths, and go
    through the model one after the other.
    """

    indices: NDArray[np.int64]
    padded_length: int
    parts: Sequence[tuple[int, int]] = ()


def choose_padded_lengths(lengths: NDArray[np.int64], shapes: BatchShapes) -> list[int]:
    """Return the padded lengths, ascending, that need the fewest tokens in total."""
    present, texts = np.unique(lengths, return_counts=True)
    allowed = [shapes.padded_length(tokens) for tokens in present.tolist()]
    padded, groups = np.unique(allowed, return_inverse=True)
    if shapes.max_shapes is None or len(padded) <= shapes.max_shapes:
        return [int(tokens) for tokens in padded]
    weights = np.bincount(groups, texts).astype(np.float64)
    return _fewest_tokens(padded, weights, count=shapes.max_shapes)


def _fewest_tokens(
    lengths: NDArray[np.int64], weights: NDArray[np.float64], *, count: int
) -> list[int]:
    """Choose ``count`` of more lengths, by dynamic programming over where each group starts.

    Other texts are padded to the next chosen length.
    """
    before = np.concatenate([[0.0], np.cumsum(weights)])
    # fewest[i] is the fewest tokens for the first i lengths. Each round allows one more length.
    fewest = np.concatenate([[0.0], np.full(len(lengths), np.inf)])
    rounds = []
    for _ in range(count):
        tokens, starts = [np.inf], [0]
        for end, longest in enumerate(lengths, start=1):
            totals = fewest[:end] + longest * (before[end] - before[:end])
            starts.append(int(totals.argmin()))
            tokens.append(totals[starts[-1]])
        fewest = np.array(tokens)
        rounds.append(starts)
    chosen, end = [], len(lengths)
    for starts in reversed(rounds):
        chosen.append(int(lengths[end - 1]))
        end = starts[end]
    return chosen[::-1]


def plan_epoch(
    lengths: NDArray[np.int64],
    *,
    effective_batch_size: int,
    padded_lengths: Sequence[int],
    seed: int,
    epoch: int,
) -> list[Batch]:
    """Group the examples of one epoch into effective batches of similar lengths, in random order.

    Every example occurs once. The last batch may be smaller. It gets the shortest examples, because
    devices may fill it up with repeated examples. The plan depends only on the arguments, so a
    resumed run continues at the same place. ``lengths`` has shape [examples], ``padded_lengths``
    ascend, epochs start at 0.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    padded = np.asarray(padded_lengths)[np.searchsorted(padded_lengths, lengths)]
    is_one_pool = len(padded_lengths) <= FEW_PADDED_LENGTHS
    pool_size = len(order) if is_one_pool else effective_batch_size * BATCHES_PER_POOL
    pools = np.arange(len(order)) // pool_size
    by_length = order[np.lexsort((-padded[order], pools))]
    slices = np.split(by_length, range(effective_batch_size, len(order), effective_batch_size))
    batches = [Batch(indices, int(padded[indices].max())) for indices in slices]
    return [batches[index] for index in random.permutation(len(batches))]


def longest_first(batches: Sequence[Batch]) -> list[Batch]:
    """Move a longest batch to the front, so that memory runs out early or never."""
    longest = max(range(len(batches)), key=lambda index: batches[index].padded_length)
    return [batches[longest], *batches[:longest], *batches[longest + 1 :]]


def plan_evaluation(
    lengths: NDArray[np.int64],
    *,
    batch_size: int,
    padded_lengths: Sequence[int],
    shapes: BatchShapes | None = None,
) -> list[Batch]:
    """Group examples by length, longest first, so that memory runs out early or never.

    With ``shapes``, batches have the size with which frozen layers are fastest on the device.
    """
    left, size = np.argsort(-lengths, kind="stable"), batch_size
    batches: list[Batch] = []
    while len(left):
        padded_length = padded_lengths[bisect_left(padded_lengths, lengths[left[0]])]
        if shapes:
            size = shapes.extraction_examples(batch_size, padded_length=padded_length)
        batches.append(Batch(left[:size], padded_length))
        left = left[size:]
    return batches
