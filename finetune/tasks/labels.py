"""The labels of a table: their names, their order, and several of them in one text."""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import ChunkedArray as Column

BAR = "|"
# In lower case, as pandas reads and writes them.
MISSING = ("nan", "na", "n/a", "#n/a", "<na>", "null", "none")
# And what people write for a label that is missing.
MISSING_CLASSES = {*MISSING, "-", "--", "?", "unknown", "missing", "n.a.", "nil", "undefined"}
# What a message lists.
MAX_LISTED, MAX_LABEL_LENGTH = 20, 60
# Spaces, and the zero-width characters that web pages and spreadsheets leave beside words.
EDGES = r"^[\s\u200b\u2060\ufeff]+|[\s\u200b\u2060\ufeff]+$"
LIST_SEPARATORS = f"{BAR};,"
# Python can't convert a longer exponent.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?"


def is_number(value: str) -> bool:
    """Return whether a text is a decimal number.

    >>> is_number("-3.0"), is_number(".5"), is_number("1e3"), is_number("nan")
    (True, True, True, False)
    """
    return re.fullmatch(NUMBER, value) is not None


def name_classes(labels: Iterable[str]) -> dict[str, str]:
    """Return the class of each label: without spaces around it, a whole number without ``.0``.

    A column of whole numbers with gaps comes out of pandas as 3.0 and the like.

    >>> name_classes([" a", "3.0", "0.2", "007"])
    {' a': 'a', '3.0': '3', '0.2': '0.2', '007': '007'}
    """
    stripped = {label: re.sub(EDGES, "", label) for label in labels}
    return {label: re.sub(r"^([+-]?\d+)\.0+$", r"\1", name) for label, name in stripped.items()}


def distinct_values(columns: "Iterable[Column]") -> list[str]:
    """Return the texts of some columns, each once, in order of appearance."""
    return list(dict.fromkeys(value for column in columns for value in column.unique().to_pylist()))


def flat_values(column: "Column") -> "Column":
    """Return the values of a column, those of lists one after another."""
    import pyarrow
    import pyarrow.compute as pc

    return pc.list_flatten(column) if pyarrow.types.is_list(column.type) else column


def map_values(
    column: "Column", convert: Callable[[Any], Any], *, arrow_type: Any = "string"
) -> "Column":
    """Apply a function to each distinct value of a column, or of its lists, once."""
    import pyarrow
    import pyarrow.compute as pc

    if pyarrow.types.is_list(column.type):
        return map_lists(column, lambda flat: map_values(flat, convert, arrow_type=arrow_type))
    known = column.unique()
    values = pyarrow.array(map(convert, known.to_pylist()), arrow_type)
    return pc.take(values, pc.index_in(column, value_set=known))


def find_odd_names(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield names that may mean the same class, with a suggestion.

    >>> [found for found, _ in find_odd_names(["Good", "good", "bad"])]
    ["classes that differ in case alone: 'Good', 'good'"]
    """
    names = list(names)
    counts = Counter(name.casefold() for name in names)
    if alike := [name for name in names if counts[name.casefold()] > 1]:
        found = f"classes that differ in case alone: {', '.join(map(repr, alike))}"
        yield found, "write them in one way if they are one class"


def find_missing_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names that may mean a missing label, with a suggestion: -1 beside 0, 1, 2 and so on.

    >>> [found for found, _ in find_missing_names(["bad", "NaN", "?", "-1"])]
    ["classes named as a missing label: 'NaN', '?'"]
    """
    missing = [name for name in names if name.casefold() in MISSING_CLASSES]
    if len(names) > 3 and {*names} == {"-1", *map(str, range(len(names) - 1))}:
        missing.append("-1")
    if missing:
        found = f"classes named as a missing label: {', '.join(map(repr, missing))}"
        yield found, "if the label is missing there, leave it empty, and the rows are skipped"


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels: numbers by their value, then words by the alphabet."""

    def order(label: str) -> tuple[float, str, str]:
        return (float(label) if is_number(label) else math.inf, label.casefold(), label)

    return sorted(set(labels), key=order)


def find_separator(labels: Iterable[str]) -> str | None:
    """Return the separator of several labels in a row, or None if each row has one label.

    A comma in names, as in "Congo, Republic", separates nothing: its parts do not recur.
    """
    distinct = {label for label in labels if not _is_list(label)}
    for separator in LIST_SEPARATORS:
        lists = [label for label in distinct if separator in label]
        parts = Counter(part.strip() for label in lists for part in label.split(separator))
        known = [part for part, count in parts.items() if part in distinct or count > 1]
        recurs = len(lists) > 1 and 2 * len(known) >= len(parts)
        if recurs or (separator == BAR and lists and distinct.issuperset(parts)):
            return separator
    return None


def _is_list(label: str) -> bool:
    return label.startswith("[") and label.endswith("]")


def are_lists(labels: Iterable[str]) -> bool:
    """Return whether labels are lists: all of them, or some, with quotes."""
    labels = list(labels)
    lists = list(filter(_is_list, labels))
    has_quotes = any(quote in text for text in lists for quote in "'\"")
    return bool(lists) and (has_quotes or len(lists) == len(labels))


def split_labels(label: str, separator: str | None) -> list[str]:
    """Return the labels of a row, without spaces around them; none of an empty text."""
    text = label.strip()
    parts: Iterable[object] = text.split(separator) if separator else [text]
    if _is_list(text):
        parts = (part.strip(" '\"") for part in text[1:-1].split(","))
        for read in (ast.literal_eval, json.loads):
            # A list may be nested deeper than either follows.
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                parts = read(text)
    names = (str(part).strip() for part in parts if part is not None)
    return [name for name in names if name]


def map_lists(lists: "Column", convert: "Callable[[pyarrow.Array], pyarrow.Array]") -> "Column":
    """Return lists of the same lengths whose values are converted; a null stays one."""
    import pyarrow
    import pyarrow.compute as pc

    converted = []
    for chunk in lists.chunks if isinstance(lists, pyarrow.ChunkedArray) else [lists]:
        lengths = pc.fill_null(pc.list_value_length(chunk), 0)
        ends = pc.cumulative_sum(lengths.cast("int32"))
        offsets = pyarrow.concat_arrays([pyarrow.array([0], "int32"), ends])
        values = convert(chunk.flatten())
        converted.append(pyarrow.ListArray.from_arrays(offsets, values, mask=chunk.is_null()))
    return pyarrow.chunked_array(converted)


def listed_counts(counts: Mapping[str, int]) -> str:
    """Return the first of some labels and their rows: ``'b' (2), 'c' (1) and 3 others``."""
    listed = [f"{label[:MAX_LABEL_LENGTH]!r} ({count:,})" for label, count in counts.items()]
    others = len(listed) - MAX_LISTED
    return ", ".join(listed[:MAX_LISTED]) + (f" and {others:,} others" if others > 0 else "")
