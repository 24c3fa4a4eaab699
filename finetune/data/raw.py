"""What a file of rows holds, before it is known what its columns mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RawTable:
    """The columns of a file, every value as text; what is missing is an empty text.

    Args:
        path: The file.
        values: The values of each column, all of the same number.
        unit: What the file counts its rows in: ``line`` or ``row``.
        numbers: Where each row begins, in that unit, from 1.
        class_names: For columns that come with the names of all their classes, these names.
    """

    path: Path
    values: Mapping[str, Sequence[str]]
    unit: str
    numbers: Sequence[int]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def place(self, row: int) -> str:
        """Return where a row, counted from 0, stands: ``line 7 of reviews.csv``."""
        return f"{self.unit} {self.numbers[row]} of {self.path}"


def as_text(value: str | float | bool | None) -> str:
    """Return a value as text; a whole number has no fraction, whatever its type.

    >>> [as_text(value) for value in ("3.0", 3.0, 2.5, True, float("nan"), None)]
    ['3.0', '3', '2.5', 'true', '', '']
    """
    if value is None or value != value:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
