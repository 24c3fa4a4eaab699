"""Normalizes and sorts labels, and splits several labels in one cell."""

import ast
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from finetune.errors import DataError

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import ChunkedArray as Column

BAR = "|"
# Missing values in pandas, in lower case.
MISSING = ("nan", "na", "n/a", "#n/a", "<na>", "null", "none")
# Words that mean a missing label.
MISSING_CLASSES = {*MISSING, "-", "--", "?", "unknown", "missing", "n.a.", "nil", "undefined"}
# The fractional parts of ratings in half steps.
HALVES = {"0", "5", "00", "25", "50", "75"}
# Why accuracy on most rows of finetune label doesn't transfer to other texts.
HARD = "because they are hard or differ from the others"
# Limits of lists in messages.
MAX_LISTED, MAX_LABEL_LENGTH = 20, 60
# Spaces, and the zero-width characters that web pages and spreadsheets leave around words.
EDGES = r"^[\s\u200b\u2060\ufeff]+|[\s\u200b\u2060\ufeff]+$"
# Separators of several labels in a row. For these, the parts need not be labels of
# other rows.
FREE_SEPARATORS = (BAR, ";", ",", "\n", "#")
SEPARATORS = (
    *FREE_SEPARATORS,
    *("/", "+", "&", "\u3001", "\uff0c", "\uff1b", "·", "•", "\t", " - ", " "),
    *(f" {word} " for word in ("and", "und", "et", "y", "e", "en", "och", "og", "i", "и")),
)
# Python can't convert a longer exponent.
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,9})?"
# Lists in one cell as Python, numpy and JSON write them.
BRACKETED = r"\[.*\]|\{.*\}|\(\s*\)|\(\s*['\"].*\)|\(\d+\s*,[\d\s,]*\)"
QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""


def is_number(value: str) -> bool:
    """Return whether a text is a decimal number."""
    return re.fullmatch(NUMBER, value) is not None


def name_classes(labels: Iterable[str]) -> dict[str, str]:
    """Return the class name for each label: NFC, stripped, whole numbers without .0.

    pandas writes a column of whole numbers with missing values as 3.0 and so on.
    """
    composed = {label: unicodedata.normalize("NFC", label) for label in labels}
    stripped = {label: re.sub(EDGES, "", name) for label, name in composed.items()}
    return {label: re.sub(r"^([+-]?\d+)\.0*$", r"\1", name) for label, name in stripped.items()}


def values_of_classes(names: Iterable[str], column: Iterable[Any]) -> dict[str, Any]:
    """Return the value of each class in the type of a label column, or {} for a text column.

    >>> values_of_classes(["1", "2"], [1, None]), values_of_classes(["1", "2"], ["", "1.0"])
    ({'1': 1, '2': 2}, {'1': '1.0', '2': '2.0'})
    """
    lists = (value if isinstance(value, list) else [value] for value in column)
    values = [item for items in lists for item in items if item not in (None, "") and item == item]
    convert: dict[frozenset[type], Callable[[str], Any]] = {
        frozenset({int}): int,
        frozenset({float}): float,
        frozenset({int, float}): lambda name: float(name) if "." in name else int(name),
        frozenset({bool}): {"true": True, "false": False}.__getitem__,
    }
    kinds = frozenset(map(type, values))
    if kinds == {str} and all(re.fullmatch(r"[+-]?\d+\.0", value) for value in values):
        convert[kinds] = lambda name: f"{int(name)}.0"
    with suppress(KeyError, ValueError):  # KeyError also for other types
        return {name: convert[kinds](name) for name in names}
    return {}


def name_as_text(name: str) -> str:
    """Convert a class name to words."""
    return re.sub(r"[_./-]+", " ", name).strip() or name


def distinct_values(columns: "Iterable[Column]") -> list[str]:
    """Return the distinct texts in columns, in order of appearance."""
    return list(dict.fromkeys(value for column in columns for value in column.unique().to_pylist()))


def flat_values(column: "Column") -> "Column":
    """Flatten the lists in a column."""
    import pyarrow
    import pyarrow.compute as pc

    return pc.list_flatten(column) if pyarrow.types.is_list(column.type) else column


def map_values(
    column: "Column", convert: Callable[[Any], Any], *, arrow_type: Any = "string"
) -> "Column":
    """Apply a function once to each distinct value of a column or of its lists."""
    import pyarrow
    import pyarrow.compute as pc

    if pyarrow.types.is_list(column.type):
        return map_lists(column, lambda flat: map_values(flat, convert, arrow_type=arrow_type))
    known = column.unique()
    values = pyarrow.array(map(convert, known.to_pylist()), arrow_type)
    return pc.take(values, pc.index_in(column, value_set=known))


def find_odd_names(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield findings about classes that may be the same or a missing label, with suggestions."""
    missing = [name for name in names if name.casefold() in MISSING_CLASSES]
    if len(names) > 3 and {*names} == {"-1", *map(str, range(len(names) - 1))}:
        missing.append("-1")
    if missing:
        finding = f"class names that usually mean a missing label: {', '.join(map(repr, missing))}"
        yield finding, "leave these labels empty if they are missing: such rows are skipped"
    plain = {name: re.sub(r"[\s_-]+", " ", name).casefold() for name in names}
    counts = Counter(plain.values())
    if alike := [repr(name) for name in plain if counts[plain[name]] > 1]:
        listed = ", ".join(alike[:MAX_LISTED])
        finding = f"classes that differ only in case, spaces or dashes: {listed}"
        yield finding, "spell them the same if they are one class, or merge them with --label-map"


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Sort distinct labels: numbers by value, then words alphabetically."""

    def order(label: str) -> tuple[float, str, str]:
        return (float(label) if is_number(label) else math.inf, label.casefold(), label)

    return sorted(set(labels), key=order)


def find_separator(labels: Iterable[str]) -> str | None:
    """Find the separator of several labels in a row. Return None if each row has one label.

    The parts must be labels of other rows: a comma within names, as in "Congo, Republic", is not a
    separator.
    """
    distinct = [label for label in labels if not is_list(label)]
    for separator in SEPARATORS:
        if not any(separator in label for label in distinct):
            continue
        parts = [names for label in distinct if (names := split_labels(label, separator))]
        single = {names[0] for names in parts if len(names) == 1}
        several = [names for names in parts if len(names) > 1]
        known = sum(single.issuperset(names) for names in several)
        if several and known == len(several) and (len(several) > 1 or separator != " "):
            return separator
        if separator in FREE_SEPARATORS and len(several) > 1:
            counts = Counter(name for names in several for name in names)
            recurring = sum(name in single or count > 1 for name, count in counts.items())
            if 2 * recurring >= len(counts):
                return separator
        elif len(several) > 2 and 3 * known >= 2 * len(several):
            return separator
    return None


def is_list(label: str) -> bool:
    """Return whether a cell may contain a list written by a program."""
    return re.fullmatch(BRACKETED, label.strip(), re.DOTALL) is not None


def are_lists(labels: Iterable[str]) -> bool:
    """Return whether labels are lists: all of them, or some, with quotes."""
    labels = list(labels)
    lists = list(filter(is_list, labels))
    has_quotes = any(quote in text for text in lists for quote in "'\"")
    return bool(lists) and (has_quotes or len(lists) == len(labels))


def split_labels(label: str, separator: str | None) -> list[str]:
    """Split the labels of a row and strip them. An empty text becomes an empty list."""
    text = label.strip()
    parts: Iterable[object] = [text]
    if is_list(text):
        parts = _read_list(text)
    elif separator:
        parts = text.split(separator)
        if separator == "\n":
            parts = [part.strip(" \t-•*") for part in parts]
    is_missing = (part is None or part != part for part in parts)
    names = (str(part).strip() for part, skip in zip(parts, is_missing, strict=True) if not skip)
    return [name for name in names if name]


def _read_list(text: str) -> list[object]:
    """Parse a list, set or array written as text."""
    body = text[1:-1].strip()
    if re.fullmatch(rf"(?:(?:{QUOTED})[\s,]*)*", body, re.DOTALL):
        # numpy writes no commas between the values of an array.
        return [ast.literal_eval(value.replace("\n", "\\n")) for value in re.findall(QUOTED, body)]
    content: Any = None
    for read in (ast.literal_eval, json.loads):
        # Both parsers fail for very deeply nested lists.
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            content = read(text)
            break
    if isinstance(content, dict) and all(flag in (0, 1, None) for flag in content.values()):
        content = [name for name, flag in content.items() if flag]
    if isinstance(content, list | tuple | set | dict):
        if isinstance(content, dict) or any(isinstance(value, list | dict) for value in content):
            raise DataError(
                f"the label {text[:MAX_LABEL_LENGTH]!r} is neither a list of classes nor 0 or 1 "
                "for each",
                remedy='write the labels of a row as a list, such as ["a", "b"]',
            )
        return [*content]
    if "," not in body and re.fullmatch(r"[\d\s.+-]+", body):
        return [*body.split()]
    return [part.strip(" '\"") for part in body.split(",")]


def has_decimal_commas(labels: Iterable[str]) -> bool:
    """Return whether commas are decimal. In 0,15 they are not if 0 and 15 are labels too."""
    distinct = set(labels)
    pairs = [label.split(",") for label in distinct if re.fullmatch(r"[+-]?\d+,\d+", label)]
    whole = {label for label in distinct if re.fullmatch(r"[+-]?\d+", label)}
    if not pairs or len(pairs) + len(whole) < len(distinct):
        return False
    heads, fractions = map(set, zip(*pairs, strict=True))
    if all(len(fraction) == 3 for fraction in fractions):  # thousands
        return False
    parts = heads | fractions
    return fractions <= HALVES or 2 * len(parts & whole) < len(parts)


def map_lists(lists: "Column", convert: "Callable[[pyarrow.Array], pyarrow.Array]") -> "Column":
    """Convert the values in lists, keeping the list lengths. Null stays null."""
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


def listed(names: Sequence[str]) -> str:
    """Format the first names of a list: ``a, b and 3 others``."""
    others = f" and {len(names) - MAX_LISTED:,} others" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + others


def listed_counts(counts: Mapping[str, int]) -> str:
    """Format the first labels with their rows: ``'b' (2), 'c' (1) and 3 others``."""
    listed = [f"{label[:MAX_LABEL_LENGTH]!r} ({count:,})" for label, count in counts.items()]
    others = len(listed) - MAX_LISTED
    return ", ".join(listed[:MAX_LISTED]) + (f" and {others:,} others" if others > 0 else "")
