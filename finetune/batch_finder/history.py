"""The trials of a search so far, and the model of peak memory that follows from them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from finetune.events import Trial, TrialStatus

# A trial takes two or three steps and an evaluation: no more than so many steps' time.
STEPS_A_TRIAL = 4
# Where memory is swapped instead of refused, a size is too big if its speed is less than this share
# of a smaller one's.
MIN_SPEED_SHARE = 0.5
# Sizes closer together than this say more about the noise than about the slope.
MIN_SPAN = 1.25

RunTrial = Callable[[int], Trial]


@dataclass
class History:
    """The bounds of a search and its trials.

    Args:
        first: Size to begin with; None for a small one.
        time_limit_seconds: No trial is begun that would probably end later, except those without
            which there is no result.
        slows_down: Whether the device swaps rather than refuse memory, so that a size less than
            half as fast as a smaller one is too big.
        checked_sizes: Sizes that were tried in a fresh process.
    """

    budget_bytes: int
    limit: int
    first: int | None
    time_limit_seconds: float
    slows_down: bool
    trials: list[Trial] = field(default_factory=list)
    checked_sizes: set[int] = field(default_factory=set)

    def add(self, trial: Trial, *, is_fresh: bool) -> None:
        """Add a trial, and judge the speed of the earlier ones by it."""
        self.trials.append(trial)
        if self.slows_down:
            self.trials = [self._judge_speed(each) for each in self.trials]
        if is_fresh:
            self.checked_sizes.add(trial.batch_size)

    @property
    def seconds_left(self) -> float:
        """What the trials have left of the time limit."""
        return self.time_limit_seconds - sum(trial.seconds for trial in self.trials)

    @property
    def passed(self) -> dict[int, Trial]:
        """The last trial of each size that has never failed, by ascending size."""
        sizes = self.sizes("fits") - self.sizes("too_big") - self.sizes("timed_out")
        trials = {each.batch_size: each for each in self.trials}
        return {size: trials[size] for size in sorted(sizes)}

    @property
    def speeds(self) -> dict[int, float]:
        """Examples per second of the sizes that passed."""
        return {size: one.examples_per_second or 0.0 for size, one in self.passed.items()}

    @property
    def largest(self) -> int:
        """The largest size that passed, 0 if none did."""
        return max(self.passed, default=0)

    @property
    def bound(self) -> int | None:
        """The smallest size that failed for memory, above the largest that passed."""
        return min((size for size in self.sizes("too_big") if size > self.largest), default=None)

    def sizes(self, status: TrialStatus) -> set[int]:
        """Return the sizes that had a status at least once."""
        return {each.batch_size for each in self.trials if each.status == status}

    def predict_largest(self, *, budget_share: float = 1.0) -> int | None:
        """Predict the largest size within a share of the budget; None while no slope is known."""
        peaks = {size: one.peak_bytes for size, one in self.passed.items() if one.peak_bytes}
        return fit_memory(peaks).largest_batch(budget_share * self.budget_bytes) if peaks else None

    def affordable_size(self, seconds: float) -> int:
        """Predict the largest size whose trial ends in time; at most half of one that did not."""
        if not self.passed:
            return self.limit
        seconds_per_example = STEPS_A_TRIAL / self.speeds[self.largest]
        seconds -= self.passed[self.largest].seconds
        too_slow = min(self.sizes("timed_out"), default=2 * self.limit)
        return math.floor(min(self.largest + seconds / seconds_per_example, too_slow / 2))

    def _judge_speed(self, trial: Trial) -> Trial:
        """Call a size too big that passed, but only because the system swapped."""
        if trial.status != "fits":
            return trial
        smaller = [each for each in self.trials if each.batch_size < trial.batch_size]
        best = max((each.examples_per_second or 0.0 for each in smaller), default=0.0)
        speed = trial.examples_per_second or 0.0
        if speed >= MIN_SPEED_SHARE * best:
            return trial
        reason = f"it has {speed / best:.0%} of the speed of a smaller batch"
        return replace(trial, status="too_big", reason=reason)


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

    The line goes through the two largest sizes that are far enough apart; those below may be on the
    floor.
    """
    smallest, largest = min(peaks), max(peaks)
    size = max((one for one in peaks if one * MIN_SPAN <= largest), default=0)
    growth_bytes = peaks[largest] - peaks[size] if size else 0
    slope = max(0.0, growth_bytes / (largest - size))
    return MemoryModel(peaks[smallest], peaks[largest] - slope * largest, slope)
