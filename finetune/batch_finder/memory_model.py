"""Peak memory as a function of the batch size, from a few measured points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A hinge that is off by no more than this share of a peak is taken to be right.
EXACT_SHARE = 0.01
# Sizes closer together than this say more about the noise than about the slope.
LEAST_SPAN = 1.25


@dataclass(frozen=True)
class Point:
    """The peak memory that was measured at one batch size.

    Args:
        batch_size: Examples, from 1.
        peak_bytes: The most memory in use during an update.
    """

    batch_size: int
    peak_bytes: int


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory as a hinge, ``max(floor, base + row * batch_size)``.

    The floor is the optimizer's step, which takes the same whatever the batch: it is the peak of
    small batches. BERT-base with 128 tokens in bf16 on an H200 takes 2,160 MiB for 1 to 4 examples
    and 49.5 MiB for each one more.

    Args:
        floor_bytes: Peak of small batches.
        base_bytes: Where the line of large batches would start.
        row_bytes: Memory of one example more; 0 where no growth was seen.
    """

    floor_bytes: float
    base_bytes: float
    row_bytes: float

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the peak memory of a batch."""
        return max(self.floor_bytes, self.base_bytes + self.row_bytes * batch_size)

    def largest_batch(self, budget_bytes: float) -> int | None:
        """Predict the largest batch whose peak is within a budget; None where no growth was seen.

        >>> MemoryModel(floor_bytes=50, base_bytes=20, row_bytes=10).largest_batch(99)
        7
        """
        if self.floor_bytes > budget_bytes:
            return 0
        if self.row_bytes == 0:
            return None
        return max(0, math.floor((budget_bytes - self.base_bytes) / self.row_bytes))


def fit_memory(points: Sequence[Point]) -> MemoryModel:
    """Fit the hinge to measured points.

    As few of the smallest sizes as possible are taken for the flat part, as long as every point
    is met within 1 %; where noise forbids that, as on a CPU, the hinge is taken that misses least.
    The larger a size, the more it weighs, since the model is asked about sizes that are larger
    still.

    Args:
        points: At least one, in any order; a size may come more than once.
    """
    ordered = sorted(points, key=lambda point: point.batch_size)
    largest = ordered[-1].batch_size
    spread = [point for point in ordered if point.batch_size * LEAST_SPAN <= largest]
    hinges = [_hinge(ordered[:flat], ordered[flat:]) for flat in range(max(1, len(spread)))]
    misses = [_largest_miss(hinge, ordered) for hinge in hinges]
    return hinges[misses.index(next((m for m in misses if m <= EXACT_SHARE), min(misses)))]


def _hinge(flat: Sequence[Point], rising: Sequence[Point]) -> MemoryModel:
    weight = sum(point.batch_size for point in rising)
    mean_size = sum(point.batch_size**2 for point in rising) / weight
    mean_peak = sum(point.batch_size * point.peak_bytes for point in rising) / weight
    spread = sum(point.batch_size * (point.batch_size - mean_size) ** 2 for point in rising)
    joint = sum(
        point.batch_size * (point.batch_size - mean_size) * (point.peak_bytes - mean_peak)
        for point in rising
    )
    row_bytes = max(0.0, joint / spread) if spread else 0.0
    return MemoryModel(
        floor_bytes=max((point.peak_bytes for point in flat), default=0),
        base_bytes=mean_peak - row_bytes * mean_size,
        row_bytes=row_bytes,
    )


def _largest_miss(hinge: MemoryModel, points: Sequence[Point]) -> float:
    return max(abs(hinge.peak_bytes(point.batch_size) / point.peak_bytes - 1) for point in points)
