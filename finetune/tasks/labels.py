"""The labels of a table: their names, their order, and what is no single class for each row."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal

from finetune.errors import DataError

# Ratings in half steps from 0 to 10 have fewer.
MOST_FRACTIONAL_CLASSES = 21
LIST_SEPARATORS = ",;|"
NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?"


def is_number(value: str) -> bool:
    """Return whether a text is a decimal number.

    >>> is_number("-3.0"), is_number("1e3"), is_number("nan")
    (True, True, False)
    """
    return re.fullmatch(NUMBER, value) is not None


def name_classes(labels: Iterable[str]) -> dict[str, str]:
    """Return the class of each label: without spaces around it, and one for each number.

    Numbers of the same value are one class, whose name is the shortest spelling.

    >>> name_classes([" a", "3.0", "0.2", "0.20", "007"])
    {' a': 'a', '3.0': '3', '0.2': '0.2', '0.20': '0.2', '007': '007'}
    """
    classes: dict[str, str] = {}
    spellings: dict[Decimal, str] = {}
    for label in labels:
        # A column of whole numbers with gaps comes out of pandas as 3.0 and the like.
        classes[label] = re.sub(r"^([+-]?\d+)\.0+$", r"\1", label.strip())
    for name in sorted(filter(is_number, classes.values()), key=lambda name: (len(name), name)):
        spellings.setdefault(Decimal(name), name)
    return {
        label: spellings[Decimal(name)] if is_number(name) else name
        for label, name in classes.items()
    }


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: numbers by their value, then words by the alphabet.

    >>> sort_classes(["b", "10", "9", "a", "B", "10"])
    ['9', '10', 'a', 'B', 'b']
    """
    return sorted(
        set(labels),
        key=lambda label: (
            (0, float(label), "", label) if is_number(label) else (1, 0.0, label.casefold(), label)
        ),
    )


def refuse_other_tasks(labels: Iterable[str], *, column: str, table: str) -> None:
    """Raise ``DataError`` if labels are scores, or lists of several labels."""
    distinct = set(labels)
    numbers = [label for label in distinct if is_number(label)]
    fractions = sorted(n for n in numbers if Decimal(n) != Decimal(n).to_integral_value())
    if fractions and len(distinct) == len(numbers) > MOST_FRACTIONAL_CLASSES:
        raise DataError(
            f"{column!r} of {table} holds scores, {len(distinct)} numbers such as {fractions[0]}:"
            " regression is not supported",
            remedy="put the scores into a few classes, or name another --label-column",
        )
    for separator in LIST_SEPARATORS:
        lists = sorted(label for label in distinct if separator in label)
        parts = Counter(part.strip(" []'\"") for label in lists for part in label.split(separator))
        known = [part for part, count in parts.items() if part in distinct or count > 1]
        if len(lists) > 1 and 2 * len(known) >= len(parts):
            raise DataError(
                f"{column!r} of {table} holds several labels in a row, such as {lists[0]!r}:"
                " multi-label classification is not supported",
                remedy="keep one label for each row, or name another --label-column",
            )


def listed_counts(counts: Mapping[str, int]) -> str:
    """Return labels and their rows in a line: ``'b' (2), 'c' (1)``."""
    return ", ".join(f"{label!r} ({count:,})" for label, count in counts.items())
