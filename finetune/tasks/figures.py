"""Metrics and rows as people read them: figures, tables and texts of a report."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Rows that a report shows; then those of a group, and all.
MAX_MISTAKES = 20
MAX_OF_A_GROUP = 10
MAX_LISTED = 400
MAX_CHARACTERS = 500


@dataclass(frozen=True)
class Figure:
    """A metric as people read it.

    Args:
        key: Its name in ``Scores.metrics``.
        name: Its name in a sentence.
        type: Its name on the Hub.
        value: A share in 0..1 if it ``is_share``.
        note: What it is to be compared with.
        is_share: Whether it is shown in percent.
        has_curve: Whether it is drawn over the steps; all that are have one scale.
    """

    key: str
    name: str
    type: str
    value: float
    note: str = ""
    is_share: bool = True
    has_curve: bool = True

    def __str__(self) -> str:
        return percent(self.value) if self.is_share else plain(self.value)


@dataclass(frozen=True)
class Table:
    """Rows that a report shows; the cells after the first ``text_columns`` are numbers.

    Args:
        groups: The groups of each row, of which a page shows one alone: their titles by id, which
            is ``class-N`` or ``cell-N-M`` for the mistakes of a class or a cell of the confusion
            matrix. Rows after the first ``MAX_MISTAKES`` are shown only there.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    note: str = ""
    groups: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Matrix:
    """Rows of each true class, by name, in each predicted class: counts of [classes, classes]."""

    names: Sequence[str]
    counts: Sequence[Sequence[int]]


def plain(value: float, *, sign: Literal["", "+"] = "", digits: int = 4) -> str:
    """Return a number as short as it reads well: ``1,500``, ``0.25``, ``5e-05``."""
    return f"{value:{sign},.0f}" if abs(value) >= 1e3 else f"{value:{sign}.{digits}g}"


def percent(share: float) -> str:
    """Return a share of 0..1 in percent, such as ``97.2%``."""
    return f"{100 * share:.1f}%"


def text_of(row: Mapping[str, Any]) -> str:
    """Return the text of a row of ``predictions.jsonl``, or a pair with a bar between its texts.

    A text is cut where a report would become too long.
    """
    texts = (row[name] for name in ("text", "text_pair") if name in row)
    return " | ".join(
        one if len(one) <= MAX_CHARACTERS else f"{one[:MAX_CHARACTERS]} …" for one in texts
    )


def choose_listed(groups: Iterable[Collection[str]]) -> list[int]:
    """Return which of some ranked rows a report lists: the first, and the first of each group."""
    seen: Counter[str] = Counter()
    listed = []
    for row, own in enumerate(groups):
        seen.update(list(own))
        if row < MAX_MISTAKES or min(map(seen.__getitem__, own)) <= MAX_OF_A_GROUP:
            listed.append(row)
    return listed[:MAX_LISTED]
