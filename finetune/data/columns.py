"""Which columns of a table hold the texts, or pairs of texts, and which one their classes."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations, repeat
from math import log2

import pyarrow
import pyarrow.compute as pc

from finetune.data.mapped import map_pieces
from finetune.data.source import DataOptions
from finetune.errors import DataError, DataNotFound, UsageError
from finetune.tasks.labels import NUMBER

# Names that say what a column holds; the first of each leaves no doubt.
TEXT_NAMES = (
    *("text", "sentence", "question", "review", "content", "comment", "message", "tweet"),
    *("utterance", "query", "document", "description", "headline", "title", "body"),
)
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "intent", "sentiment", "emotion"),
    *("topic", "y", "label_coarse", "coarse_label", "rating", "stars", "score", "polarity"),
    "similarity",
)
# What is to be learned: a rating or a score beside it may say something else of the row.
TARGET = "target"
# Words in the names of columns that hold neither.
OTHER_WORDS = frozenset(
    (
        *("id", "index", "date", "time", "timestamp", "created", "updated", "url", "link", "user"),
        *("author", "name", "source", "confidence", "count", "latitude", "longitude"),
        *("location", "coord", "gold", "retweet", "split", "fold", "partition"),
    )
)
# Without spaces and punctuation; the last is "#1 String" and "#2 String", as MRPC's authors wrote.
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text1", "text2"), ("sentencea", "sentenceb"), ("texta", "textb"), ("text", "textpair")),
    *(("question", "sentence"), ("question", "context"), ("question", "passage")),
    ("1string", "2string"),
)
DATE = r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?"
SAMPLE_ROWS = 10_000
# How many values a column has is counted in memory: of a larger table in so many parts of it.
MAX_BYTES, SAMPLE_PARTS = 2**26, 16
# Columns of 0 and 1, one for each class; two may well be something else.
MIN_INDICATORS = 3
YES = pyarrow.array(["1", "true", "True", "TRUE", "1.0"])
WORDS = frozenset({"false", "true"})
FLAGS = WORDS | {"", "0", "0.0", "1", "1.0"}
MAX_LABEL = 60
# Numbers in a column named as labels count as at most so many classes: more likely than a category
# with another name, less likely than three classes in a column named as labels.
NUMBERS_AS_CLASSES = 24
# The best column must be so many times as good as the next one.
CLEAR_LEAD = 2.0
MAX_CANDIDATES = 5


@dataclass(frozen=True)
class AutoTunedOption:
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
    """The columns that are read: of texts, of labels and, of pairs, of their second texts."""

    text: AutoTunedOption
    label: AutoTunedOption
    pair: AutoTunedOption | None = None

    @property
    def by_option(self) -> dict[str, str]:
        """Their names, by the options that name them."""
        chosen = {
            "text_column": self.text, "text_pair_column": self.pair, "label_column": self.label
        }  # fmt: skip
        return {option: one.name for option, one in chosen.items() if one}


@dataclass(frozen=True)
class _Facts:
    """What a column holds; characters are those of a value that is not empty, on average.

    A word has no spaces, as keys, addresses and names have none; it has no letters beyond ASCII,
    since some scripts have no spaces in texts.
    """

    name: str
    rows: int
    distinct: int
    empty_share: float
    characters: float
    is_number: bool
    is_fraction: bool
    is_date: bool
    is_list: bool
    is_word: bool

    def name_weight(self, known: Sequence[str]) -> float:
        """Return how much the name says that the column is one of the known ones."""
        # gold_label stands beside label1, label2 and so on, those of single annotators.
        plain = plain_name(self.name).removeprefix("gold_")
        if plain in known:
            return 1000.0 if plain == known[0] else 12.0 if plain == TARGET else 6.0
        spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", self.name).casefold()
        words = set(re.findall(r"[^\W\d_]+", spaced))
        return (4.0 if words & set(known) else 1.0) * (0.2 if words & OTHER_WORDS else 1.0)


def choose_columns(columns: pyarrow.Table, options: DataOptions, *, table: str) -> Columns:
    """Return the columns of the texts and of their classes, guessed where they are not named.

    Names and values, all strings, decide together: texts are long and rarely repeat, labels recur.
    Pairs of texts are found by their names alone, unless the column of the texts is named.

    Raises:
        UsageError: If one column is named for two options.
        DataNotFound: If a column that is named is not there, or none looks like the one to guess.
        DataError: If several columns look like the one to guess.
    """
    names = columns.column_names
    options = options.with_earlier(names)
    text, pair = (_full(one, names) for one in (options.text_column, options.text_pair_column))
    label = _full(options.label_column, names)
    named = {"--text-column": text, "--text-pair-column": pair, "--label-column": label}
    _check_named(named, names, table=table)
    is_guessed = text is None or label is None
    sample = _spread_sample(columns)
    facts = [_facts_of(sample[name], name) for name in names if is_guessed]
    found = _find_pair([name for name in names if name != label], text=text, pair=pair)
    others = {text, pair, *(one.name for one in found)}
    others |= {name for one in (text, pair) if one for name in columns_named(one, names)}
    earlier = set(options.earlier_columns.values())
    chosen = _choose(facts, label, kind="label", others=others, earlier=earlier, table=table)
    if found:
        return Columns(found[0], chosen, found[1])
    others = {chosen.name, *(columns_named(pair, names) if pair else ())}
    return Columns(
        _choose(facts, text, kind="text", others=others, earlier=earlier, table=table),
        chosen,
        _named(pair, "--text-pair-column", earlier) if pair else None,
    )


def choose_text_columns(
    columns: pyarrow.Table, options: DataOptions, *, reads_pairs: bool, table: str
) -> tuple[list[str], list[str]]:
    """Return the columns of the texts in a table without labels, guessed where none is named.

    With ``reads_pairs``, return those of the second texts too, else none.

    Raises:
        UsageError: If one column is named for both.
        DataNotFound: If a column that is named is not there, or none looks like texts.
        DataError: If several columns look like texts.
    """
    names = columns.column_names
    options = options.with_earlier(names)
    text = _full(options.text_column, names)
    pair = _full(options.text_pair_column, names) if reads_pairs else None
    _check_named({"--text-column": text, "--text-pair-column": pair}, names, table=table)
    if reads_pairs and (found := _find_pair(names, text=text, pair=pair)):
        return [found[0].name], [found[1].name]
    if reads_pairs and pair is None:
        raise DataNotFound(
            f"the model reads pairs of texts, and no two columns of {table} have the names of one",
            remedy="name both with --text-column and --text-pair-column; there are: "
            f"{_listed(names)}",
        )
    seconds = columns_named(pair, names) if pair else []
    facts = [_facts_of(columns[name], name) for name in names]
    chosen = _choose(facts, text, kind="text", others=seconds, table=table).name
    return columns_named(chosen, names), seconds


def columns_named(name: str, names: Sequence[str]) -> list[str]:
    """Return the columns that an option means: one by its name, or several between commas.

    A part that is no name but a number counts the columns, from 1.

    >>> columns_named("body,1", ["title", "body"]), columns_named("a,b", ["a,b"])
    (['body', 'title'], ['a,b'])
    """
    parts = [name] if name in names else [part.strip() for part in name.split(",")]
    numbered = dict(zip(map(str, range(1, len(names) + 1)), names, strict=True))
    return [part if part in names else numbered.get(part, part) for part in parts]


def read_texts(columns: pyarrow.Table, name: str) -> pyarrow.ChunkedArray:
    """Return the texts of a column, or of several, each in a line of its own."""
    parts = [columns[part] for part in columns_named(name, columns.column_names)]
    if len(parts) == 1:
        return parts[0]

    def join(piece: pyarrow.Table) -> pyarrow.Table:
        joined = pc.binary_join_element_wise(*piece.columns, "\n")
        return pyarrow.table({name: pc.utf8_trim(joined, "\n")})

    numbered = pyarrow.table(parts, names=[str(number) for number in range(len(parts))])
    return map_pieces(numbered, join)[name]


def join_texts(texts: Sequence[str]) -> str:
    """Join the texts of a row as :func:`read_texts` does."""
    return texts[0] if len(texts) == 1 else "\n".join(texts).strip("\n")


def _full(name: str | None, names: Sequence[str]) -> str | None:
    """Return what an option means, with the names of columns in place of their numbers."""
    full = columns_named(name, names) if name else []
    return ",".join(full) if columns_named(",".join(full), names) == full else name


def find_indicators(columns: pyarrow.Table) -> str | None:
    """Return the names, with commas between them, of the columns of 0 and 1 that are labels.

    There are several, and no column has a name of labels. True and false may be written for 1 and
    0, in all of them: beside columns of 0 and 1 they say something else of the row.
    """
    names = columns.column_names
    if any(plain_name(name) in LABEL_NAMES for name in names):
        return None
    words: list[str] = []
    numbers: list[str] = []
    for name in names:
        if _holds_flags(columns[name]) and "," not in name:
            (words if _distinct(columns[name]) & WORDS else numbers).append(name)
    flags = max(numbers, words, key=len)
    return ",".join(flags) if len(flags) >= MIN_INDICATORS else None


def join_indicators(columns: pyarrow.Table, label: str) -> pyarrow.Table:
    """Replace several columns of 0 and 1, named with commas, by one of lists of their names.

    A table is returned as it is if it has a column of that whole name, or lacks one of them.

    Raises:
        DataError: If one of them holds something else.
    """
    names = [name.strip() for name in label.split(",")]
    if len(names) == 1 or label in columns.column_names or {*names} - {*columns.column_names}:
        return columns
    for name in names:
        if not _holds_flags(columns[name]):
            raise DataError(
                f"{name!r} holds other values than 0 and 1",
                remedy="name one --label-column, or several that say whether a row has their class",
            )
    is_marked = (pc.is_in(columns[name], value_set=YES) for name in names)
    quoted = (f", {json.dumps(name, ensure_ascii=False)}" for name in names)
    listed = map(pc.if_else, is_marked, quoted, repeat(""))
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*listed, ""), 2)
    kept = columns.drop_columns(names)
    return kept.append_column(label, pc.binary_join_element_wise("[", joined, "]", ""))


def _holds_flags(column: pyarrow.ChunkedArray) -> bool:
    values = _distinct(column)
    return values <= FLAGS and bool(values - {""})


def _distinct(column: pyarrow.ChunkedArray) -> set[str]:
    return {one.casefold() for one in pc.unique(column.slice(0, SAMPLE_ROWS)).to_pylist()}


def plain_name(name: str) -> str:
    """Return a column's name in lower case, with underscores."""
    return re.sub(r"[\s-]", "_", name.strip().casefold())


def _spread_sample(columns: pyarrow.Table) -> pyarrow.Table:
    """Return rows from all over a large table; all of another."""
    rows, size_bytes = len(columns), columns.nbytes
    size = int(rows * MAX_BYTES / max(size_bytes, 1)) // SAMPLE_PARTS
    if size_bytes <= MAX_BYTES or size == 0:
        return columns
    starts = (number * (rows - size) // (SAMPLE_PARTS - 1) for number in range(SAMPLE_PARTS))
    return pyarrow.concat_tables(columns.slice(start, size) for start in starts)


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
        is_list=every(r"\[.*\]"),
        is_word=every(r"[!-~]+"),
    )


def _label_score(facts: _Facts) -> float:
    """Return how much a column looks like labels; 0 if it does not."""
    weight = facts.name_weight(LABEL_NAMES)
    recurs = 2 <= facts.distinct <= max(2, facts.rows // 3) and facts.distinct < facts.rows
    is_short = facts.characters <= MAX_LABEL and not facts.is_date
    if weight < 6.0 and not (recurs and is_short):
        return 0.0
    classes = facts.distinct or 1
    if weight >= 6.0 and facts.is_number:
        classes = min(classes, NUMBERS_AS_CLASSES)
    elif facts.is_fraction:
        weight *= 0.1
    return weight * max(1 - facts.empty_share, 1e-6) / (1 + log2(classes))


def _text_score(facts: _Facts) -> float:
    """Return how much a column looks like texts; 0 if it does not."""
    weight = 0.0 if facts.is_list else facts.name_weight(TEXT_NAMES)
    if weight < 6.0 and (facts.is_number or facts.is_date):
        return 0.0
    if facts.is_word:
        weight *= 0.1
    share = (1 - facts.empty_share) * facts.distinct / facts.rows
    return weight * (share * facts.characters or 1e-6 * (weight >= 6.0))


def _choose(
    facts: Sequence[_Facts],
    named: str | None,
    *,
    kind: str,
    others: Collection[str | None],
    earlier: Collection[str] = (),
    table: str,
) -> AutoTunedOption:
    """Return the column that is named, or looks most like texts or labels; never one of others."""
    option = f"--{kind}-column"
    if named is not None:
        return _named(named, option, earlier)
    score, known = (_label_score, LABEL_NAMES) if kind == "label" else (_text_score, TEXT_NAMES)
    scores = {one: score(one) for one in facts if one.name not in others}
    ranked = sorted(
        (one for one in scores if scores[one] > 0), key=scores.__getitem__, reverse=True
    )
    if not ranked:
        listed = f"there are: {_listed(one.name for one in facts)}"
        is_lone = kind == "label" and len(facts) == 1
        raise DataNotFound(
            f"no column of {table} seems to hold {'classes' if kind == 'label' else 'texts'}",
            remedy=f"write texts and labels in columns of their own; {listed}"
            if is_lone
            else f"name it with {option}; {listed}",
        )
    best = ranked[0]
    close = [one.name for one in ranked if CLEAR_LEAD * scores[one] > scores[best]]
    if len(close) > 1:
        candidates = [one.name for one in ranked[: max(len(close), MAX_CANDIDATES)]]
        raise DataError(
            f"can't tell which column is the {kind}: {_listed(candidates)}",
            remedy=f"choose one with {option}"
            + (f", or several: {option} {','.join(close)}" if kind == "text" else ""),
        )
    if best.name_weight(known) > 1:
        reason = "its name says so"
    elif kind == "label":
        reason = f"{best.rows:,} rows have {best.distinct:,} different values"
    else:
        reason = f"its values have {best.characters:,.0f} characters on average"
    return AutoTunedOption(best.name, reason, tuple(one.name for one in ranked[1:3]))


def _named(name: str, option: str, earlier: Collection[str]) -> AutoTunedOption:
    return AutoTunedOption(name, "as in the run" if name in earlier else f"as {option} says")


def _find_pair(
    names: Sequence[str], *, text: str | None, pair: str | None
) -> list[AutoTunedOption]:
    """Return the two columns with the names of a pair of texts, unless the first one is named."""
    plain = {re.sub(r"[\W_]", "", name).casefold(): name for name in reversed(names)}
    found = [(plain[one], plain[two]) for one, two in PAIRS if one in plain and two in plain]
    for first, second in found if text is None else ():
        if pair in (None, second):
            reason = f"{first!r} and {second!r} are names of pairs; --text-column reads one text"
            return [AutoTunedOption(first, reason), AutoTunedOption(second, reason)]
    return []


def check_columns(names: Sequence[str], columns: Columns, *, table: str) -> None:
    """Make sure that another table, with these columns, has those that are read.

    Raises:
        DataNotFound: If one is missing.
    """
    named = {f"--{one.replace('_', '-')}": name for one, name in columns.by_option.items()}
    _check_named(named, names, table=table)


def _check_named(named: Mapping[str, str | None], names: Sequence[str], *, table: str) -> None:
    """Make sure that the columns that options name are there, and are not the same."""
    given = {option: name for option, name in named.items() if name is not None}
    for option, name in given.items():
        for part in columns_named(name, names):
            if part not in names:
                raise _unknown(part, names, option=option, table=table)
    for (one, name), (other, second) in combinations(given.items(), 2):
        if name == second:
            raise UsageError(f"{one} and {other} are both {name!r}", remedy="name two columns")


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
