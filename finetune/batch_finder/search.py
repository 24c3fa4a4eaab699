"""Which batch size to try next, and when to stop: numbers only, no device.

The search grows until the memory model has a slope, goes near the size that the model predicts, and
brackets the largest that fits to 2%. If that leaves no room, one more trial is for one that does.

A trial takes a few steps at one padded length, a run thousands at many lengths: on a CPU, 50 steps
of mixed lengths took a fifth more memory per example. So a recommended size leaves a tenth of the
budget, and a quarter of the batch size at which memory ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from finetune.batch_finder.history import History, RunTrial
from finetune.errors import BatchDoesNotFit, FinetuneError
from finetune.events import Trial

# Beyond the flat part of most memory curves, and small enough to fit nearly everywhere; where it
# does not, a single example is next.
FIRST_SIZE = 4
# The search tries no new size after this many trials; what remains is to check the one it found.
MAX_TRIALS = 8
# How closely the largest size is bracketed, as a share of it; one example is always enough.
TOLERANCE_SHARE = 0.02
# The first try goes to this share of the predicted size. Memory is divided into fragments, so that
# a batch often fails where the model still sees one or two per cent of room.
TARGET_SHARE = 0.985
# Where a prediction failed, the search goes down by this share, then by twice that, and so on.
STEP_DOWN_SHARE = 0.02
# But if a proportional estimate is below this share of it, the prediction rests on too little.
FAR_SHARE = 0.75
# A size this close to the best speed, as a share of it, counts as fastest.
FASTEST_SHARE = 0.97
# What a recommended size uses at most, of the budget and of the size at which memory ends.
SAFE_BUDGET_SHARE = 0.9
SAFE_SIZE_SHARE = 0.75
# A size that leaves room is tried if none that passed is at least so large, as a share of it.
WORTHWHILE_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The batch sizes that a search found; by default none that fits.

    Args:
        max_verified: Largest size that passed, in a fresh process too.
        first_failed: Smallest size that failed for memory.
        predicted_maximum: Largest size that should fit, where time ended the search before memory.
        fastest: Smallest tried size whose speed is within 3% of the best.
        recommended: Size to train with: the fastest that leaves room.
    """

    max_verified: int = 0
    first_failed: int | None = 1
    predicted_maximum: int | None = None
    recommended: int = 0
    fastest: int = 0


@dataclass(frozen=True, kw_only=True)
class SearchResult(BatchSizes):
    """The result of a search, with its trials in order and the memory that a trial might hold."""

    trials: tuple[Trial, ...]
    budget_bytes: int

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory at the largest verified size, None where unknown."""
        peaks = {one.batch_size: one.peak_bytes for one in self.trials if one.status == "fits"}
        return peaks.get(self.max_verified)

    @property
    def examples_per_second(self) -> float:
        """Speed at the recommended size."""
        speeds = {one.batch_size: one.examples_per_second for one in self.trials}
        return speeds[self.recommended] or 0.0

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a larger batch size would be recommended if there were more memory."""
        return self.first_failed is not None or self.recommended < self.fastest


def search(run: RunTrial, *, run_afresh: RunTrial, history: History) -> SearchResult:
    """Find the largest batch size that fits, which a fresh process has confirmed, and the fastest.

    Memory need not be monotone and trials need not agree: a size that failed once is not returned.
    """
    while following := _next_size(history):
        size, is_fresh = following
        history.add((run_afresh if is_fresh else run)(size), is_fresh=is_fresh)
        _raise_if_nothing_fits(history)
    return SearchResult(
        max_verified=history.largest,
        first_failed=min(history.sizes("too_big"), default=None),
        predicted_maximum=_predict_maximum(history),
        fastest=fastest_size(history.speeds),
        recommended=recommended_size(history),
        trials=tuple(history.trials),
        budget_bytes=history.budget_bytes,
    )


def _next_size(history: History) -> tuple[int, bool] | None:
    """Return what to try next, and whether in a fresh process; None if nothing is left to try."""
    size = _bracketing_size(history)
    if size is not None and not _is_exhausted(history):
        # While the search grows, a process is used again and half the time is kept for the check.
        # Near the prediction every size may be the largest, so that its trial is the check too.
        is_growing = history.predict_largest() is None
        affordable = history.affordable_size(history.seconds_left / (2 if is_growing else 1))
        if affordable >= min(size, history.largest + _tolerance(history)):
            size = min(size, affordable)
            return size, not is_growing or size in (affordable, history.limit)
    if history.largest not in history.checked_sizes:
        return max(1, history.largest), True
    size = _untried_size_with_room(history)
    is_affordable = size and size <= history.affordable_size(history.seconds_left)
    return (size, False) if size and is_affordable and len(history.trials) < MAX_TRIALS else None


def _is_exhausted(history: History) -> bool:
    """Return whether no trial is left but the one that finds a size to recommend."""
    kept = 1 if history.passed and _untried_size_with_room(history) else 0
    return len(history.trials) >= MAX_TRIALS - kept


def _raise_if_nothing_fits(history: History) -> None:
    last = history.trials[-1]
    if last.status == "failed" or (last.status == "timed_out" and last.batch_size == 1):
        raise FinetuneError(
            f"training at batch size {last.batch_size} failed: {last.reason}",
            remedy="memory is not the cause: see what finetune doctor says, raise --time-limit, "
            "or lower --max-length",
        )
    if history.largest or last.batch_size > 1:
        return
    raise BatchDoesNotFit(
        f"not even a batch of one example fits in memory: {last.reason}",
        remedy="lower --max-length, use --gradient-checkpointing or --freeze-core, or raise "
        "--memory",
    )


def _bracketing_size(history: History) -> int | None:
    """Return the next size on the way to the largest, None once that is bracketed."""
    low, high = history.largest, history.bound
    if not low:
        # Where memory is swapped, only the speed of a size that fits shows that a larger one swaps.
        is_small = history.trials or history.slows_down
        return 1 if is_small else min(history.first or FIRST_SIZE, history.limit)
    if low == history.limit or (high is not None and high - low <= _tolerance(history)):
        return None
    tolerance, predicted = _tolerance(history), history.predict_largest()
    # The size that fits even if all of the peak so far was due to the examples.
    peak_bytes = history.passed[low].peak_bytes or history.budget_bytes
    proportional = max(low, low * history.budget_bytes // peak_bytes)
    if predicted is None:
        # It fits if examples took at most half of the peak so far, or is the double.
        size = max(2 * low, 2 * proportional - low)
        size = size if high is None else min(size, math.isqrt(low * high))
    elif (target := math.ceil(TARGET_SHARE * predicted)) < low + tolerance:
        # If one tolerance more fails, the largest size is bracketed. Beyond the prediction, which
        # was too low then, the distance grows.
        size = low + (low - target if low > predicted else tolerance)
        size = size if high is None else min(size, (low + high) // 2)
    elif high is None or target < high:
        size = target
    elif proportional < FAR_SHARE * high:
        # The memory model expected one to fit that failed, and here rests on too little.
        size = math.isqrt(proportional * high)
    else:
        share = STEP_DOWN_SHARE * 2 ** (len(history.sizes("too_big")) - 1)
        size = max((low + high) // 2, int((1 - share) * high))
    return min(max(size, low + 1), (high or history.limit + 1) - 1)


def _tolerance(history: History) -> int:
    """Return how far apart the largest size and one that does not fit may be."""
    return max(1, int(TOLERANCE_SHARE * history.largest))


def _predict_maximum(history: History) -> int | None:
    """Predict the largest size, if it was time that kept the search from bracketing it."""
    is_exhausted = _is_exhausted(history) and not history.sizes("timed_out")
    predicted = history.predict_largest()
    if _bracketing_size(history) is None or is_exhausted or predicted is None:
        return None
    end = history.bound or history.limit + 1
    return max(history.largest, min(predicted, end - 1))


def recommended_size(history: History) -> int:
    """Return the fastest size that leaves room, or the smallest that passed if none does."""
    largest = size_with_room(history)
    roomy = {size: speed for size, speed in history.speeds.items() if size <= largest}
    return fastest_size(roomy) if roomy else min(history.speeds)


def _untried_size_with_room(history: History) -> int | None:
    """Return a size to recommend, None if one that passed does nearly as well."""
    size = size_with_room(history)
    is_reached = any(WORTHWHILE_SHARE * size <= other <= size for other in history.passed)
    is_tried = size in {trial.batch_size for trial in history.trials}
    return None if is_reached or is_tried or fastest_size(history.speeds) <= size else size


def size_with_room(history: History) -> int:
    """Return the largest size, tried or not, that should leave room."""
    end = min(history.sizes("too_big"), default=None) or history.predict_largest()
    predicted = history.predict_largest(budget_share=SAFE_BUDGET_SHARE)
    bounds = (history.limit, predicted, end and int(SAFE_SIZE_SHARE * end))
    return max(1, min(bound for bound in bounds if bound is not None))


def fastest_size(speeds: Mapping[int, float]) -> int:
    """Return the smallest size whose speed, in examples per second, is within 3% of the best.

    >>> fastest_size({8: 70.0, 32: 98.0, 128: 100.0})
    32
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= FASTEST_SHARE * best)
