"""Loaded data: a table with columns text, text_pair, id, row and label for every source.

Validation and test rows are held out with a seed, stratified and without leaks.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute as pc
from numpy.typing import NDArray
from pandas.util import hash_array

from finetune.config.schema import DataConfig, ModelConfig
from finetune.data.columns import Columns
from finetune.devices import host
from finetune.errors import DataError
from finetune.events import Event, Info, WarningMessage, emit, muted
from finetune.tasks.base import Task
from finetune.tasks.labels import HARD
from finetune.tasks.metrics import MULTI, SINGLE
from finetune.tokenization.encode import EncodedTexts

SPLITS = ("train", "validation", "test")
Splits = dict[str, pyarrow.Table]
DEFAULT_FRACTION = 0.1
# Smaller tables get no validation split: 10% of the rows would choose a model by chance, and
# training needs the rows.
MIN_ROWS_TO_VALIDATE = 1_000
# Words with digits, URLs and punctuation. Near duplicates differ only in these.
VARIABLE = r"[\w.:/#-]*[\p{N}@][\w.@:/#-]*|[^\p{L}\p{M}\s]+"


@dataclass(frozen=True)
class DataSource:
    """The source of data: a file with its sha256, or a Hub dataset at a commit."""

    name: str
    sha256: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class LoadedData:
    """Splits, including ``train``. For a table also its columns, chosen and all.

    ``places`` describes a row by its number: ``line 7 of reviews.csv (id 5)``. ``unlabeled``
    contains texts without a label, in the columns of a split. ``names`` contains one row per class,
    with its name or description as the text. If the data has no labels (``has_labels``), these rows
    are the training split. ``drawn`` lists the row numbers that ``finetune label`` drew at random,
    or is None for other tables; its other rows were chosen because they are hard. If options were
    guessed from the data, ``events`` contains the events that were held back, and ``tokens`` the
    token IDs.
    """

    splits: Splits
    task: Task
    sources: Sequence[DataSource] = ()
    chosen: Columns = field(default_factory=dict)
    column_names: Sequence[str] = ()
    places: Mapping[str, Callable[[int], str]] = field(default_factory=dict)
    unlabeled: pyarrow.Table | None = None
    names: pyarrow.Table | None = None
    drawn: NDArray[np.int64] | None = None
    has_labels: bool = True
    events: Sequence[Event] = ()
    tokens: "KnownTokens | None" = None

    @property
    def labeled_rows(self) -> int:
        """The number of training rows with a label."""
        return len(self.splits["train"]) if self.has_labels else 0

    @property
    def columns(self) -> dict[str, str]:
        """The table columns that were read, by option."""
        return {option: column.name for option, column in self.chosen.items()}


class TextColumns(NamedTuple):
    """The texts of rows, with the second texts of sentence pairs."""

    texts: pyarrow.ChunkedArray
    pairs: pyarrow.ChunkedArray | None = None

    @property
    def columns(self) -> list[pyarrow.ChunkedArray]:
        """The one column, or both."""
        return [self.texts] if self.pairs is None else [self.texts, self.pairs]

    @property
    def joined(self) -> pyarrow.ChunkedArray:
        """The texts to show or count. The two texts of a pair are joined by ``|``."""
        if self.pairs is None:
            return self.texts
        return pc.binary_join_element_wise(self.texts, self.pairs, " | ")

    @property
    def normal(self) -> "TextColumns":
        """The texts in lower case, stripped, with single spaces between words."""
        columns = (map(_normalize, column.chunks) for column in self.columns)
        return TextColumns(*(pyarrow.chunked_array(column, "string") for column in columns))


class KnownTokens(NamedTuple):
    """Whole texts with their token IDs, as a model reads them."""

    model: str
    texts: pyarrow.ChunkedArray
    encoded: EncodedTexts

    def find(self, texts: TextColumns, options: ModelConfig) -> EncodedTexts | None:
        """Return the token IDs of texts.

        Return None if the IDs of a text are unknown, or if a text exceeds the maximum length.
        """
        if (self.model, None, None) != (options.model, options.revision, options.window_stride):
            return None
        places = pc.index_in(texts.texts, value_set=self.texts)
        if texts.pairs is not None or places.null_count:
            return None
        encoded = self.encoded.take(places.to_numpy())
        return encoded if encoded.lengths.max(initial=0) <= options.max_length else None


def make_dataset(
    texts: Any, labels: Any, *, task: Task, pairs: Any = None, rows: Any = None, ids: Any = None
) -> pyarrow.Table:
    """Return a table of texts and of labels parsed by the task, in Arrow or as strings.

    ``rows`` contains the row numbers in their table, by default from 1.
    """
    columns = {"text": texts, "text_pair": pairs, "id": ids}
    strings = {name: _strings(column) for name, column in columns.items() if column is not None}
    numbers = np.arange(1, len(strings["text"]) + 1) if rows is None else rows
    return with_labels(pyarrow.table({**strings, "row": numbers}), _strings(labels), task=task)


def with_labels(table: pyarrow.Table, labels: Any, *, task: Task) -> pyarrow.Table:
    """Add or replace labels, parsed by the task."""
    others = [name for name in table.column_names if name != "label"]
    return table.select(others).append_column("label", task.encode(labels))


def _strings(values: Any) -> Any:
    is_arrow = isinstance(values, pyarrow.Array | pyarrow.ChunkedArray)
    return values if is_arrow else pyarrow.array(values, "string")


def texts_of(table: pyarrow.Table) -> TextColumns:
    """Return the texts or text pairs of rows."""
    return TextColumns(
        *(table[name] for name in ("text", "text_pair") if name in table.column_names)
    )


def update_with_texts(digest: "hashlib._Hash", column: pyarrow.ChunkedArray) -> None:
    """Add the lengths and bytes of texts to a digest, independent of Arrow chunks."""
    chunks = [pc.cast(chunk, "large_binary") for chunk in column.chunks if len(chunk)]
    for texts in chunks:
        lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
        digest.update(lengths.astype(np.int64).tobytes())
    for texts in chunks:
        _, offsets, content = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset :]
        digest.update(content[int(ends[0]) : int(ends[len(texts)])])


def return_freed_memory() -> None:
    """Return freed memory to the system. Reading texts frees several times their size."""
    pyarrow.default_memory_pool().release_unused()
    host.return_freed_memory()


def number_texts(
    texts: pyarrow.ChunkedArray, pairs: pyarrow.ChunkedArray | None = None
) -> NDArray[np.int64]:
    """Assign numbers to texts in order of appearance, ignoring case and spaces."""
    return _number(TextColumns(texts, pairs).normal)


def mark_near_duplicates(rows: pyarrow.Table, train: pyarrow.Table) -> NDArray[np.bool_]:
    """Mark rows that differ from a training row only in numbers and punctuation: [rows]."""
    parts = {"rows": texts_of(rows).joined, "train": texts_of(train).joined}
    fixed = {
        name: pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, VARIABLE, " "))
        for name, texts in parts.items()
    }
    numbers = number_splits({name: [texts] for name, texts in fixed.items()})
    has_words = pc.not_equal(fixed["rows"], "").to_numpy()
    return np.asarray(np.isin(numbers["rows"], numbers["train"]) & has_words)


def number_splits(
    splits: Mapping[str, Sequence[pyarrow.ChunkedArray]],
) -> dict[str, NDArray[np.int64]]:
    """Assign numbers to the texts or pairs of each split. Equal texts get the same number."""
    tables = [
        pyarrow.table([*columns], ["text", "pair"][: len(columns)]) for columns in splits.values()
    ]
    numbers = number_texts(*pyarrow.concat_tables(tables).columns)
    ends = np.cumsum([len(columns_of_split[0]) for columns_of_split in splits.values()])[:-1]
    return dict(zip(splits, np.split(numbers, ends), strict=True))


def _number(normal: TextColumns) -> NDArray[np.int64]:
    numbers, *of_pairs = map(_number_values, normal.columns)
    for others in of_pairs:
        numbers = _number_values(pyarrow.chunked_array([numbers * len(numbers) + others]))
    return numbers


def _normalize(texts: pyarrow.Array) -> pyarrow.Array:
    normal = pc.ascii_lower(pc.ascii_trim_whitespace(texts))
    # Arrow folds only ASCII case, and is slow at joining words that it split at spaces.
    has_gaps = pc.match_substring_regex(texts, "[[:cntrl:]]|  ")
    is_other = pc.or_(has_gaps, pc.invert(pc.string_is_ascii(texts)))
    others = (" ".join(text.casefold().split()) for text in texts.filter(is_other).to_pylist())
    return pc.replace_with_mask(normal, is_other, pyarrow.array(others, "string"))


def _number_values(values: pyarrow.ChunkedArray) -> NDArray[np.int64]:
    codes = [chunk.indices.to_numpy() for chunk in values.dictionary_encode().chunks]
    return np.concatenate([np.empty(0, np.int64), *codes]).astype(np.int64)


# Splits.


def split_table(table: Splits, options: DataConfig, *, task: Task) -> Splits:
    """Return ``train``, ``validation`` and ``test``. Hold out rows for missing splits."""
    _reject_constant(table["train"], task)
    splits = _with_missing_splits(table, options, task=task)
    if options.max_train_samples is not None:
        train = splits["train"]
        rows = min(options.max_train_samples, len(train))
        is_sampled = np.arange(len(train)) < rows
        if options.data != "trec":
            is_sampled = sample_rows(_strata_of(train, task), rows=rows, seed=options.split_seed)
        splits["train"] = train.filter(is_sampled)
        _reject_constant(splits["train"], task)
    # Splits held out here share no texts with others.
    _warn_of_shared_texts({name: splits[name] for name in SPLITS if name in {"train", *table}})
    return {name: splits[name] for name in SPLITS if name in splits}


def pool_rows(loaded: LoadedData, *, folds: int, seed: int) -> Splits:
    """Return all rows outside the test split as ``train``, each with its fold, from 1.

    ``example`` is the position of a row in the pool, ``split`` its split, if there are several.
    In a table of ``finetune label``, folds contain only randomly drawn rows, including its test
    split. The other rows are in fold 0, so they are always training rows. Raise DataError for fewer
    texts than folds.
    """
    table, task, drawn = loaded.splits, loaded.task, loaded.drawn
    names = [name for name in SPLITS if name in table and (name != "test" or drawn is not None)]
    pool = pyarrow.concat_tables(table[name] for name in names)
    _reject_constant(pool, task)
    tested, texts, strata = (
        np.arange(len(pool)),
        number_texts(*texts_of(pool)),
        _strata_of(pool, task),
    )
    if drawn is not None:
        tested = np.flatnonzero(np.isin(pool["row"], drawn))
        drawn_rows = (
            f"the {len(tested):,} rows that were drawn at random; the others were chosen {HARD}"
        )
        emit(Info(f"the folds contain {drawn_rows}"))
    elif "test" in table:
        rows = len(table["test"])
        emit(Info(f"the {rows:,} rows of the test split are not used: folds exclude them"))
    if (distinct := len(np.unique(texts[tested]))) < folds:
        raise DataError(
            f"{distinct:,} different texts are too few for {folds} folds",
            remedy="add rows, or use fewer --folds",
        )
    fold = np.zeros(len(pool), np.int64)
    fold[tested] = 1 + find_folds(texts[tested], strata[tested], folds=folds, seed=seed)
    columns: dict[str, Any] = {"example": np.arange(len(pool)), "fold": fold}
    if len(names) > 1:
        columns["split"] = np.repeat(names, [len(table[name]) for name in names])
    for name, values in columns.items():
        pool = pool.append_column(name, [values])
    return {"train": pool}


def find_folds(
    texts: NDArray[np.int64], strata: NDArray[np.int64], *, folds: int, seed: int
) -> NDArray[np.int64]:
    """Return the fold of each row, from 0: [rows]. Strata are spread evenly over the folds.

    Rows with the same text, or another number, share a fold, in the stratum of the first row.
    """
    # StratifiedGroupKFold of scikit-learn takes 510 to 540 times as long
    # (docs/measurements.md#own-code-and-scikit-learn). If each class has fewer rows than there are
    # folds, it raises an error.
    _, first, group = np.unique(texts, return_index=True, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(first))
    order = order[np.argsort(strata[first][order], kind="stable")]
    fold = np.empty(len(first), np.int64)
    fold[order] = np.arange(len(first)) % folds
    return fold[group]


def split_fold(pool: pyarrow.Table, fold: int, options: DataConfig, *, task: Task) -> Splits:
    """Return splits with one fold as the test split. Validation rows come from the other folds."""
    is_test = pool["fold"].to_numpy() == fold
    tables = {"train": pool.filter(~is_test), "test": pool.filter(is_test)}
    with muted():
        return split_table(tables, options, task=task)


def _reject_constant(train: pyarrow.Table, task: Task) -> None:
    labels = task.labels(train["label"])
    if len(labels) and (labels == labels[0]).all():
        raise DataError(
            f"all {len(train):,} training rows have the label {task.format_label(labels[0])!r}",
            remedy="add rows of other classes, choose another --label-column, or raise"
            " --max-train-samples",
        )


def _draw(normal: pyarrow.ChunkedArray, *, seed: int) -> NDArray[np.uint64]:
    """Draw a random number per text that doesn't depend on the other rows: [rows]."""
    hash_texts = partial(hash_array, hash_key=f"{seed:016}"[-16:], categorize=False)
    # Texts need several times the memory as Python objects.
    pieces = (normal[start : start + 2**14] for start in range(0, len(normal), 2**14))
    hashes = [hash_texts(piece.to_numpy()) for piece in pieces]
    return np.concatenate([np.empty(0, np.uint64), *hashes])


def find_held_out(
    texts: NDArray[np.int64],
    strata: NDArray[np.int64],
    drawn: NDArray[np.uint64],
    *,
    fraction: float,
) -> NDArray[np.bool_]:
    """Mark the rows to hold out, which have the smallest random numbers: [rows].

    Each stratum contributes its share, rounded to a row, and keeps at least one text. Rows with the
    same text stay together, in the stratum of the first row. Texts and strata are numbered in order
    of first appearance, both of shape [rows]. If rows are added, dropped or relabeled, most other
    rows keep their split.
    """
    # GroupShuffleSplit of scikit-learn has no strata: with three rows per class, two of five splits
    # leave a class without training rows (docs/measurements.md#own-code-and-scikit-learn).
    sizes = np.bincount(texts)
    first_rows = np.flatnonzero(np.diff(np.maximum.accumulate(texts), prepend=-1))
    is_held_out = np.zeros(len(sizes), bool)
    rows_before = 0
    for stratum in np.unique(strata[first_rows]):
        rows = first_rows[strata[first_rows] == stratum]
        members = texts[rows[np.argsort(drawn[rows])]]
        # Rounding the running total keeps the total exact over many small classes.
        rows_after = rows_before + int(sizes[members].sum())
        quota = round(fraction * rows_after) - round(fraction * rows_before)
        rows_before = rows_after
        is_held_out[members[_find_fitting(sizes[members[:-1]], quota)]] = True
    return is_held_out[texts]


def _find_fitting(sizes: NDArray[np.int64], quota: int) -> NDArray[np.int64]:
    """Return the positions of sizes that fit into a quota, taken greedily in order."""
    left = np.arange(len(sizes))
    parts = [left[:0]]
    while len(left := left[sizes[left] <= quota]):
        count = np.searchsorted(np.cumsum(sizes[left]), quota, side="right")
        parts.append(left[:count])
        quota -= int(sizes[left[:count]].sum())
        left = left[count:]
    return np.concatenate(parts)


def _strata_of(table: pyarrow.Table, task: Task) -> NDArray[np.int64]:
    return task.strata(task.labels(table["label"]))


def held_out_fractions(table: Splits, options: DataConfig, *, task: Task) -> dict[str, float]:
    """Return the fraction of training rows, in (0, 1), that each missing split gets."""
    validation = options.validation_fraction
    if validation is None:
        # Multi-label thresholds are chosen on validation rows.
        is_worth_it = len(table["train"]) >= MIN_ROWS_TO_VALIDATE or task.problem_type == MULTI
        validation = DEFAULT_FRACTION if is_worth_it else 0.0
    fractions = {"test": options.test_fraction, "validation": validation}
    return {name: fractions[name] for name in fractions if name not in table and fractions[name]}


def _with_missing_splits(table: Splits, options: DataConfig, *, task: Task) -> Splits:
    splits, train = dict(table), table["train"]
    rows_of_table, missing = len(train), held_out_fractions(table, options, task=task)
    if missing:
        normal = texts_of(train).normal
        texts, drawn = _number(normal), _draw(normal.joined, seed=options.split_seed)
        del normal
        if task.problem_type == SINGLE:
            _warn_of_contradictions(texts, _strata_of(train, task))
    for name, fraction_of_table in missing.items():
        rows = fraction_of_table * rows_of_table
        mask = np.zeros(len(train), bool)
        if rows < len(train):
            strata, fraction = _strata_of(train, task), rows / len(train)
            mask = find_held_out(texts, strata, drawn, fraction=fraction)
        if mask.any():
            splits[name] = train.filter(mask)
            train, texts, drawn = train.filter(~mask), texts[~mask], drawn[~mask]
        elif name == "test" or options.validation_fraction is not None:
            zero = ", or 0 for none" if name == "validation" else ""
            raise DataError(
                f"too few rows for a {name} split of {max(round(rows), 1):,}:"
                f" {len(train):,} rows, {len(np.unique(texts)):,} different texts,"
                f" {task.label_summary}",
                remedy=f"add rows, or set another --{name}-fraction{zero}",
            )
    if "test" in missing:
        held_out = f"holding out a random {options.test_fraction:.0%} as the test split"
        counts = f"{len(splits['test'])} of {rows_of_table} rows"
        emit(Info(f"no test file: {held_out}, {counts}"))
    if "validation" not in splits and options.validation_fraction is None:
        few = f"10% of {rows_of_table} rows or of a class is too few to choose a model"
        hint = f"--validation-fraction {DEFAULT_FRACTION} holds out 10%"
        emit(Info(f"no validation split: {few}; {hint}"))
    return splits | {"train": train}


def sample_rows(strata: NDArray[np.int64], *, rows: int, seed: int) -> NDArray[np.bool_]:
    """Draw a stratified random sample, as a mask: [rows]."""
    shuffled = np.random.default_rng(seed).permutation(len(strata))
    by_stratum = shuffled[np.argsort(strata[shuffled], kind="stable")]
    counts = np.bincount(strata)[strata[by_stratum]]
    ranks = np.arange(len(strata)) - np.searchsorted(strata[by_stratum], strata[by_stratum])
    is_taken = np.zeros(len(strata), bool)
    is_taken[by_stratum[np.argsort(ranks / counts, kind="stable")[:rows]]] = True
    return is_taken


def _warn_of_contradictions(texts: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
    label_of_text = np.zeros(int(texts.max(initial=0)) + 1, labels.dtype)
    label_of_text[texts] = labels
    contradicted = texts[labels != label_of_text[texts]]
    if several := np.count_nonzero(np.bincount(contradicted)):
        finding = f"{several:,} texts have contradictory labels"
        remedy = "choose one label for each text; finetune data check shows examples"
        emit(WarningMessage(finding, remedy=remedy))


def _warn_of_shared_texts(splits: Splits) -> None:
    """Warn about rows of other splits whose texts are also in ``train``."""
    if len(splits) == 1:
        return
    numbers = number_splits({name: texts_of(rows).columns for name, rows in splits.items()})
    train = numbers.pop("train")
    for name, split_numbers in numbers.items():
        if shared := int(np.isin(split_numbers, train).sum()):
            finding = (
                f"{shared:,} of the {len(split_numbers):,} {name} rows have a text that is also in"
            )
            finding += " train, which makes a model look better than it is"
            remedy = "remove them from train; finetune data check shows examples"
            emit(WarningMessage(finding, remedy=remedy))
