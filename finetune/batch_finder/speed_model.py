"""Which batch size is fast enough, and which untried one might be, from a few measured speeds.

Speeds are examples per second by batch size, at least one.
"""

import math
from collections.abc import Mapping

# A size this close to the best speed, as a share of it, counts as fastest.
FASTEST_SHARE = 0.97
# An untried size aims higher, since speeds are measured with an error of a per cent.
AIM_SHARE = 0.98


def fastest_size(speeds: Mapping[int, float]) -> int:
    """Return the smallest batch size whose speed is within 3% of the best.

    >>> fastest_size({8: 70.0, 32: 98.0, 128: 100.0})
    32
    """
    best = max(speeds.values())
    return min(size for size, speed in speeds.items() if speed >= FASTEST_SHARE * best)


def promising_size(speeds: Mapping[int, float]) -> int:
    """Predict the smallest size that is about as fast as the fastest.

    Between the fastest size and the next smaller one, which is slower, the seconds of an update are
    taken to lie on a line: a fixed cost and one for each example. Where no smaller one is known,
    the fastest size itself is returned.

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
    speed = min(AIM_SHARE * max(speeds.values()), speeds[fast])
    return min(fast, math.ceil(speed * fixed_seconds / (1 - speed * example_seconds)))
