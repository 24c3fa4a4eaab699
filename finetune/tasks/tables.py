"""Formats numbers, rows and results for reports, commands and Python."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.files import escape_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Mistakes in a report: shown at first, and available for filtering by group.
MAX_MISTAKES = 20
MAX_LISTED = 400
MAX_CHARACTERS = 500
# In the repr of a result.
MAX_REPR_ROWS, MAX_REPR_CHARACTERS = 4, 158
MAX_NAME = 40
# 95% of a normal distribution is within this many standard deviations.
Z_95 = 1.959964


@dataclass(frozen=True)
class Table:
    """Rows of a report. The cells after the first ``text_columns`` are numbers.

    ``groups`` maps IDs, such as ``cell-N-M``, to titles. A page can show a single group.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    note: str = ""
    groups: Sequence[Mapping[str, str]] = ()


def format_number(value: float, *, sign: Literal["", "+"] = "", digits: int = 4) -> str:
    """Format a number in few characters: ``1,500``, ``0.25``, ``5e-05``."""
    return f"{value:{sign},.0f}" if abs(value) >= 1e3 else f"{value:{sign}.{digits}g}"


def format_value(value: Any) -> str:
    """Format a value: ``on``, ``1,500``, ``a, b``. None becomes a dash."""
    match value:
        case None:
            return "–"
        case bool():
            return "on" if value else "off"
        case int():
            return f"{value:,}"
        case float():
            return format_number(value)
        case list() | tuple():
            return ", ".join(map(format_value, value)) or "none"
        case Mapping():
            return ", ".join(f"{key}: {format_value(item)}" for key, item in value.items())
    return str(value)


def format_cell(value: Any) -> str:
    """Format a value for a table cell: row numbers unchanged, labels joined by ``|``."""
    if isinstance(value, list | tuple):
        return "|".join(map(str, value))
    return format_number(value) if isinstance(value, float) else str(value)


def format_rate(examples_per_second: float) -> str:
    """Format a speed with at least two significant digits."""
    digits = 0 if examples_per_second >= 10 else 1 if examples_per_second >= 1 else 2
    return f"{examples_per_second:,.{digits}f} examples/s"


def duration(seconds: float) -> str:
    """Format a time, such as ``9.5 s``, ``42 s``, ``24 min 13 s`` or ``2 h 14 min``."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_seconds} s"


def percent(fraction: float, *, digits: int = 1) -> str:
    """Format a fraction in percent, such as ``97.2%``."""
    return f"{100 * fraction:.{digits}f}%"


def format_interval(fraction: float, rows: int, *, digits: int = 1) -> str:
    """Format the 95% interval of a fraction of rows, such as ``88.8–97.8%``, or a dash."""
    if not rows:
        return "–"
    low, high = wilson_interval(fraction * rows, rows)
    return f"{100 * low:.{digits}f}–{100 * high:.{digits}f}%"


def capitalize(text: str) -> str:
    """Capitalize the first letter of a text: ``Macro F1``."""
    return text[:1].upper() + text[1:]


def quote_name(name: str) -> str:
    """Format a class name for a sentence: as Markdown code, on one line, shortened if long."""
    line = " ".join(name.split()).replace("`", "'")
    return f"`{line if len(line) <= MAX_NAME else line[: MAX_NAME - 1] + '…'}`"


def wilson_interval(
    right: "NDArray[Any] | float", rows: "NDArray[Any] | float", *, errors: float = Z_95
) -> "tuple[NDArray[Any], NDArray[Any]]":
    """Return the Wilson interval (JASA 1927) of a fraction of rows, ``errors`` to each side."""
    import numpy as np

    fraction, squared = np.asarray(right / rows, np.float64), errors**2
    middle = fraction + squared / (2 * rows)
    half = errors * np.sqrt(fraction * (1 - fraction) / rows + squared / (4 * rows**2))
    # Rounding may leave a little less than 0.
    low = np.maximum(middle - half, 0.0)
    return low / (1 + squared / rows), (middle + half) / (1 + squared / rows)


def text_of(row: Mapping[str, Any]) -> str:
    """Return the shortened text, or both texts, of a row of ``predictions.jsonl``."""
    texts = (row[name] for name in ("text", "text_pair") if name in row)
    return " | ".join(map(shorten_text, texts))


def full_text(row: Mapping[str, Any]) -> str:
    """Return the whole text, or both texts, of a row of ``predictions.jsonl``."""
    return " | ".join(row[name] for name in ("text", "text_pair") if name in row)


def shorten_text(text: str) -> str:
    """Shorten a text if it is long."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


class DisplayMixin(ABC):
    """A result with a repr of at most five lines. A dataclass must set repr=False."""

    # Warnings of the Python API function that returned the result.
    warnings: Sequence[str] = ()

    @abstractmethod
    def records(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the table, the most important first, as values by name."""

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} {getattr(self, 'output_dir', '')}".rstrip()]
        for row in self.records()[:MAX_REPR_ROWS]:
            cells = (
                f"{name} {format_value(value)}" for name, value in row.items() if value is not None
            )
            lines.append(f"  {', '.join(cells)}")
        return "\n".join(escape_line(line)[:MAX_REPR_CHARACTERS] for line in lines)

    def to_pandas(self) -> Any:
        """Convert the table to a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(list(self.records()))

    def _repr_html_(self) -> str:
        from html import escape

        title = escape(repr(self).partition("\n")[0])
        return f"<p>{title}</p>{self.to_pandas().to_html(max_rows=20, index=False)}"


class RunResultMixin(DisplayMixin, os.PathLike[str]):
    """The results of one or several runs. Functions accept them instead of a run folder."""

    output_dir: str

    def __post_init__(self) -> None:
        # The working directory may change.
        object.__setattr__(self, "_path", os.path.abspath(self.output_dir))

    def __fspath__(self) -> str:
        return str(vars(self)["_path"])

    def predict(self, texts: Any, **options: Any) -> Any:
        """Classify texts with the best model, like ``finetune.predict``."""
        import finetune

        return finetune.predict(self, texts, **options)

    def evaluate(self, **options: Any) -> Any:
        """Evaluate the best model, like ``finetune.evaluate``."""
        import finetune

        return finetune.evaluate(self, **options)
