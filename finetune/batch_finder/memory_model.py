"""Peak memory as a function of the batch size, from a few measured peaks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Sizes closer together than this say more about the noise than about the slope.
MIN_SPAN = 1.25


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory as a hinge, ``max(floor, base + row * batch_size)``.

    The floor is the optimizer's step, which takes the same whatever the batch: it is the peak of
    small batches. BERT-base with 128 tokens in bf16 on an H200 takes 2,160 MiB for 1 to 4 examples
    and 49.5 MiB for each one more. ``row_bytes`` is 0 where no growth was seen.
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


def fit_memory(peaks: Mapping[int, int]) -> MemoryModel:
    """Fit the hinge to measured peaks in bytes by batch size; at least one.

    Of the hinges over any number of the smallest sizes, that is taken which misses the peaks least.
    The larger a size, the more it weighs, since the model is asked about sizes that are larger
    still.
    """
    sizes = sorted(peaks)
    spread = [size for size in sizes if size * MIN_SPAN <= sizes[-1]]
    hinges = [
        _hinge([peaks[size] for size in sizes[:flat]], sizes[flat:], peaks)
        for flat in range(max(1, len(spread)))
    ]
    return min(hinges, key=lambda hinge: _largest_miss(hinge, peaks))


def _hinge(flat_peaks: list[int], sizes: list[int], peaks: Mapping[int, int]) -> MemoryModel:
    """Fit the line to the rising peaks of some sizes, each weighted by its size."""
    weight = sum(sizes)
    mean_size = sum(size**2 for size in sizes) / weight
    mean_peak = sum(size * peaks[size] for size in sizes) / weight
    spread = sum(size * (size - mean_size) ** 2 for size in sizes)
    joint = sum(size * (size - mean_size) * (peaks[size] - mean_peak) for size in sizes)
    row_bytes = max(0.0, joint / spread) if spread else 0.0
    return MemoryModel(max(flat_peaks, default=0), mean_peak - row_bytes * mean_size, row_bytes)


def _largest_miss(hinge: MemoryModel, peaks: Mapping[int, int]) -> float:
    return max(abs(hinge.peak_bytes(size) / peak - 1) for size, peak in peaks.items())
