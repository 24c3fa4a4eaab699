"""Hold rows out for validation and test: seeded, in the classes' proportions, without leaks."""

from collections import defaultdict

import numpy as np
from datasets import Dataset, DatasetDict

from finetune.data.repeats import rows_by_text
from finetune.errors import DataError
from finetune.events import Emit, Stage


def hold_out(table: Dataset, *, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Part a table into rows that are kept and rows that are held out.

    Each class gives its share, to within a row. Rows whose texts differ in nothing but case and
    spaces stay together, and each class keeps at least one text. Both parts are in the table's
    order.

    Args:
        table: Has the columns ``text`` and ``label``.
        fraction: Share of the rows to hold out, in 0..1.
        seed: The same seed gives the same parts.
    """
    generator = np.random.default_rng(seed)
    held_out: list[int] = []
    rows_before = 0
    for groups in _groups_of_classes(table):
        # Rounding the running total keeps the total exact over many small classes.
        rows_after = rows_before + sum(map(len, groups))
        quota = round(fraction * rows_after) - round(fraction * rows_before)
        rows_before = rows_after
        for position in generator.permutation(len(groups))[1:]:
            if len(groups[position]) <= quota:
                held_out += groups[position]
                quota -= len(groups[position])
    kept = set(range(len(table))).difference(held_out)
    return table.select(sorted(kept)), table.select(sorted(held_out))


def split_table(
    table: DatasetDict, *, validation_fraction: float, test_fraction: float, seed: int, emit: Emit
) -> DatasetDict:
    """Return the splits ``train``, ``validation`` and ``test``, disjoint where they are made here.

    Splits that the data brings stay as they are; the others are held out of ``train``.

    Args:
        table: Has the split ``train``, and maybe ``validation`` and ``test``.
        validation_fraction: Share of the given training rows, in 0..1; at 0 no validation split
            is made.
        test_fraction: Share of the given training rows, in 0..1.
        seed: The same seed gives the same splits.
        emit: Is told if a test split is made.

    Raises:
        DataError: If there are too few rows for one of the splits.
    """
    splits = dict(table)
    given_rows = len(table["train"])
    if "test" not in table:
        splits["train"], splits["test"] = _hold_out_some(
            splits["train"], rows=test_fraction * given_rows, seed=seed, purpose="test"
        )
        emit(
            Stage(
                f"the data has no test split: {len(splits['test'])} of {given_rows} rows are held"
                " out as one"
            )
        )
    if "validation" not in table and validation_fraction > 0:
        splits["train"], splits["validation"] = _hold_out_some(
            splits["train"], rows=validation_fraction * given_rows, seed=seed, purpose="validation"
        )
    order = ("train", "validation", "test")
    return DatasetDict({name: splits[name] for name in order if name in splits})


def _groups_of_classes(table: Dataset) -> list[list[list[int]]]:
    """Return for each class its texts, each as the numbers of the rows that repeat it.

    A text with several labels counts among the class of its first row.
    """
    labels = list(table["label"])
    groups_of_class: dict[int, list[list[int]]] = defaultdict(list)
    for rows in rows_by_text(table["text"]).values():
        groups_of_class[labels[rows[0]]].append(rows)
    return [groups_of_class[label] for label in sorted(groups_of_class)]


def _hold_out_some(
    table: Dataset, *, rows: float, seed: int, purpose: str
) -> tuple[Dataset, Dataset]:
    if rows < len(table):
        kept, held_out = hold_out(table, fraction=rows / len(table), seed=seed)
        if len(held_out) > 0:
            return kept, held_out
    zero = ", or 0 for none" if purpose == "validation" else ""
    raise DataError(
        f"there are too few rows for a {purpose} split: {rows:.1f} of {len(table)}",
        remedy=f"bring more rows or choose another --{purpose}-fraction{zero}",
    )
