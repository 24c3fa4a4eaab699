"""How far a share of some rows may be from that of all rows like them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of a normal distribution, 95 % lie within so many standard errors.
ERRORS_OF_95 = 1.959964

Counts = NDArray[np.integer[Any]] | float


def wilson_interval(
    right: Counts, rows: Counts, *, errors: float = ERRORS_OF_95
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return between which shares of right answers the true one lies.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference, JASA 1927. It
    holds for few rows and for shares near 0 and 1 too, where one standard error does not.

    Args:
        right: How many answers are right.
        rows: Of how many, one or more.
        errors: Standard errors to each side.

    >>> low, high = wilson_interval(95, 100)
    >>> round(float(low), 3), round(float(high), 3)
    (0.888, 0.978)
    """
    share, squared = np.asarray(right / rows, np.float64), errors**2
    middle = share + squared / (2 * rows)
    half = errors * np.sqrt(share * (1 - share) / rows + squared / (4 * rows**2))
    # Rounding may leave a little less than 0.
    low = np.maximum(middle - half, 0.0)
    return low / (1 + squared / rows), (middle + half) / (1 + squared / rows)


def format_interval(share: float, rows: int) -> str:
    """Return the 95% interval of a share of rows, such as ``88.8–97.8%``; a dash without rows."""
    if not rows:
        return "–"
    low, high = wilson_interval(share * rows, rows)
    return f"{100 * low:.1f}–{100 * high:.1f}%"
