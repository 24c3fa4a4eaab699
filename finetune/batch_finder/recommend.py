"""Which batch size to train with: a fast one that a run will not run out of memory with.

A probe takes a few updates at one width. A run takes thousands at many widths and evaluates in
between, and what they leave in an allocator's cache a probe does not see. So a recommended size
leaves room: a tenth of the budget, and a tenth of the rows of the first size that failed, since
memory may run out before the budget is used. A size at which the allocator had to try again is not
recommended. The fastest size mostly leaves room, for a device is busy long before it is full.
"""

from finetune.batch_finder.outcomes import History
from finetune.batch_finder.speed_model import fastest_size, promising_size

# What a recommended size uses at most, of the budget and of the first size that failed.
SAFE_SHARE = 0.9
# An untried size is worth a probe if all that would do as well are this much larger or smaller.
WORTHWHILE_SHARE = 0.75


def recommended_size(history: History) -> int:
    """Return the fastest size that leaves room, or the smallest that passed if none does."""
    fastest = fastest_size(history.speeds)
    if _leaves_room(fastest, history):
        return fastest
    roomy = {size: speed for size, speed in history.speeds.items() if _leaves_room(size, history)}
    return fastest_size(roomy) if roomy else min(history.speeds)


def size_worth_probing(history: History) -> int | None:
    """Return an untried size that would probably be recommended, or None if none is worth it."""
    fastest = fastest_size(history.speeds)
    size = promising_size(history.speeds)
    if _leaves_room(fastest, history):
        is_worth = size <= WORTHWHILE_SHARE * fastest
    else:
        size = max(1, min(size, _largest_with_room(history)))
        is_worth = not any(
            _leaves_room(other, history) and other >= WORTHWHILE_SHARE * size
            for other in history.passed
        )
    is_tried = size in {outcome.batch_size for outcome in history.outcomes}
    return size if is_worth and not is_tried else None


def _leaves_room(size: int, history: History) -> bool:
    outcome = history.passed[size]
    return (
        not outcome.is_strained
        and (outcome.peak_bytes or 0) <= SAFE_SHARE * history.budget_bytes
        and (history.first_failed is None or size <= SAFE_SHARE * history.first_failed)
    )


def _largest_with_room(history: History) -> int:
    """Predict the largest size that leaves room."""
    cramped = [size for size in history.passed if not _leaves_room(size, history)]
    smallest_cramped = min([*cramped, *history.sizes("too_big")])
    by_rows = int(SAFE_SHARE * smallest_cramped)
    by_model = history.predict_largest(budget_share=SAFE_SHARE)
    return by_rows if by_model is None else min(by_rows, by_model)
