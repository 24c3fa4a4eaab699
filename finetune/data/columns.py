"""Which column of a table holds the texts, and which one their classes."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NamedTuple

import pyarrow
import pyarrow.compute as pc

from finetune.errors import DataError, DataNotFound, DataUnreadable, UsageError

# Names that say what a column holds; the first of each leaves no doubt.
TEXT_NAMES = (
    *("text", "sentence", "question", "review", "content", "comment", "message", "tweet"),
    *("utterance", "query", "document", "description", "headline", "title", "body"),
)
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "intent", "sentiment", "emotion"),
    *("topic", "y", "label_coarse", "coarse_label"),
)

NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?"


class Columns(NamedTuple):
    """The names of the two columns that count."""

    text: str
    label: str


def choose_columns(
    values: pyarrow.Table, *, text: str | None, label: str | None, table: str
) -> Columns:
    """Return the columns of the texts and of their classes, guessed where they are not named.

    A name that says what a column holds decides. Without one, the label is the column with few
    distinct values and the text, of the columns that hold more than numbers, the one with the
    longest values.

    Args:
        values: The columns, as text.
        text: Name of the texts' column; ``None`` to guess it.
        label: Name of the classes' column; ``None`` to guess it.
        table: What errors call the table.

    Raises:
        UsageError: If both names are the same.
        DataNotFound: If a column that is named is not there, or none looks like the one to guess.
        DataUnreadable: If what stands for the columns' names is a row of values.
        DataError: If several columns look like the one to guess.
    """
    for option, name in (("--text-column", text), ("--label-column", label)):
        if name is not None and name not in values.column_names:
            raise _unknown(name, values, option=option, table=table)
    if text is not None and text == label:
        raise UsageError(
            f"--text-column and --label-column are both {text!r}", remedy="name two columns"
        )
    text = text or _find_by_name(TEXT_NAMES, values, without=label, option="--text-column")
    label = label or _find_by_name(LABEL_NAMES, values, without=text, option="--label-column")
    if text is None or label is None:
        _refuse_values_as_names(values, table=table)
    label = label or _find_few_values(values, without=text, table=table)
    text = text or _find_longest(values, without=label, table=table)
    return Columns(text, label)


def is_number(value: str) -> bool:
    """Return whether a text is a decimal number.

    >>> is_number("-3.0"), is_number("1e3"), is_number("nan")
    (True, True, False)
    """
    return re.fullmatch(NUMBER, value) is not None


def _find_by_name(
    known: Sequence[str], values: pyarrow.Table, *, without: str | None, option: str
) -> str | None:
    names = values.column_names
    plain_names = {name: re.sub(r"[\s-]", "_", name.strip().casefold()) for name in names}
    found = [name for name in names if plain_names[name] in known and name != without]
    certain = [name for name in found if plain_names[name] == known[0]]
    candidates = certain or found
    if len(candidates) > 1:
        raise _ambiguous(candidates, option=option)
    return candidates[0] if candidates else None


def _find_few_values(values: pyarrow.Table, *, without: str | None, table: str) -> str:
    """Return the one column whose values recur: there are two, or each comes three times."""
    candidates = []
    rows = len(values)
    for name in values.column_names:
        distinct = len(set(pc.unique(values[name]).to_pylist()) - {""})
        if name != without and 2 <= distinct <= max(2, rows // 3) and distinct < rows:
            candidates.append(name)
    return _only(candidates, values, option="--label-column", holds="classes", table=table)


def _find_longest(values: pyarrow.Table, *, without: str, table: str) -> str:
    """Return the one column whose texts are more than twice as long as any other's."""
    lengths = {
        name: pc.mean(pc.utf8_length(values[name])).as_py()
        for name in values.column_names
        if name != without
        and not pc.all(pc.match_substring_regex(values[name], f"^({NUMBER})?$")).as_py()
    }
    candidates = [name for name in lengths if 2 * lengths[name] >= max(lengths.values())]
    return _only(candidates, values, option="--text-column", holds="texts", table=table)


def _only(
    candidates: Sequence[str], values: pyarrow.Table, *, option: str, holds: str, table: str
) -> str:
    if not candidates:
        raise DataNotFound(
            f"no column of {table} seems to hold {holds}",
            remedy=f"name it with {option}; there are: {_listed(values.column_names)}",
        )
    if len(candidates) > 1:
        raise _ambiguous(candidates, option=option)
    return candidates[0]


def _refuse_values_as_names(values: pyarrow.Table, *, table: str) -> None:
    """Refuse a file whose first row was taken for the names of its columns."""
    for name in values.column_names:
        if is_number(name) or pc.index(values[name], name).as_py() >= 0:
            raise DataUnreadable(
                f"{table} has no header row: it begins with {_listed(values.column_names)}",
                remedy="put a line such as text,label at its top, or, if those are names, choose"
                " with --text-column and --label-column",
            )


def _unknown(name: str, values: pyarrow.Table, *, option: str, table: str) -> DataNotFound:
    names = {known.casefold(): known for known in values.column_names}
    near = get_close_matches(name.casefold(), names, n=1)
    guess = f"did you mean {names[near[0]]!r}? " if near else ""
    return DataNotFound(
        f"{table} has no column {name!r} of texts or numbers",
        remedy=f"{guess}{option} takes one of: {_listed(values.column_names)}",
    )


def _ambiguous(candidates: Sequence[str], *, option: str) -> DataError:
    kind = option.strip("-").partition("-")[0]
    return DataError(
        f"can't tell which column is the {kind}: {_listed(candidates)}",
        remedy=f"choose one with {option}",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:60]) for name in names)
