"""Which columns of a table hold the texts, or pairs of texts, and which one their classes."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import reduce
from itertools import combinations, repeat
from math import log2, prod

import pyarrow
import pyarrow.compute as pc

from finetune.config.schema import DataConfig
from finetune.data.mapped import map_pieces, pieces_of
from finetune.errors import DataError, DataNotFound, UsageError
from finetune.tasks.labels import NUMBER

# In place of the name of a column of splits.
NO_COLUMN = "none"
# The fields of DataConfig that name columns.
TEXT, PAIR, LABEL = OPTIONS = ("text_column", "text_pair_column", "label_column")
# Names that say what a column holds; the first of each leaves no doubt.
TEXT_NAMES = (
    *("text", "sentence", "question", "review", "content", "comment", "message", "tweet"),
    *("utterance", "query", "document", "description", "headline", "title", "body"),
    *("claim", "evidence", "answer", "passage", "context", "abstract", "subject", "summary"),
)
RATINGS = ("rating", "stars", "score", "polarity", "similarity")
LABEL_NAMES = (
    *("label", "labels", "class", "category", "target", "intent", "sentiment", "emotion"),
    *("topic", "stance", "y", "label_coarse", "coarse_label", *RATINGS),
)
# Words in the names of columns that hold neither.
OTHER_WORDS = frozenset(
    (
        *("id", "index", "date", "time", "timestamp", "created", "updated", "url", "link", "user"),
        *("author", "name", "source", "confidence", "count", "latitude", "longitude"),
        *("location", "coord", "retweet", "split", "fold", "partition"),
    )
)
# Words in the names of flags that are no classes of a row, or not all the same kind.
FLAG_WORDS = OTHER_WORDS | {
    *("is", "has", "was", "verified", "truncated", "favorited", "retweeted", "sensitive", "edited"),
    *("deleted", "locked", "archived", "stickied", "spoiler", "active", "premium", "duplicate"),
    *("annotator", "rater", "worker", "coder", "judge", "final", "gold", "majority"),
}
# Without spaces and punctuation; the last is "#1 String" and "#2 String", as MRPC's authors wrote.
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text1", "text2"), ("sentencea", "sentenceb"), ("texta", "textb"), ("text", "textpair")),
    *(("question", "sentence"), ("question", "context"), ("question", "passage")),
    *(("sent1", "sent2"), ("q1", "q2"), ("string1", "string2"), ("sourcetext", "targettext")),
    ("1string", "2string"),
)
# What all values of a column may look like. Words are without spaces and in ASCII, since the texts
# of some scripts have no spaces; keys are ids, hashes, addresses and paths; tags those of tokens.
LOOKS = {
    "number": NUMBER,
    "integer": r"[+-]?\d+(\.0*)?",
    "date": r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[/.]\d\d?[/.]\d{2,4}( .*)?",
    "list": r"\[.*\]",
    "word": r"[!-~]+",
    "key": r"[!-~]*[0-9/\\:_@][!-~]*",
    "split": r"(?i)train(ing)?|valid(ation)?|val|dev|test(ing)?",
    "tag": r"O|[BIESLUM]-\S+",
}
# Texts of fewer characters, on average, are codes; and where they recur, classes.
MIN_CHARACTERS, MAX_CLASS_CHARACTERS = 3, 30
# Texts beside others are left out in silence only if they are shorter, with a name of texts or not.
MAX_CHARACTERS_LEFT_OUT, MAX_CHARACTERS_LEFT_OUT_UNNAMED = 15, 40
SAMPLE_ROWS = 10_000
MAX_BYTES = 2**26
# Columns of 0 and 1, one for each class; two may well be something else.
MIN_INDICATORS, MANY_INDICATORS = 3, 6
YES = pyarrow.array(["1", "true", "True", "TRUE", "1.0"])
WORDS = frozenset({"false", "true"})
FLAGS = WORDS | {"", "0", "0.0", "1", "1.0"}
# The best column must be so many times as good as the next one, if its name is known or it is not.
CLEAR_LEAD, CLEAR_LEAD_UNNAMED = 2.0, 3.0
MAX_CANDIDATES = 5


@dataclass(frozen=True)
class OtherData(DataConfig):
    """Other data than a run's: where its tables have the columns of the run, these are read."""

    earlier_columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a column holds; characters are those of a value that is not empty, on average."""

    name: str
    rows: int
    distinct: int
    filled: float
    characters: float
    looks: frozenset[str]

    @classmethod
    def of(cls, column: pyarrow.ChunkedArray, name: str) -> "Facts":
        """Return the facts of a column; the first values say how all look."""
        sample = column.slice(0, SAMPLE_ROWS)
        sample = sample.filter(pc.not_equal(sample, ""))
        looks = (
            look
            for look, pattern in LOOKS.items()
            if len(sample) and pc.all(pc.match_substring_regex(sample, f"^({pattern})$")).as_py()
        )
        filled = pc.sum(pc.not_equal(column, "")).as_py() or 0
        return cls(
            name=name,
            rows=len(column),
            distinct=pc.count_distinct(column).as_py() - (filled < len(column)),
            filled=filled / len(column),
            characters=pc.sum(pc.utf8_length(column)).as_py() / max(filled, 1),
            looks=frozenset(looks),
        )

    @property
    def is_long(self) -> bool:
        """Whether its values are longer than names of classes."""
        return self.characters > 60

    @property
    def is_quantity(self) -> bool:
        """Whether it has numbers, and not those of the rows."""
        are_longer = self.characters > len(str(self.rows))
        return "number" in self.looks and (self.distinct < self.rows or are_longer)

    @property
    def recurs(self) -> bool:
        """Whether it has few values for its rows."""
        return 2 <= self.distinct <= max(2, self.rows // 3) and self.distinct < self.rows


Rule = tuple[float, Callable[[Facts], bool]]


@dataclass(frozen=True)
class Kind:
    """How columns of texts, or of labels, are told from others: by scores.

    A score is a measure of the values times the factors of the name and of all rules that hold.
    Another column may be meant as well as the best if ``is_rival``, whatever its score.
    """

    names: Sequence[str]
    measure: Callable[[Facts], float]
    is_rival: Callable[[Facts, Facts], bool]
    unless_named: Sequence[Rule]
    always: Sequence[Rule] = ()

    def name_factor(self, column: Facts) -> float:
        """Return how much the name says that a column is of this kind."""
        plain = plain_name(column.name)
        if plain in self.names:
            # A rating or a score beside a target may say something else of the row.
            factors = {self.names[0]: 1000.0, "target": 12.0, "stance": 12.0}
            return factors.get(plain, 6.0)
        words = _words_of(column.name)
        return (4.0 if words & set(self.names) else 1.0) * (0.2 if words & OTHER_WORDS else 1.0)

    def score(self, column: Facts) -> float:
        """Return how much a column looks like one of this kind; 0 if it does not."""
        is_named = plain_name(column.name) in self.names
        rules = self.always if is_named else (*self.always, *self.unless_named)
        factors = prod(factor for factor, holds in rules if holds(column))
        return self.name_factor(column) * self.measure(column) * factors


def _label_measure(column: Facts) -> float:
    # Named numbers are more likely than a category with another name, less likely than 3 classes.
    is_score = "number" in column.looks and plain_name(column.name) in LABEL_NAMES
    classes = min(column.distinct or 1, 24 if is_score else column.rows)
    return max(column.filled, 1e-6) / (1 + log2(classes))


def _is_left_text(best: Facts, other: Facts) -> bool:
    is_named = KINDS[TEXT].name_factor(other) > 1
    least = MAX_CHARACTERS_LEFT_OUT if is_named else MAX_CHARACTERS_LEFT_OUT_UNNAMED
    return not other.recurs and other.characters >= least


def _is_yes_or_no(best: Facts, other: Facts) -> bool:
    """Return whether a column beside a rating has two values, and the rating may go with it."""
    is_flag = bool(FLAG_WORDS & _words_of(other.name))
    return plain_name(best.name) in RATINGS and other.distinct == 2 and not is_flag


KINDS = {
    TEXT: Kind(
        TEXT_NAMES,
        lambda column: max(column.filled * column.distinct / column.rows * column.characters, 1e-6),
        is_rival=_is_left_text,
        always=(
            (0.0, lambda column: "list" in column.looks),
            (0.1, lambda column: "word" in column.looks),
        ),
        unless_named=(
            (0.0, lambda column: column.filled == 0),
            (0.0, lambda column: not column.looks.isdisjoint(("number", "date", "key"))),
            (0.0, lambda column: column.characters < MIN_CHARACTERS),
            (0.0, lambda column: column.recurs and column.characters <= MAX_CLASS_CHARACTERS),
        ),
    ),
    LABEL: Kind(
        LABEL_NAMES,
        _label_measure,
        is_rival=_is_yes_or_no,
        always=((0.0, lambda column: column.is_long and not column.recurs and not column.looks),),
        unless_named=(
            (0.0, lambda column: not column.recurs or column.is_long),
            (0.0, lambda column: not column.looks.isdisjoint(("date", "split"))),
            (0.1, lambda column: "number" in column.looks and "integer" not in column.looks),
        ),
    ),
}


@dataclass(frozen=True)
class ChosenColumn:
    """A column, or several that are read as one, why it was chosen, and those that came next."""

    names: tuple[str, ...]
    reason: str
    runners_up: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name or names, as options take them."""
        return ",".join(self.names)

    def __str__(self) -> str:
        """Return the choice as it is reported."""
        others = f"; next: {_listed(self.runners_up)}" if self.runners_up else ""
        return f"{self.name!r} ({self.reason}{others})"


# The chosen columns, by the options that name them.
Columns = dict[str, ChosenColumn]


def choose_columns(
    columns: pyarrow.Table, options: DataConfig, *, table: str, wanted: Sequence[str] = OPTIONS
) -> Columns:
    """Return the columns that are named; others by their names and values: labels recur.

    Of the columns that are ``wanted``, the second one of pairs may be missing if labels are there.
    """
    names = columns.column_names
    chosen = _named_columns(options, names, table=table, wanted=wanted)
    if PAIR in wanted and TEXT not in chosen:
        taken = chosen[LABEL].names if LABEL in chosen else ()
        others = [name for name in names if name not in taken]
        chosen |= _find_pair(others, pair=chosen.get(PAIR))
    if PAIR in wanted and PAIR not in chosen and LABEL not in wanted:
        raise DataNotFound(
            f"the model reads pairs of texts, but no two columns of {table} are named like a pair",
            remedy="name both with --text-column and --text-pair-column; there are:"
            f" {_listed(names)}",
        )
    missing = [option for option in (LABEL, TEXT) if option in wanted and option not in chosen]
    if missing:
        # How many values a column has is counted in memory: in some pieces of a large table.
        pieces = list(pieces_of(columns))[:: columns.nbytes // MAX_BYTES + 1]
        facts = [Facts.of(pyarrow.concat_tables(pieces)[name], name) for name in names]
        tags = [one.name for one in facts if "tag" in one.looks and one.distinct > 1]
        if tags and len(missing) > 1:
            raise DataError(
                f"the rows of {table} are single tokens, with tags in {tags[0]!r}, and not texts",
                remedy="write a whole text and its class in each row",
            )
        if LABEL in missing and (indicators := find_indicators(columns, facts)):
            chosen[LABEL] = ChosenColumn(indicators, "columns of 0 and 1")
            missing.remove(LABEL)
        for option in missing:
            may_be_pair = PAIR in wanted and PAIR not in chosen
            is_number = option == LABEL and options.task == "regression"
            own = [one for one in facts if one.is_quantity or not is_number] or facts
            chosen[option] = _guess(
                option, own, chosen=chosen, may_be_pair=may_be_pair, table=table
            )
    return chosen


def check_columns(names: Sequence[str], chosen: Mapping[str, ChosenColumn], *, table: str) -> None:
    """Make sure that a table with these columns has those that were chosen, by option."""
    for option, column in chosen.items():
        for name in column.names:
            if name not in names:
                folded = {known.casefold(): known for known in names}
                near = get_close_matches(name.casefold(), folded, n=1)
                guess = f"did you mean {folded[near[0]]!r}? " if near else ""
                raise DataNotFound(
                    f"{table} has no column {name!r} of texts or numbers",
                    remedy=f"{guess}{_flag(option)} takes one of: {_listed(names)}",
                )


def columns_named(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that an option means: by name, or by number from 1, between commas.

    >>> columns_named("body,1", ["title", "body"]), columns_named("a,b", ["a,b"])
    (('body', 'title'), ('a,b',))
    """
    parts = [name] if name in names else [part.strip() for part in name.split(",")]
    numbered = dict(zip(map(str, range(1, len(names) + 1)), names, strict=True))
    return tuple(part if part in names else numbered.get(part, part) for part in parts)


def _named_columns(
    options: DataConfig, names: Sequence[str], *, table: str, wanted: Sequence[str]
) -> Columns:
    """Return the column of each option: the one named, or the run's if the table has it."""
    given = [getattr(options, option) for option in wanted]
    found: Columns = {}
    for option, name in zip(wanted, given, strict=True):
        earlier = getattr(options, "earlier_columns", {}).get(option)
        full = columns_named((earlier or "") if name is None else name, names)
        if name is not None:
            found[option] = ChosenColumn(full, f"as {_flag(option)} says")
            check_columns(names, {option: found[option]}, table=table)
        elif earlier and earlier not in given and {*full} <= {*names}:
            found[option] = ChosenColumn(full, "as in the run")
    for one, other in combinations(found, 2):
        if found[one].names == found[other].names:
            raise UsageError(
                f"{_flag(one)} and {_flag(other)} are both {found[one].name!r}",
                remedy="name two columns",
            )
    return found


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _find_pair(names: Sequence[str], *, pair: ChosenColumn | None) -> Columns:
    """Return the columns with the names of a pair of texts, the second one as it is named."""
    plain = {re.sub(r"[\W_]", "", name).casefold(): name for name in reversed(names)}
    for one, two in PAIRS:
        if one in plain and two in plain and (pair is None or pair.name == plain[two]):
            first, second = plain[one], plain[two]
            reason = f"{first!r} and {second!r} are names of pairs; --text-column reads one text"
            return {TEXT: ChosenColumn((first,), reason), PAIR: ChosenColumn((second,), reason)}
    return {}


def read_texts(columns: pyarrow.Table, names: Sequence[str]) -> pyarrow.ChunkedArray:
    """Return the texts of a column, or of several, each in a line of its own."""
    if len(names) == 1:
        return columns[names[0]]

    def join(piece: pyarrow.Table) -> pyarrow.Table:
        joined = pc.binary_join_element_wise(*(piece[name] for name in names), "\n")
        return pyarrow.table({"text": pc.utf8_trim(joined, "\n")})

    return map_pieces(columns.select(names), join)["text"]


def join_texts(texts: Sequence[str]) -> str:
    """Join the texts of a row as :func:`read_texts` does."""
    return texts[0] if len(texts) == 1 else "\n".join(texts).strip("\n")


def read_labels(columns: pyarrow.Table, names: Sequence[str]) -> pyarrow.ChunkedArray:
    """Return the labels of a column or, of several columns of 0 and 1, lists of their names."""
    if len(names) == 1:
        return columns[names[0]]
    for one in names:
        if not _flags_in(columns[one]):
            raise DataError(
                f"column {one!r} has values other than 0 and 1",
                remedy="name one --label-column, or several columns of 0 and 1, one for each class",
            )
    is_marked = (pc.is_in(columns[one], value_set=YES) for one in names)
    quoted = (f", {json.dumps(one, ensure_ascii=False)}" for one in names)
    listed = map(pc.if_else, is_marked, quoted, repeat(""))
    joined = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*listed, ""), 2)
    return pc.binary_join_element_wise("[", joined, "]", "")


def find_indicators(columns: pyarrow.Table, facts: Sequence[Facts]) -> tuple[str, ...]:
    """Return the columns of 0 and 1, or of true and false, that are labels; none if too few are.

    They stand side by side, and some rows have none or several of them. Few are not taken for
    labels where another column may be the label.
    """
    if any(plain_name(name) in LABEL_NAMES for name in columns.column_names):
        return ()
    flags = {name: own for name in columns.column_names if (own := _flags_in(columns[name]))}
    words = [name for name, own in flags.items() if own & WORDS]
    numbers = [name for name in flags if name not in words]
    found = max(numbers, words, key=len)
    start = columns.column_names.index(found[0]) if found else 0
    is_block = columns.column_names[start : start + len(found)] == found
    others = [
        one
        for one in facts
        if KINDS[LABEL].score(one) and "number" not in one.looks and one.name not in flags
        if not _words_of(one.name) & OTHER_WORDS
    ]
    is_clear = not others or len(found) >= MANY_INDICATORS
    words_of_names = set().union(*map(_words_of, found))
    if len(found) < MIN_INDICATORS or not (is_block and is_clear) or words_of_names & FLAG_WORDS:
        return ()
    marks = (pc.is_in(columns[one].slice(0, SAMPLE_ROWS), value_set=YES) for one in found)
    classes = reduce(pc.add, (own.cast("int32") for own in marks))
    # Where each row has just one, it is not known whether a row may have several.
    return tuple(found) if pc.any(pc.not_equal(classes, 1)).as_py() else ()


def _flags_in(column: pyarrow.ChunkedArray) -> set[str]:
    """Return the different values of a column of flags, or nothing if it has others."""
    values = {one.casefold() for one in pc.unique(column.slice(0, SAMPLE_ROWS)).to_pylist()}
    return values - {""} if values <= FLAGS else set()


def _words_of(name: str) -> set[str]:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).casefold()
    return set(re.findall(r"[^\W\d_]+", spaced))


def plain_name(name: str) -> str:
    """Return a column's name in lower case, with underscores."""
    # gold_label stands beside label1, label2 and so on, those of single annotators.
    return re.sub(r"[\s-]", "_", name.strip().casefold()).removeprefix("gold_")


def _guess(
    option: str, facts: Sequence[Facts], *, chosen: Columns, may_be_pair: bool, table: str
) -> ChosenColumn:
    """Return the column that looks most like texts or labels."""
    kind, flag = KINDS[option], _flag(option)
    taken = {name for column in chosen.values() for name in column.names}
    scores = {one: kind.score(one) for one in facts if one.name not in taken}
    if option == TEXT and len(facts) == 1 and facts[0].filled and "number" not in facts[0].looks:
        scores = {facts[0]: 1.0}  # of a file to predict, whatever its texts are like
    if option == LABEL and not any(scores.values()):
        factors = {one: kind.name_factor(one) for one in scores if one.is_quantity}
        scores = {one: factor for one, factor in factors.items() if factor >= 1} or scores
    ranked = sorted(filter(scores.__getitem__, scores), key=scores.__getitem__, reverse=True)
    if not ranked:
        raise DataNotFound(
            f"no column of {table} looks like {kind.names[0]}s",
            remedy=f"write texts and labels in columns of their own, or name them with {flag};"
            f" there are: {_listed(one.name for one in facts)}",
        )
    best = ranked[0]
    is_named = option == TEXT or plain_name(best.name) in kind.names
    lead = CLEAR_LEAD if is_named else CLEAR_LEAD_UNNAMED
    close = [
        one.name
        for one in facts
        if one in ranked and (lead * scores[one] > scores[best] or kind.is_rival(best, one))
    ]
    if len(close) > 1:
        names = dict.fromkeys((*close, *(one.name for one in ranked)))
        candidates = list(names)[: max(len(close), MAX_CANDIDATES)]
        remedy = f"choose one with {flag}"
        if option == TEXT:
            remedy += f", or several to be joined: {flag} {','.join(close)}"
            if may_be_pair:
                pair = f"{flag} {close[0]} {_flag(PAIR)} {close[1]}"
                remedy += f", or, if the rows are pairs of texts: {pair}"
        raise DataError(
            f"can't tell which column is the {kind.names[0]}: {_listed(candidates)}", remedy=remedy
        )
    if kind.name_factor(best) > 1:
        reason = "its name says so"
    elif option == LABEL:
        reason = f"{best.rows:,} rows have {best.distinct:,} different values"
    else:
        reason = f"its values have {best.characters:,.0f} characters on average"
    return ChosenColumn((best.name,), reason, tuple(one.name for one in ranked[1:3]))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:60]) for name in names)
