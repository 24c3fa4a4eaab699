"""Which rows repeat the text of another: for splits without leaks, and for what is odd in them."""

from collections import defaultdict
from collections.abc import Iterable


def normal_form(text: str) -> str:
    r"""Return what texts share that count as the same: they differ in case and spaces only.

    >>> normal_form("What is\tTHE  sun ? ")
    'what is the sun ?'
    """
    return " ".join(text.casefold().split())


def rows_by_text(texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of the rows of each text, by its normal form, in the rows' order."""
    rows_of_text: dict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        rows_of_text[normal_form(text)].append(row)
    return dict(rows_of_text)
