"""Peak memory as a function of the batch size, from a few measured peaks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Sizes closer together than this say more about the noise than about the slope.
MIN_SPAN = 1.25


@dataclass(frozen=True)
class MemoryModel:
    """Peak memory as two lines, ``max(floor, base + example * batch_size)``.

    The floor is the optimizer's step, the peak of small batches. BERT-base with 128 tokens in bf16
    on an H200 takes 2,160 MiB for 1 to 4 examples and 49.5 MiB for each one more.
    """

    floor_bytes: float
    base_bytes: float
    example_bytes: float

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the peak memory of a batch."""
        return max(self.floor_bytes, self.base_bytes + self.example_bytes * batch_size)

    def largest_batch(self, budget_bytes: float) -> int | None:
        """Predict the largest batch whose peak is within a budget; None where no growth was seen.

        >>> MemoryModel(floor_bytes=50, base_bytes=20, example_bytes=10).largest_batch(99)
        7
        """
        if self.floor_bytes > budget_bytes:
            return 0
        if self.example_bytes == 0:
            return None
        return max(0, math.floor((budget_bytes - self.base_bytes) / self.example_bytes))


def fit_memory(peaks: Mapping[int, int]) -> MemoryModel:
    """Fit a model to measured peaks in bytes by batch size; at least one.

    Any number of the smallest sizes may be on the floor: the smallest error decides. Large sizes
    weigh more, since the model is asked about larger ones.
    """
    sizes = sorted(peaks)
    spread = [size for size in sizes if size * MIN_SPAN <= sizes[-1]]
    models = []
    for flat in range(max(1, len(spread))):
        rising = sizes[flat:]
        weight = sum(rising)
        mean_size = sum(size**2 for size in rising) / weight
        mean_peak = sum(size * peaks[size] for size in rising) / weight
        variance = sum(size * (size - mean_size) ** 2 for size in rising)
        covariance = sum(size * (size - mean_size) * (peaks[size] - mean_peak) for size in rising)
        slope = max(0.0, covariance / variance) if variance else 0.0
        floor = max((peaks[size] for size in sizes[:flat]), default=0)
        models.append(MemoryModel(floor, mean_peak - slope * mean_size, slope))

    def largest_error(model: MemoryModel) -> float:
        return max(abs(model.peak_bytes(size) / peak - 1) for size, peak in peaks.items())

    return min(models, key=largest_error)
