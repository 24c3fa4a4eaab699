"""Which batch size is fastest, and with which a run will not run out of memory.

A trial takes a few steps at one padded length, a run thousands at many lengths: on a CPU, 50 steps
of mixed lengths took a fifth more memory per example. So a recommended size leaves a tenth of the
budget, and a quarter of the batch size at which memory ends, and the allocator never retried at it.
"""

import math
from collections.abc import Mapping

from finetune.batch_finder.history import History

# A size this close to the best speed, as a share of it, counts as fastest.
FASTEST_SHARE = 0.97
# An untried size should be this close, since speeds are measured with an error of a per cent.
TARGET_SHARE = 0.98
# What a recommended size uses at most, of the budget and of the size at which memory ends.
SAFE_BUDGET_SHARE = 0.9
SAFE_SIZE_SHARE = 0.75
# An untried size is worth a trial if all that would do as well are this much larger or smaller.
WORTHWHILE_SHARE = 0.75
# After this many trials none is spent on a size that is only smaller, and not safer.
FEW_TRIALS = 6


def recommended_size(history: History) -> int:
    """Return the fastest size that leaves room, or the smallest that passed if none does."""
    fastest = fastest_size(history.speeds)
    if _leaves_room(fastest, history):
        return fastest
    roomy = {size: speed for size, speed in history.speeds.items() if _leaves_room(size, history)}
    return fastest_size(roomy) if roomy else min(history.speeds)


def size_worth_trying(history: History) -> int | None:
    """Return an untried size that would probably be recommended, or None if none is worth it."""
    fastest = fastest_size(history.speeds)
    size = promising_size(history.speeds)
    if _leaves_room(fastest, history):
        # Once the search has come down from the largest, a smaller size adds little more.
        has_come_down = history.trials[-1].batch_size < history.largest
        is_cheap = len(history.trials) < FEW_TRIALS and not has_come_down
        is_worth = is_cheap and size <= WORTHWHILE_SHARE * fastest
    else:
        size = max(1, min(size, _largest_with_room(history)))
        is_worth = not any(
            _leaves_room(other, history) and other >= WORTHWHILE_SHARE * size
            for other in history.passed
        )
    is_tried = size in {trial.batch_size for trial in history.trials}
    return size if is_worth and not is_tried else None


def _leaves_room(size: int, history: History) -> bool:
    trial = history.passed[size]
    end = _end_of_memory(history)
    return (
        not trial.is_strained
        and (trial.peak_bytes or 0) <= SAFE_BUDGET_SHARE * history.budget_bytes
        and (end is None or size <= SAFE_SIZE_SHARE * end)
    )


def _end_of_memory(history: History) -> int | None:
    """Return the first size that failed or strained the device, or else the largest predicted."""
    strained = {size for size, trial in history.passed.items() if trial.is_strained}
    return min(history.sizes("too_big") | strained, default=None) or history.predict_largest()


def _largest_with_room(history: History) -> int:
    """Predict the largest size that leaves room, where the fastest that passed does not."""
    cramped = min(size for size in history.passed if not _leaves_room(size, history))
    predicted = history.predict_largest(budget_share=SAFE_BUDGET_SHARE)
    end = _end_of_memory(history)
    bounds = (cramped - 1, predicted, end and int(SAFE_SIZE_SHARE * end))
    return min(bound for bound in bounds if bound is not None)


def fastest_size(speeds: Mapping[int, float]) -> int:
    """Return the smallest size whose speed, in examples per second, is within 3% of the best.

    >>> fastest_size({8: 70.0, 32: 98.0, 128: 100.0})
    32
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= FASTEST_SHARE * best)


def promising_size(speeds: Mapping[int, float]) -> int:
    """Predict the smallest size that is about as fast as the fastest.

    A step's seconds are taken to lie on a line from the next smaller size, which is slower.

    >>> promising_size({size: size / (1 + 0.1 * size) for size in (8, 2000)})
    392
    """
    fast = fastest_size(speeds)
    slow = max((size for size in speeds if size < fast), default=fast)
    if slow == fast:
        return fast
    slow_seconds, fast_seconds = slow / speeds[slow], fast / speeds[fast]
    example_seconds = (fast_seconds - slow_seconds) / (fast - slow)
    fixed_seconds = slow_seconds - example_seconds * slow
    speed = min(TARGET_SHARE * max(speeds.values()), speeds[fast])
    return min(fast, math.ceil(speed * fixed_seconds / (1 - speed * example_seconds)))
