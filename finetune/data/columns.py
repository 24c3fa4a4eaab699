"""Which column of a table holds the texts, and which one their classes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import log2

import pyarrow
import pyarrow.compute as pc

from finetune.errors import DataError, DataNotFound, UsageError

# Names that say what a column holds; the first of each leaves no doubt.
TEXT_NAMES = (
    *("text", "sentence", "question", "review", "content", "comment", "message", "tweet"),
    *("utterance", "query", "document", "description", "headline", "title", "body"),
)
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "intent", "sentiment", "emotion"),
    *("topic", "y", "label_coarse", "coarse_label", "rating", "stars", "score", "polarity"),
)
# Words in the names of columns that hold neither.
OTHER_WORDS = frozenset(
    (
        *("id", "index", "date", "time", "timestamp", "created", "updated", "url", "link", "user"),
        *("author", "name", "source", "confidence", "count", "latitude", "longitude"),
        *("location", "coord", "gold", "retweet"),
    )
)
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text1", "text2"), ("sentence_a", "sentence_b"), ("text_a", "text_b")),
    *(("question", "sentence"), ("question", "context"), ("question", "passage")),
)
NUMBER = r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?"
DATE = r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?"
SAMPLE_ROWS = 10_000
LONGEST_LABEL = 60
# The best column must be so many times as good as the next one.
CLEAR_LEAD = 2.0
MOST_CANDIDATES = 5


@dataclass(frozen=True)
class Choice:
    """A column, why it was chosen, and the columns that came next."""

    name: str
    reason: str
    runners_up: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the choice as it is reported."""
        others = f"; next: {_listed(self.runners_up)}" if self.runners_up else ""
        return f"{self.name!r} ({self.reason}{others})"


@dataclass(frozen=True)
class Columns:
    """The two columns that are read."""

    text: Choice
    label: Choice


@dataclass(frozen=True)
class _Facts:
    """What a column holds; characters are those of a value that is not empty, on average."""

    name: str
    rows: int
    distinct: int
    empty_share: float
    characters: float
    is_number: bool
    is_fraction: bool
    is_date: bool

    def name_weight(self, known: Sequence[str]) -> float:
        """Return how much the name says that the column is one of the known ones."""
        plain = plain_name(self.name)
        if plain in known:
            return 1000.0 if plain == known[0] else 6.0
        spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", self.name).casefold()
        words = set(re.findall(r"[^\W\d_]+", spaced))
        return (4.0 if words & set(known) else 1.0) * (0.2 if words & OTHER_WORDS else 1.0)


def choose_columns(
    columns: pyarrow.Table, *, text: str | None, label: str | None, table: str
) -> Columns:
    """Return the columns of the texts and of their classes, guessed where they are not named.

    Names and values, all strings, decide together: texts are long and rarely repeat, labels recur.

    Raises:
        UsageError: If both names are the same.
        DataNotFound: If a column that is named is not there, or none looks like the one to guess.
        DataError: If several columns look like the one to guess, or two are a pair of texts.
    """
    names = columns.column_names
    for option, name in (("--text-column", text), ("--label-column", label)):
        if name is not None and name not in names:
            raise _unknown(name, names, option=option, table=table)
    if text is not None and text == label:
        raise UsageError(
            f"--text-column and --label-column are both {text!r}", remedy="name two columns"
        )
    if text is None:
        _refuse_pairs(names, table=table)
    is_guessed = text is None or label is None
    facts = [_facts_of(columns[name], name) for name in names if is_guessed]
    chosen = _choose(facts, label, kind="label", other=text, table=table)
    return Columns(_choose(facts, text, kind="text", other=chosen.name, table=table), chosen)


def choose_text_column(columns: pyarrow.Table, *, text: str | None, table: str) -> str:
    """Return the column of the texts in a table without labels, guessed where it is not named.

    Raises:
        DataNotFound: If the column that is named is not there, or none looks like texts.
        DataError: If several columns look like texts, or two are a pair of texts.
    """
    names = columns.column_names
    if text is None:
        _refuse_pairs(names, table=table)
    elif text not in names:
        raise _unknown(text, names, option="--text-column", table=table)
    facts = [_facts_of(columns[name], name) for name in names]
    return _choose(facts, text, kind="text", other=None, table=table).name


def plain_name(name: str) -> str:
    """Return a column's name in lower case, with underscores."""
    return re.sub(r"[\s-]", "_", name.strip().casefold())


def is_number(value: str) -> bool:
    """Return whether a text is a decimal number.

    >>> is_number("-3.0"), is_number("1e3"), is_number("nan")
    (True, True, False)
    """
    return re.fullmatch(NUMBER, value) is not None


def _facts_of(column: pyarrow.ChunkedArray, name: str) -> _Facts:
    sample = column.slice(0, SAMPLE_ROWS)
    sample = sample.filter(pc.not_equal(sample, ""))

    def every(pattern: str) -> bool:
        return (
            len(sample) > 0 and pc.all(pc.match_substring_regex(sample, f"^({pattern})$")).as_py()
        )

    filled = pc.sum(pc.not_equal(column, "")).as_py() or 0
    is_numeric = every(NUMBER)
    return _Facts(
        name=name,
        rows=len(column),
        distinct=pc.count_distinct(column).as_py() - (filled < len(column)),
        empty_share=1 - filled / len(column),
        characters=pc.sum(pc.utf8_length(column)).as_py() / max(filled, 1),
        is_number=is_numeric,
        is_fraction=is_numeric and not every(r"[+-]?\d+(\.0*)?"),
        is_date=every(DATE),
    )


def _label_score(facts: _Facts) -> float:
    """Return how much a column looks like labels; 0 if it does not."""
    weight = facts.name_weight(LABEL_NAMES)
    recurs = 2 <= facts.distinct <= max(2, facts.rows // 3) and facts.distinct < facts.rows
    is_short = facts.characters <= LONGEST_LABEL and not facts.is_date
    if weight < 6.0 and not (recurs and is_short):
        return 0.0
    weight *= 0.1 if facts.is_fraction else 1.0
    return weight * max(1 - facts.empty_share, 1e-6) / (1 + log2(facts.distinct or 1))


def _text_score(facts: _Facts) -> float:
    """Return how much a column looks like texts; 0 if it does not."""
    weight = facts.name_weight(TEXT_NAMES)
    if weight < 6.0 and (facts.is_number or facts.is_date):
        return 0.0
    share = (1 - facts.empty_share) * facts.distinct / facts.rows
    return weight * (share * facts.characters or 1e-6 * (weight >= 6.0))


def _choose(
    facts: Sequence[_Facts], named: str | None, *, kind: str, other: str | None, table: str
) -> Choice:
    """Return the column that is named, or looks most like texts or labels; never the other one."""
    option = f"--{kind}-column"
    if named is not None:
        return Choice(named, f"named with {option}")
    score, known = (_label_score, LABEL_NAMES) if kind == "label" else (_text_score, TEXT_NAMES)
    scores = {one: score(one) for one in facts if one.name != other}
    ranked = sorted(
        (one for one in scores if scores[one] > 0), key=scores.__getitem__, reverse=True
    )
    if not ranked:
        raise DataNotFound(
            f"no column of {table} seems to hold {'classes' if kind == 'label' else 'texts'}",
            remedy=f"name it with {option}; there are: {_listed(one.name for one in facts)}",
        )
    best = ranked[0]
    close = [one.name for one in ranked if CLEAR_LEAD * scores[one] > scores[best]]
    if len(close) > 1:
        candidates = [one.name for one in ranked[: max(len(close), MOST_CANDIDATES)]]
        raise DataError(
            f"can't tell which column is the {kind}: {_listed(candidates)}",
            remedy=f"choose one with {option}",
        )
    if best.name_weight(known) > 1:
        reason = "its name says so"
    elif kind == "label":
        reason = f"{best.rows:,} rows have {best.distinct:,} different values"
    else:
        reason = f"its values have {best.characters:,.0f} characters on average"
    return Choice(best.name, reason, tuple(one.name for one in ranked[1:3]))


def _refuse_pairs(names: Sequence[str], *, table: str) -> None:
    plain = {name.strip().casefold(): name for name in names}
    for first, second in PAIRS:
        if first in plain and second in plain:
            raise DataError(
                f"{table} has pairs of texts, {plain[first]!r} and {plain[second]!r}, and a model"
                " here reads one text",
                remedy="join them in one column, or choose one with --text-column",
            )


def _unknown(name: str, names: Sequence[str], *, option: str, table: str) -> DataNotFound:
    folded = {known.casefold(): known for known in names}
    near = get_close_matches(name.casefold(), folded, n=1)
    guess = f"did you mean {folded[near[0]]!r}? " if near else ""
    return DataNotFound(
        f"{table} has no column {name!r} of texts or numbers",
        remedy=f"{guess}{option} takes one of: {_listed(names)}",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:60]) for name in names)
