"""Plans batches: which rows go through the model together, and at which width."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Rows are sorted by length only within a pool of this many batches: texts of one length still meet
# others in every epoch. On TREC at batch size 32 and exact widths, pools of 50 leave 97 % of the
# tokens real, sorting the whole epoch 99 % (docs/LOG.md has the other devices' widths).
BATCHES_A_POOL = 50


@dataclass(frozen=True)
class Batch:
    """Rows that go through the model together.

    Args:
        rows: Numbers of the rows: int64 of shape [rows].
        padded_length: Tokens that every row is padded to.
    """

    rows: NDArray[np.int64]
    padded_length: int


def plan_epoch(
    lengths: NDArray[np.int64],
    *,
    effective_batch_size: int,
    padded_lengths: Sequence[int],
    seed: int,
    epoch: int,
) -> list[Batch]:
    """Group the rows of one epoch into effective batches of similar lengths, in random order.

    Every row comes exactly once; one batch may be smaller than the others. The plan depends on
    nothing but the arguments, so that a resumed run finds its place.

    Args:
        lengths: Tokens of each row: int64 of shape [rows].
        effective_batch_size: Rows in one update.
        padded_lengths: Padded lengths that a batch may have, ascending.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    pool_size = effective_batch_size * BATCHES_A_POOL
    for start in range(0, len(order), pool_size):
        pool = order[start : start + pool_size]
        by_length = pool[np.argsort(lengths[pool], kind="stable")]
        batches += _cut(
            by_length, lengths, batch_size=effective_batch_size, padded_lengths=padded_lengths
        )
    return [batches[index] for index in random.permutation(len(batches))]


def widest_first(batches: Sequence[Batch]) -> list[Batch]:
    """Move the widest batch to the front; the others keep their order.

    For devices that keep memory by shape: if it fails, it does at once, and what the largest shape
    has left serves the smaller ones.
    """
    widest = max(range(len(batches)), key=lambda index: batches[index].padded_length)
    return [batches[widest], *batches[:widest], *batches[widest + 1 :]]


def plan_evaluation(
    lengths: NDArray[np.int64], *, batch_size: int, padded_lengths: Sequence[int]
) -> list[Batch]:
    """Group rows by length, longest first, for passes in which order does not matter.

    The first batch takes the most memory: if any fails, it does, and at once.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    return _cut(longest_first, lengths, batch_size=batch_size, padded_lengths=padded_lengths)


def real_token_share(batches: Sequence[Batch], lengths: NDArray[np.int64]) -> float:
    """Return the share of the batches' tokens that are not padding, in 0..1."""
    padded_tokens = sum(len(batch.rows) * batch.padded_length for batch in batches)
    return float(sum(lengths[batch.rows].sum() for batch in batches) / padded_tokens)


def _cut(
    rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    batch_size: int,
    padded_lengths: Sequence[int],
) -> list[Batch]:
    slices = (rows[start : start + batch_size] for start in range(0, len(rows), batch_size))
    return [
        Batch(part, _padded_length(int(lengths[part].max()), padded_lengths)) for part in slices
    ]


def _padded_length(tokens: int, padded_lengths: Sequence[int]) -> int:
    return next(padded_length for padded_length in padded_lengths if padded_length >= tokens)
