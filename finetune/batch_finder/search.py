"""Choose which batch size to try next, and when to stop. This module only handles numbers.

The search tries 4 examples and grows until two trials give a line of memory. Then it jumps to 0.985
of the predicted size, brackets the largest size that fits to 2%, and confirms it in a new process.

A trial takes a few steps at one padded length, a run takes thousands at many lengths. On a CPU, 50
steps of mixed lengths took a fifth more memory per example. So the recommended size is the fastest
within 0.75 of the size at which memory ends.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from finetune.batch_finder.results import Result
from finetune.errors import BatchDoesNotFitError, FinetuneError
from finetune.events import Trial, TrialStatus

FIRST_SIZE = 4
# After this many trials only the largest size is confirmed.
MAX_TRIALS = 8
# How closely the largest size is bracketed, as a fraction of that size.
TOLERANCE = 0.02
# Memory is fragmented, so a batch often fails although 1 or 2% of the budget should be free.
TARGET = 0.985
# If the predicted size fails, the search goes down by this fraction, then by twice that.
STEP_DOWN = 0.02
# A prediction is unreliable if a proportional estimate is below this fraction of it.
FAR = 0.75
# Sizes within this fraction of the best speed count as fastest.
FASTEST = 0.97
# The recommended size is at most this fraction of the size at which memory runs out. If the largest
# tried size below is at least WORTHWHILE of that, no further size is tried.
SAFE_SIZE, WORTHWHILE = 0.75, 0.75
# A trial takes two or three steps and an evaluation, about the time of this many steps.
STEPS_PER_TRIAL = 4
# If a device swaps, a size with less than this fraction of the speed of a smaller size is too big.
MIN_SPEED = 0.5
# The minimum ratio of two sizes for estimating a slope.
MIN_SPAN = 1.25


RunTrial = Callable[..., Trial]
"""Tries a batch size, in a new process if ``new_process`` is true."""


class MemoryLine(NamedTuple):
    """Peak memory by batch size: ``max(floor, base + example * batch_size)``.

    The floor is the step of the optimizer, the peak of small batches. BERT-base with 128 tokens in
    bf16 on an H200 takes 2,160 MiB for 1 to 4 examples, and 49.5 MiB for each further example.
    """

    floor_bytes: float
    base_bytes: float
    example_bytes: float

    def peak_bytes(self, batch_size: int) -> float:
        """Predict the peak memory of a batch."""
        return max(self.floor_bytes, self.base_bytes + self.example_bytes * batch_size)

    def largest_batch(self, budget_bytes: float) -> int | None:
        """Predict the largest batch within a budget, or return None if no growth was seen.

        >>> MemoryLine(floor_bytes=50, base_bytes=20, example_bytes=10).largest_batch(99)
        7
        """
        if self.floor_bytes > budget_bytes:
            return 0
        if self.example_bytes == 0:
            return None
        return max(0, math.floor((budget_bytes - self.base_bytes) / self.example_bytes))


def fit_memory(peaks: Mapping[int, int]) -> MemoryLine:
    """Fit peaks in bytes by batch size, through the two largest sizes that are far enough apart."""
    smallest, largest = min(peaks), max(peaks)
    size = max((size for size in peaks if size * MIN_SPAN <= largest), default=0)
    growth_bytes = peaks[largest] - peaks[size] if size else 0
    slope = max(0.0, growth_bytes / (largest - size))
    return MemoryLine(peaks[smallest], peaks[largest] - slope * largest, slope)


def search(
    run: RunTrial,
    *,
    budget_bytes: int,
    limit: int,
    first: int | None = None,
    time_limit: float = math.inf,
    slows_down: bool = False,
) -> Result:
    """Find the largest batch size that fits, confirmed in a new process, and the fastest.

    Two trials of the same size may disagree. A size that failed once is never returned.

    Args:
        first: Size to start with, None for a small one.
        time_limit: Seconds. A trial that would end later is left out, if there is a result.
        slows_down: Whether the device swaps instead of rejecting an allocation.
    """
    state = _Search(budget_bytes, limit, first, time_limit, slows_down)
    while following := state.next_trial():
        size, new_process = following
        state.add(run(size, new_process=new_process), is_confirmed=new_process)
    speeds, end = state.speeds, math.floor(state.safe_size())
    safe = {size: speed for size, speed in speeds.items() if size <= end}
    return Result(
        largest=state.largest,
        first_failed=min(state.sizes("too_big"), default=None),
        predicted_largest=state.predicted_largest(),
        fastest=fastest_size(speeds),
        recommended=fastest_size(safe) if safe else min(speeds),
        trials=tuple(state.trials),
        budget_bytes=budget_bytes,
        peak_bytes=state.passed[state.largest].peak_bytes,
    )


@dataclass
class _Search:
    budget_bytes: int
    limit: int
    first: int | None
    time_limit: float
    slows_down: bool
    trials: list[Trial] = field(default_factory=list)
    confirmed: set[int] = field(default_factory=set)

    def add(self, trial: Trial, *, is_confirmed: bool) -> None:
        self.trials.append(trial)
        if self.slows_down:
            self.trials = [self._judge_speed(earlier) for earlier in self.trials]
        if is_confirmed:
            self.confirmed.add(trial.batch_size)
        last = self.trials[-1]
        if last.status == "failed" or (last.status == "timed_out" and last.batch_size == 1):
            raise FinetuneError(
                f"training at batch size {last.batch_size} failed: {last.reason}",
                remedy="run finetune doctor, raise --time-limit, or lower --max-length; memory is "
                "not the cause",
            )
        if not self.largest and last.batch_size == 1:
            raise BatchDoesNotFitError(
                f"not even a batch of one example fits in memory: {last.reason}",
                remedy="lower --max-length, use --gradient-checkpointing or --freeze-core, or "
                "raise --memory",
            )

    def _judge_speed(self, trial: Trial) -> Trial:
        """Mark a trial as too big if it fitted only because the system swapped."""
        smaller = [other for other in self.trials if other.batch_size < trial.batch_size]
        best = max((other.examples_per_second or 0.0 for other in smaller), default=0.0)
        speed = trial.examples_per_second or 0.0
        if trial.status != "fits" or speed >= MIN_SPEED * best:
            return trial
        reason = f"it runs at {speed / best:.0%} of the speed of a smaller batch"
        return replace(trial, status="too_big", reason=reason)

    def sizes(self, *statuses: TrialStatus) -> set[int]:
        return {trial.batch_size for trial in self.trials if trial.status in statuses}

    @property
    def passed(self) -> dict[int, Trial]:
        """The last trial of each size that never failed, in ascending order."""
        sizes = self.sizes("fits") - self.sizes("too_big", "timed_out")
        trials = {trial.batch_size: trial for trial in self.trials}
        return {size: trials[size] for size in sorted(sizes)}

    @property
    def speeds(self) -> dict[int, float]:
        return {size: trial.examples_per_second or 0.0 for size, trial in self.passed.items()}

    @property
    def largest(self) -> int:
        return max(self.passed, default=0)

    @property
    def tolerance(self) -> int:
        return max(1, int(TOLERANCE * self.largest))

    def predict(self) -> int | None:
        """Predict the size at which memory ends, None while no slope is known."""
        peaks = {size: trial.peak_bytes for size, trial in self.passed.items() if trial.peak_bytes}
        return fit_memory(peaks).largest_batch(self.budget_bytes) if peaks else None

    def next_trial(self) -> tuple[int, bool] | None:
        """Return the next size, and whether it is for a new process; None at the end."""
        size, predicted, safe_size = self.next_size(), self.predict(), self.untried_safe_size()
        if size is not None and not self.is_exhausted():
            # While the search grows, half of the time is kept for the confirmation. Later, any
            # size may be the largest, so its trial also confirms it.
            affordable = self.affordable_size(0.5 if predicted is None else 1.0)
            if affordable >= min(size, self.largest + self.tolerance):
                size = min(size, affordable)
                return size, predicted is not None or size in (affordable, self.limit)
        if self.largest not in self.confirmed:
            return max(1, self.largest), True
        if safe_size is None or len(self.trials) >= MAX_TRIALS:
            return None
        return (safe_size, False) if safe_size <= self.affordable_size(1.0) else None

    def is_exhausted(self) -> bool:
        """Return whether at most the trial of the recommended size is left."""
        return len(self.trials) >= MAX_TRIALS - (self.untried_safe_size() is not None)

    def next_size(self) -> int | None:
        """Return the next size on the way to the largest, None once that is bracketed."""
        low = self.largest
        if not low:
            # If memory is swapped, only the speed of a smaller size shows that a larger one swaps.
            is_small = self.trials or self.slows_down
            return 1 if is_small else min(self.first or FIRST_SIZE, self.limit)
        failed = [size for size in self.sizes("too_big", "timed_out") if size > low]
        high = min(failed, default=self.limit + 1)
        if low == self.limit or (failed and high - low <= self.tolerance):
            return None
        predicted, peak_bytes = self.predict(), self.passed[low].peak_bytes or self.budget_bytes
        # This many fit even if all of the peak so far was due to the examples.
        proportional = max(low, low * self.budget_bytes // peak_bytes)
        if predicted is None:
            # It fits if examples took at most half of the peak so far, or if twice as many fit.
            size = max(2 * low, 2 * proportional - low)
        else:
            # If a size one tolerance larger fails, the largest size is bracketed. Beyond a
            # prediction that was too low, the distance grows.
            target = math.ceil(TARGET * predicted)
            step = self.tolerance if low <= predicted else low - target
            size = target if target >= low + self.tolerance else low + step
        if failed and size >= high:
            # A size failed that the line predicted to fit. If the line is unreliable, bisect.
            step_down = 1 - STEP_DOWN * 2 ** (len(failed) - 1)
            size = max((low + high) // 2, int(step_down * high))
            if predicted is None or proportional < FAR * high:
                size = math.isqrt(proportional * high)
        return min(max(size, low + 1), high - 1)

    def affordable_size(self, fraction: float) -> int:
        """Predict the largest size whose trial ends within a fraction of the time left."""
        if not self.passed:
            return self.limit
        last = self.passed[self.largest]
        seconds = fraction * (self.time_limit - sum(trial.seconds for trial in self.trials))
        examples = (seconds - last.seconds) * self.speeds[self.largest] / STEPS_PER_TRIAL
        return math.floor(min(self.largest + examples, 2 * self.limit))

    def predicted_largest(self) -> int | None:
        """Predict the largest size, if time ended the search before memory did."""
        predicted, largest = self.predict(), self.largest
        failed = [size for size in self.sizes("too_big") if size > largest]
        is_bracketed = largest == self.limit or (failed and min(failed) - largest <= self.tolerance)
        is_exhausted = self.is_exhausted() and not self.sizes("timed_out")
        if predicted is None or is_bracketed or is_exhausted:
            return None
        return max(largest, min(predicted, min(failed, default=self.limit + 1) - 1))

    def safe_size(self) -> float:
        """Return the largest size, tried or not, that leaves enough memory free."""
        end = min(self.sizes("too_big"), default=None) or self.predict()
        return max(1, min(self.limit, math.inf if end is None else int(SAFE_SIZE * end)))

    def untried_safe_size(self) -> int | None:
        """Return a size to recommend, None if a size that passed does nearly as well."""
        size = self.safe_size()
        is_reached = any(WORTHWHILE * size <= other <= size for other in self.passed)
        is_tried = size in {trial.batch_size for trial in self.trials}
        if not self.passed or is_reached or is_tried or fastest_size(self.speeds) <= size:
            return None
        return int(size)


def fastest_size(speeds: Mapping[int, float]) -> int:
    """Return the smallest size whose speed, in examples per second, is within 3% of the best.

    >>> fastest_size({8: 70.0, 32: 98.0, 128: 100.0})
    32
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= FASTEST * best)
