"""Finds the columns of a table that contain texts, sentence pairs and labels."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial, reduce
from itertools import combinations
from math import log2

import numpy as np
import pyarrow
import pyarrow.compute as pc

from finetune.config.schema import DataConfig, flag_of
from finetune.data.packed import WORDS
from finetune.errors import DataError, DataNotFoundError, UsageError
from finetune.tasks.labels import distinct_values, is_number, map_values

# Used instead of the name of a split column.
NO_COLUMN = "none"
# DataConfig fields that select columns.
TEXT, PAIR, LABEL = OPTIONS = ("text_column", "text_pair_column", "label_column")
NAMES = {kind: tuple(words.split()) for kind, words in WORDS["columns"].items()}
TEXT_NAMES, RATINGS, ID_NAMES = NAMES["text"], NAMES["rating"], NAMES["id"]
LABEL_NAMES = NAMES["label"] + RATINGS
OTHER_WORDS = frozenset(NAMES["other"])
FLAG_WORDS = OTHER_WORDS | {*NAMES["flag"]}
PAIRS = [pair.split("+") for pair in NAMES["pairs"]]
# Minimum mean characters of a text. Shorter values are codes, or classes if they repeat.
MIN_CHARACTERS, MAX_CLASS_CHARACTERS, MAX_LABEL = 3, 30, 60
# A second text column is silently ignored only if its texts are shorter than this, with or
# without the name of a text column.
MAX_CHARACTERS_LEFT_OUT, MAX_CHARACTERS_LEFT_OUT_UNNAMED = 15, 40
SAMPLE_ROWS, PIECE_ROWS = 10_000, 2**14
MAX_BYTES = 2**24
# Minimum number of indicator columns. Two columns may be something else.
MIN_INDICATORS, MANY_INDICATORS = 3, 6
YES, NO = (frozenset(WORDS["marks"][kind].split()) for kind in ("yes", "no"))
# An indicator column has at most this many distinct values, a column of class codes at most 20.
MAX_MARKS, MAX_CODES = 4, 20
MAX_ID = 40
BLANK = frozenset({"", "nan", "<na>", "none", "null"})
# Minimum ratio of the best score to the second best, with and without a known name.
CLEAR_LEAD, CLEAR_LEAD_UNNAMED = 2.0, 3.0
MAX_CANDIDATES = 5
# Several class columns rarely contain the same class twice in a row, unlike columns of votes.
MAX_REPEATS = 0.1
ADD_LABELS = WORDS["remedies"]["labels"]


@dataclass(frozen=True)
class OtherData(DataConfig):
    """Data to evaluate or predict with a run. Columns with the run's names are preferred."""

    earlier_columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ColumnProfile:
    """Column statistics. ``characters`` is the mean length of non-empty values."""

    name: str
    rows: int
    distinct: int
    filled: float
    characters: float
    patterns: frozenset[str]

    @classmethod
    def of(cls, column: pyarrow.ChunkedArray, name: str) -> "ColumnProfile":
        """Compute the profile of a column. Value patterns come from its first values."""
        sample = column.slice(0, SAMPLE_ROWS)
        sample = sample.filter(pc.not_equal(sample, ""))
        patterns = {
            name
            for name, pattern in WORDS["patterns"].items()
            if len(sample) and pc.all(pc.match_substring_regex(sample, f"^({pattern})$")).as_py()
        }
        filled = pc.sum(pc.not_equal(column, "")).as_py() or 0
        distinct = pc.count_distinct(column).as_py() - (filled < len(column))
        characters = pc.sum(pc.utf8_length(column)).as_py() / max(filled, 1)
        share = filled / len(column)
        return cls(name, len(column), distinct, share, characters, frozenset(patterns))

    @property
    def is_quantity(self) -> bool:
        """Whether the column contains numbers other than row numbers."""
        are_longer = self.characters > len(str(self.rows))
        return "number" in self.patterns and (self.distinct < self.rows or are_longer)

    @property
    def is_key(self) -> bool:
        """Whether the column contains whole numbers or short codes with digits."""
        is_code = "integer" in self.patterns or {"number", "date", "key"} & self.patterns == {"key"}
        return is_code and self.characters <= MAX_ID

    @property
    def recurs(self) -> bool:
        """Whether the column has few distinct values."""
        return 2 <= self.distinct <= max(2, self.rows // 3) and self.distinct < self.rows


def _name_factor(column: ColumnProfile, names: Sequence[str]) -> float:
    """Return a factor for how well a column name fits texts or labels."""
    plain, words = plain_name(column.name), _words_of(column.name)
    if plain in names:
        # A table with a target column can also have a rating or a score with another meaning.
        return {names[0]: 1000.0, "target": 12.0, "stance": 12.0}.get(plain, 6.0)
    return (4.0 if words & set(names) else 1.0) * (0.2 if words & OTHER_WORDS else 1.0)


def _score_text(column: ColumnProfile) -> float:
    """Score how much a column looks like texts. 0 means not at all."""
    is_key = bool(column.patterns & {"number", "date", "key"}) or column.characters < MIN_CHARACTERS
    is_class = column.recurs and column.characters <= MAX_CLASS_CHARACTERS
    is_named = plain_name(column.name) in TEXT_NAMES
    if "list" in column.patterns or (not is_named and (is_key or is_class or not column.filled)):
        return 0.0
    variety = max(column.filled * column.distinct / column.rows * column.characters, 1e-6)
    return _name_factor(column, TEXT_NAMES) * variety * (0.1 if "word" in column.patterns else 1.0)


def _score_label(column: ColumnProfile) -> float:
    """Score how much a column looks like labels. 0 means not at all."""
    is_long, is_named = column.characters > MAX_LABEL, plain_name(column.name) in LABEL_NAMES
    is_text = is_long and not column.recurs and not column.patterns
    is_other = not column.recurs or is_long or bool(column.patterns & {"date", "split"})
    if is_text or (is_other and not is_named):
        return 0.0
    is_number = "number" in column.patterns
    # Numbers in a column with a label name score higher than most categories in other
    # columns.
    classes = min(column.distinct or 1, 24 if is_number and is_named else column.rows)
    factor = _name_factor(column, LABEL_NAMES)
    if is_number and "integer" not in column.patterns and not is_named:
        factor *= 0.1
    return factor * max(column.filled, 1e-6) / (1 + log2(classes))


def _may_be_meant_too(option: str, other: ColumnProfile, best: ColumnProfile) -> bool:
    """Return whether the user must choose between a column and the best one, despite its score."""
    if option == LABEL:
        is_flag = bool(FLAG_WORDS & _words_of(other.name))
        # Columns such as code1 and code2, or a binary label next to the rating that it comes from.
        is_second = re.sub(r"\d+$", "", other.name) == re.sub(r"\d+$", "", best.name)
        is_second &= 0 < other.filled < best.filled and other.characters <= MAX_CLASS_CHARACTERS
        is_binary = plain_name(best.name) in RATINGS and other.distinct == 2
        return not is_flag and (is_second or is_binary)
    is_named = _name_factor(other, TEXT_NAMES) > 1
    least = MAX_CHARACTERS_LEFT_OUT if is_named else MAX_CHARACTERS_LEFT_OUT_UNNAMED
    return not other.recurs and other.characters >= least


@dataclass(frozen=True)
class ChosenColumn:
    """A column, or several read as one, and the reason for the choice."""

    names: tuple[str, ...]
    reason: str

    @property
    def name(self) -> str:
        """The column names, in the format that options accept."""
        return ",".join(self.names)

    def __str__(self) -> str:
        """Format the choice for a message."""
        return f"{self.name!r} ({self.reason})"


# The chosen columns, by option.
Columns = dict[str, ChosenColumn]


@contextmanager
def describing(left_out: Mapping[str, str]) -> Iterator[None]:
    """Add the ignored columns to errors, because the user may mean one of them."""
    try:
        yield
    except DataError as error:
        for name, content in left_out.items():
            described, _, remedy = content.partition("; ")
            error.message += f"; {name!r} has {described}"
            error.remedy = remedy or error.remedy
        error.args = (error.message,)
        raise


def choose_columns(
    columns: pyarrow.Table, options: DataConfig, *, table: str, wanted: Sequence[str] = OPTIONS
) -> Columns:
    """Choose the columns set by options, and guess the others from names and values.

    If labels are ``wanted``, the second text column can be missing from the result.
    """
    names = columns.column_names
    if LABEL in wanted and len(names) < 2:
        content = f"one column, {names[0]!r}, and no labels" if names else "no text columns"
        raise DataError(f"{table} has {content}", remedy=ADD_LABELS)
    chosen = _named_columns(options, names, table=table, wanted=wanted)
    if PAIR in wanted and TEXT not in chosen:
        chosen |= _find_pair(names, pair=chosen.get(PAIR), label=chosen.get(LABEL))
    if PAIR in wanted and PAIR not in chosen and LABEL not in wanted:
        raise DataNotFoundError(
            f"the model reads sentence pairs, but no column names in {table} look like a pair",
            remedy=f"set --text-column and --text-pair-column; the columns are: {_listed(names)}",
        )
    missing = [option for option in (LABEL, TEXT) if option in wanted and option not in chosen]
    if not missing:
        return chosen
    # Distinct values are counted in memory, so a large table is sampled.
    pieces = columns.to_batches(max_chunksize=PIECE_ROWS)[:: columns.nbytes // MAX_BYTES + 1]
    sample = pyarrow.Table.from_batches(pieces, columns.schema)
    profiles = [ColumnProfile.of(sample[name], name) for name in names]
    is_only = len(names) == 1 and missing == [TEXT] and plain_name(names[0]) not in ID_NAMES
    if is_only and "number" not in profiles[0].patterns:
        return {TEXT: ChosenColumn((names[0],), "the only candidate")}
    tags = [column.name for column in profiles if "tag" in column.patterns and column.distinct > 1]
    if tags and len(missing) > 1:
        raise DataError(
            f"{table} looks like token-level (NER) data: one token per row, tags in {tags[0]!r}",
            remedy="write a whole text and its class in each row; tagging tokens is not supported",
        )
    if LABEL in missing and (several := find_indicators(columns, profiles)):
        chosen[LABEL] = ChosenColumn(several, "one column per class")
    for option in missing:
        used = {name for column in chosen.values() for name in column.names}
        free = [column for column in profiles if column.name not in used]
        if option == TEXT:
            may_be_pair = PAIR in wanted and PAIR not in chosen
            chosen[TEXT] = _guess(TEXT, free, may_be_pair=may_be_pair, table=table)
        elif option not in chosen:
            chosen[LABEL] = _guess_label(sample, free, options, table=table)
    return chosen


def _guess_label(
    sample: pyarrow.Table, free: Sequence[ColumnProfile], options: DataConfig, *, table: str
) -> ChosenColumn:
    """Guess the label column: numbers for regression, otherwise classes, by name if possible."""
    if options.task == "regression":
        free = [column for column in free if column.is_quantity] or free
        return _guess(LABEL, free, table=table)
    names_of = _find_names(sample, free)
    # If class numbers and their names are in two columns, use only the better label column.
    left_out = {min(pair, key=_score_label).name for pair in names_of.items()}
    guess = _guess(LABEL, [column for column in free if column.name not in left_out], table=table)
    for number, name in names_of.items():
        if guess.name in (number.name, name.name):
            return ChosenColumn((name.name,), f"class names of {number.name!r}")
    return guess


def columns_named(name: str, names: Sequence[str]) -> tuple[str, ...]:
    """Parse the columns of an option: names or numbers from 1, separated by commas.

    >>> columns_named("body,1", ["title", "body"]), columns_named("a,b", ["a,b"])
    (('body', 'title'), ('a,b',))
    """
    parts = [name] if name in names else [part.strip() for part in name.split(",")]
    numbered = dict(zip(map(str, range(1, len(names) + 1)), names, strict=True))
    return tuple(part if part in names else numbered.get(part, part) for part in parts)


def _named_columns(
    options: DataConfig, names: Sequence[str], *, table: str, wanted: Sequence[str]
) -> Columns:
    """Return the column set by each option, otherwise the column of the run if it exists."""
    earlier = getattr(options, "earlier_columns", {})
    requested = {option: getattr(options, option) for option in wanted}
    columns: Columns = {}
    for option, name in requested.items():
        if name is None:
            known = columns_named(earlier.get(option, ""), names)
            if {*known} <= {*names} and earlier[option] not in requested.values():
                columns[option] = ChosenColumn(known, "as in the run")
            continue
        columns[option] = ChosenColumn(columns_named(name, names), f"set by {flag_of(option)}")
        if unknown := [column for column in columns[option].names if column not in names]:
            folded = {known.casefold(): known for known in names}
            near = get_close_matches(unknown[0].casefold(), folded, n=1)
            guess = f"did you mean {folded[near[0]]!r}? " if near else ""
            raise DataNotFoundError(
                f"{table} has no column {unknown[0]!r} with texts or numbers",
                remedy=f"{guess}{flag_of(option)} accepts: {_listed(names)}",
            )
    for option, other in combinations(columns, 2):
        if columns[option].names == columns[other].names:
            both = f"{flag_of(option)} and {flag_of(other)} are both {columns[option].name!r}"
            raise UsageError(both, remedy="choose two different columns")
    return columns


def _find_pair(
    names: Sequence[str], *, pair: ChosenColumn | None, label: ChosenColumn | None
) -> Columns:
    """Find two columns named like a sentence pair. An option can set the second one."""
    free = [name for name in reversed(names) if label is None or name not in label.names]
    plain = {re.sub(r"[\W_]", "", name).casefold(): name for name in free}
    for first_name, second_name in PAIRS:
        first, second = plain.get(first_name), plain.get(second_name)
        if first and second and (pair is None or pair.name == second):
            reason = f"{first!r} and {second!r} look like a pair; --text-column reads one text"
            return {TEXT: ChosenColumn((first,), reason), PAIR: ChosenColumn((second,), reason)}
    return {}


def join_texts(columns: pyarrow.Table, names: Sequence[str]) -> pyarrow.ChunkedArray:
    """Return the texts of a column, or of several columns joined by line breaks."""
    if len(names) == 1:
        return columns[names[0]]
    joined = pc.binary_join_element_wise(*(columns[name] for name in names), "\n")
    return pc.utf8_trim(joined, "\n")


def read_labels(columns: pyarrow.Table, names: Sequence[str]) -> pyarrow.ChunkedArray:
    """Return labels: cells of one column, or JSON lists from several. Unlabeled cells are empty.

    Several columns are indicators, such as 0 and 1, or contain one class each. If there are marks
    for no, a row with a blank cell is unlabeled; otherwise, a row with only blank cells.
    """
    if len(names) == 1:
        return columns[names[0]]
    marks = {name: _marks_in(columns[name]) for name in names}
    are_indicators = _are_indicators(marks)
    most = max(len(values) for values in marks.values())
    is_unclear = bool(set().union(*marks.values()) & YES - {"1"})
    is_unclear |= most > max(MAX_CODES, len(columns) // 3) or _are_amounts(columns.select(names))
    if not are_indicators and is_unclear:
        raise DataError(
            f"the columns {_listed(names)} contain neither a mark, such as 1 or x, nor a class in"
            " each row",
            remedy="set --label-column to one column, or to one column per class;"
            f" {_of_votes(names)}",
        )
    is_blank, items = [], []
    for name in names:
        blank = [cell for cell in distinct_values([columns[name]]) if _plain(cell) in BLANK]
        is_blank.append(pc.is_in(columns[name], value_set=pyarrow.array(blank, "string")))
        convert = partial(_item_of, name=name if are_indicators else None)
        items.append(map_values(columns[name], convert))
    is_unlabeled = reduce(pc.or_ if say_no(columns, names) else pc.and_, is_blank)
    listed = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*items, ""), 2)
    return pc.if_else(is_unlabeled, "", pc.binary_join_element_wise("[", listed, "]", ""))


def _are_amounts(columns: pyarrow.Table) -> bool:
    """Return whether columns contain votes or ratings rather than classes or marks."""
    cells = [pc.utf8_rtrim(column, "% ") for column in columns.columns]
    distinct = {cell: cell.replace(",", ".") for cell in distinct_values(cells)}
    numbers = {cell: float(number) for cell, number in distinct.items() if is_number(number)}
    others = {_plain(cell) for cell in distinct.keys() - numbers.keys()} - BLANK
    if others or {*numbers.values()} <= {0, 1}:
        return False
    rows = np.sort([map_values(cell, numbers.get, arrow_type="float64") for cell in cells], axis=0)
    repeats, totals = (rows[1:] == rows[:-1]).any(axis=0), rows.sum(axis=0)
    has_fractions = bool((rows % 1 > 0).any() or (rows < 0).any())
    is_total = has_fractions or bool((totals == totals[0]).all())
    return (
        is_total or repeats.mean() > MAX_REPEATS or len(numbers) > max(MAX_CODES, len(totals) // 3)
    )


def _of_votes(names: Sequence[str]) -> str:
    """Return advice for converting vote columns to labels."""
    return f"for votes, write the class with the most: in pandas, frame[{[*names]}].idxmax(axis=1)"


def say_no(columns: pyarrow.Table, names: Sequence[str]) -> bool:
    """Return whether columns contain both yes and no marks, so blank cells are missing values."""
    cells = distinct_values(columns[name] for name in names)
    marks = {name: _marks_in(columns[name]) for name in names}
    return any(_plain(cell) in NO for cell in cells) and _are_indicators(marks)


def _item_of(value: str, *, name: str | None) -> str:
    """Return the class in a cell: the column name or the value."""
    plain = _plain(value)
    if plain in BLANK or (plain in NO and (name is not None or plain in "-–")):
        return ""
    return f", {json.dumps(value.strip() if name is None else name, ensure_ascii=False)}"


def _plain(value: str) -> str:
    return value.strip().casefold().removesuffix(".0")


def _marks_in(column: pyarrow.ChunkedArray) -> set[str]:
    """Return the distinct values of a column, except marks for no."""
    return {_plain(value) for value in distinct_values([column])} - NO - BLANK


def _are_indicators(marks: Mapping[str, set[str]]) -> bool:
    """Return whether each column has at most one mark: yes, its name, or a common mark."""
    different = set().union(*marks.values())
    return all(len(values) <= 1 for values in marks.values()) and (
        len(different) == 1
        or all(values <= YES | {name.casefold()} for name, values in marks.items())
    )


def find_indicators(columns: pyarrow.Table, profiles: Sequence[ColumnProfile]) -> tuple[str, ...]:
    """Return adjacent indicator columns that contain labels, or none if there are too few.

    Some rows must have no mark or several. A few indicators are not labels if another column could
    be the label.
    """
    if any(plain_name(name) in LABEL_NAMES for name in columns.column_names):
        return ()
    groups: dict[str, list[str]] = {}
    sample = columns.slice(0, SAMPLE_ROWS)
    for column in profiles:
        marks = _marks_in(sample[column.name]) if column.distinct <= MAX_MARKS else set()
        if len(marks) == 1 and marks <= YES | {column.name.casefold()}:
            group = "name" if marks - YES else next(iter(marks))
            groups.setdefault(group, []).append(column.name)
    marked = max(groups.values(), key=len, default=[])
    if len(marked) < MIN_INDICATORS or set().union(*map(_words_of, marked)) & FLAG_WORDS:
        return ()
    flags = {name for names in groups.values() for name in names}
    has_other_label = any(
        _score_label(column) and "number" not in column.patterns and column.name not in flags
        for column in profiles
        if not _words_of(column.name) & OTHER_WORDS
    )
    start = columns.column_names.index(marked[0])
    is_block = columns.column_names[start : start + len(marked)] == marked
    if not is_block or (has_other_label and len(marked) < MANY_INDICATORS):
        return ()
    # If each row has exactly one mark, the task may be single-label or multi-label.
    has_one = pc.match_substring_regex(read_labels(sample, marked), r'^\["([^"\\]|\\.)*"\]$')
    return () if pc.all(has_one).as_py() else tuple(marked)


def _find_names(
    columns: pyarrow.Table, profiles: Sequence[ColumnProfile]
) -> dict[ColumnProfile, ColumnProfile]:
    """Return columns of class numbers, each with the column of their class names."""
    names_of: dict[ColumnProfile, ColumnProfile] = {}
    for number in profiles:
        for name in profiles if "integer" in number.patterns and number.recurs else ():
            if name.distinct != number.distinct or name.patterns & {"number", "date"}:
                continue
            pairs = columns.select([number.name, name.name]).group_by([number.name, name.name])
            if name.characters <= MAX_LABEL and pairs.aggregate([]).num_rows == number.distinct:
                names_of.setdefault(number, name)
    return names_of


def _words_of(name: str) -> set[str]:
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).casefold()
    return set(re.findall(r"[^\W\d_]+", spaced))


def find_ids(columns: pyarrow.Table) -> str | None:
    """Find the ID column: by its name, or because each row has its own value, such as T-0815."""
    names: list[str] = columns.column_names
    if known := [name for name in names if plain_name(name) in ID_NAMES]:
        return known[0]
    profiles = [ColumnProfile.of(columns[name], name) for name in names]
    own = [column for column in profiles if column.distinct == column.rows and column.is_key]
    named = [column for column in own if plain_name(column.name).endswith(NAMES["id_end"])]
    others = [column for column in own if "number" not in column.patterns]
    return next((column.name for column in [*named, *others]), None)


def plain_name(name: str) -> str:
    """Return a column name in lower case, with underscores."""
    # Tables with gold_label also have label1, label2 and so on, from individual annotators.
    return re.sub(r"[\s-]", "_", name.strip().casefold()).removeprefix("gold_")


def _guess(
    option: str, profiles: Sequence[ColumnProfile], *, table: str, may_be_pair: bool = False
) -> ChosenColumn:
    """Guess the column that looks most like texts or labels."""
    score, names = {TEXT: (_score_text, TEXT_NAMES), LABEL: (_score_label, LABEL_NAMES)}[option]
    flag = flag_of(option)
    scores = {column: score(column) for column in profiles}
    if option == LABEL and not any(scores.values()):
        numbers = {column: _name_factor(column, names) for column in profiles if column.is_quantity}
        scores |= {column: factor for column, factor in numbers.items() if factor >= 1}
    best = max(profiles, key=scores.__getitem__, default=None)
    if best is None or not scores[best]:
        add = ADD_LABELS if option == LABEL else "write texts and classes in separate columns"
        listed = _listed(column.name for column in profiles)
        raise DataNotFoundError(
            f"no column of {table} looks like {names[0]}s",
            remedy=f"choose one with {flag}: {listed}; or {add}",
        )
    is_named = option == TEXT or plain_name(best.name) in names
    lead = CLEAR_LEAD if is_named else CLEAR_LEAD_UNNAMED
    close = [
        column
        for column in profiles
        if lead * scores[column] > scores[best]
        or ((scores[column] or option == LABEL) and _may_be_meant_too(option, column, best))
    ]
    if len(close) > 1:
        others = len(close) - MAX_CANDIDATES
        first = [column.name for column in close[:MAX_CANDIDATES]]
        listed = _listed(first) + (f" and {others} others" if others > 0 else "")
        joined = "that belong together" if option == TEXT else "with a class or a mark in each"
        remedy = f"choose one with {flag}, or several {joined}: {flag} {','.join(first)}"
        if all("number" in column.patterns for column in close) and close[0].distinct > 2:
            remedy = f"choose one with {flag}; {_of_votes(first)}"
        if may_be_pair:
            pair = f"{flag} {first[0]} {flag_of(PAIR)} {first[1]}"
            remedy += f", or, for sentence pairs: {pair}"
        raise UsageError(f"can't tell which column is the {names[0]}: {listed}", remedy=remedy)
    if _name_factor(best, names) > 1:
        reason = "by its name"
    elif option == LABEL:
        reason = f"{best.distinct:,} different values in {best.rows:,} rows"
    else:
        reason = f"values with {best.characters:,.0f} characters on average"
    return ChosenColumn((best.name,), reason)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name[:60]) for name in names)
