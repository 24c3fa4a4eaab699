"""Hold rows out for validation and test: seeded, in the proportions of strata, without leaks."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray

from finetune.data.dataset import column_of, rows_where, texts_of
from finetune.data.repeats import number_splits, number_texts
from finetune.errors import DataError
from finetune.events import Emit, Info, WarningMessage
from finetune.tasks.base import Task


@dataclass(frozen=True)
class NumberedRows:
    """Rows, and the number of each one's text, which ascends with first appearance: [rows]."""

    table: Dataset
    texts: NDArray[np.int64]
    task: Task

    @classmethod
    def of(cls, table: Dataset, task: Task) -> "NumberedRows":
        """Return the rows of a table with the numbers of their texts, or pairs."""
        return cls(table, number_texts(*texts_of(table)), task)

    def hold_out(self, *, fraction: float, seed: int) -> tuple["NumberedRows", "NumberedRows"]:
        """Divide the rows into those that are kept and those that are held out.

        Each stratum of the task, such as a class, gives its share, to within a row. Rows whose
        texts, or pairs, differ in nothing but case and spaces stay together, and each stratum keeps
        at least one text. Both parts are in the table's order, and the same for the same seed. The
        fraction is in 0..1.
        """
        generator = np.random.default_rng(seed)
        sizes = np.bincount(self.texts)
        is_held_out = np.zeros(len(sizes), bool)
        rows_before = 0
        for members in self._texts_of_strata():
            # Rounding the running total keeps the total exact over many small classes.
            rows_after = rows_before + int(sizes[members].sum())
            quota = round(fraction * rows_after) - round(fraction * rows_before)
            rows_before = rows_after
            shuffled = members[generator.permutation(len(members))[1:]]
            is_held_out[shuffled[_find_fitting(sizes[shuffled], quota)]] = True
        return self._where(~is_held_out[self.texts]), self._where(is_held_out[self.texts])

    def _texts_of_strata(self) -> list[NDArray[np.int64]]:
        """Return for each stratum, in their order, the numbers of its texts as they appear.

        A text with several labels counts among the stratum of its first row.
        """
        first_rows = np.flatnonzero(np.diff(np.maximum.accumulate(self.texts), prepend=-1))
        strata = strata_of(self.table, self.task)[first_rows]
        return [self.texts[first_rows[strata == stratum]] for stratum in np.unique(strata)]

    def _where(self, mask: NDArray[np.bool_]) -> "NumberedRows":
        return NumberedRows(rows_where(self.table, mask), self.texts[mask], self.task)


def strata_of(table: Dataset, task: Task) -> NDArray[np.int64]:
    """Return the group of each row, of which a split takes its share: of shape [rows]."""
    return task.strata(task.labels(column_of(table, "label")))


@dataclass(frozen=True)
class SplitOptions:
    """How splits are made that the data does not bring.

    The fractions are shares of the given training rows, in 0..1; at 0 no validation split is made.
    """

    validation_fraction: float
    test_fraction: float
    split_seed: int
    max_train_samples: int | None


def split_table(
    table: DatasetDict, options: SplitOptions, *, task: Task, takes_first: bool, emit: Emit
) -> DatasetDict:
    """Return the splits ``train``, ``validation`` and ``test``, disjoint where they are made here.

    Splits that the data brings stay as they are; the others are held out of ``train``. Where the
    training rows are limited, the first ones are taken with ``takes_first``, else a sample.

    Raises:
        DataError: If there are too few rows for one of the splits, or all training rows that are
            left have one label.
    """
    splits = _with_missing_splits(table, options, task=task, emit=emit)
    if options.max_train_samples is not None:
        train = splits["train"]
        rows = min(options.max_train_samples, len(train))
        splits["train"] = (
            train.select(range(rows))
            if takes_first
            else _sample_rows(train, strata_of(train, task), rows=rows, seed=options.split_seed)
        )
    _refuse_constant(splits["train"], task)
    order = ("train", "validation", "test")
    # Those that are made here share none.
    given = [name for name in order[1:] if name in table]
    _warn_of_shared_texts({name: splits[name] for name in ("train", *given)}, emit=emit)
    return DatasetDict({name: splits[name] for name in order if name in splits})


def _with_missing_splits(
    table: DatasetDict, options: SplitOptions, *, task: Task, emit: Emit
) -> dict[str, Dataset]:
    fractions = {"test": options.test_fraction, "validation": options.validation_fraction}
    missing = [
        name for name, share in fractions.items() if name not in table and (share or name == "test")
    ]
    if not missing:
        return dict(table)
    splits, given_rows = dict(table), len(table["train"])
    train = NumberedRows.of(table["train"], task)
    for name in missing:
        rows = fractions[name] * given_rows
        train, held_out = _hold_out_some(train, rows=rows, seed=options.split_seed, purpose=name)
        splits |= {"train": train.table, name: held_out.table}
    if "test" in missing:
        emit(
            Info(
                f"no test file: a random {options.test_fraction:.0%} is held out as the test split,"
                f" {len(splits['test'])} of {given_rows} rows"
            )
        )
    return splits


def _sample_rows(table: Dataset, strata: NDArray[np.int64], *, rows: int, seed: int) -> Dataset:
    """Return a random sample in the table's order, in which each stratum has its share.

    Where there are as many rows as strata, each stratum has at least one.
    """
    shuffled = np.random.default_rng(seed).permutation(len(strata))
    by_stratum = shuffled[np.argsort(strata[shuffled], kind="stable")]
    counts = np.bincount(strata)[strata[by_stratum]]
    ranks = np.arange(len(strata)) - np.searchsorted(strata[by_stratum], strata[by_stratum])
    is_taken = np.zeros(len(strata), bool)
    is_taken[by_stratum[np.argsort(ranks / counts, kind="stable")[:rows]]] = True
    return rows_where(table, is_taken)


def _refuse_constant(table: Dataset, task: Task) -> None:
    if constant := task.find_constant(task.labels(column_of(table, "label"))):
        raise DataError(
            f"all {len(table):,} training rows have {constant}",
            remedy="raise --max-train-samples, or bring training rows of at least two classes",
        )


def _warn_of_shared_texts(splits: Mapping[str, Dataset], *, emit: Emit) -> None:
    """Warn of rows of the splits beside ``train`` whose texts are in it too."""
    if len(splits) == 1:
        return
    numbers = number_splits({name: texts_of(rows).columns for name, rows in splits.items()})
    train = numbers.pop("train")
    for name, own in numbers.items():
        if shared := int(np.isin(own, train).sum()):
            emit(
                WarningMessage(
                    f"{shared:,} of the {len(own):,} {name} rows have a text that is in train too,"
                    " which makes a model look better than it is",
                    remedy="remove them from train; finetune data check shows examples",
                )
            )


def _find_fitting(sizes: NDArray[np.int64], quota: int) -> NDArray[np.int64]:
    """Return the positions of the sizes that are taken if each is that still fits into a quota."""
    left = np.arange(len(sizes))
    taken = [left[:0]]
    while len(left := left[sizes[left] <= quota]):
        count = np.searchsorted(np.cumsum(sizes[left]), quota, side="right")
        taken.append(left[:count])
        quota -= int(sizes[left[:count]].sum())
        left = left[count:]
    return np.concatenate(taken)


def _hold_out_some(
    given: NumberedRows, *, rows: float, seed: int, purpose: str
) -> tuple[NumberedRows, NumberedRows]:
    count = len(given.table)
    if rows < count:
        kept, held_out = given.hold_out(fraction=rows / count, seed=seed)
        if len(held_out.table) > 0:
            return kept, held_out
    zero = ", or 0 for none" if purpose == "validation" else ""
    raise DataError(
        f"there are too few rows for a {purpose} split of {max(round(rows), 1):,}: {count:,} rows,"
        f" {len(np.unique(given.texts)):,} different texts, {given.task.label_summary}",
        remedy=f"bring more rows or choose another --{purpose}-fraction{zero}",
    )
