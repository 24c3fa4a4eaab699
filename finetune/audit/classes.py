"""Classes that may be one: alike in their names, or to a head that has not seen the rows."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.tables import wilson_interval

# Of shorter names one letter is often the difference between two words.
MIN_LETTERS, MIN_LETTERS_OF_TWO = 4, 9
# Of a class: fewer say nothing on whether it can be told from another.
MIN_ROWS, MAX_TOLD_APART = 10, 0.65
# Times the mean probability of the other class in all rows.
MIN_LIFT = 3.0


@dataclass(frozen=True)
class Merge:
    """A class that may be another one: ``by`` its ``name`` or by the ``model``, and why."""

    label: str
    into: str
    by: str
    why: str


def find_merges(
    names: Sequence[str], probabilities: NDArray[np.float32], labels: NDArray[np.int64]
) -> list[Merge]:
    """Return classes that are alike in their names, then those that a head can't tell apart.

    A difference in case, spaces, punctuation, accents or Unicode form alone is always one. Names
    that differ in a letter or in the plural are, too, if a head takes the rows of the one with
    fewer rows for the other's rather than for any other class's: so ``plane`` stays apart from
    ``planet``. Probabilities are [rows, classes], labels class numbers [rows].
    """
    counts = np.bincount(labels, minlength=len(names))
    order = np.argsort(labels, kind="stable")
    rows_of = np.split(order, np.cumsum(counts)[:-1])
    alike: dict[int, Merge] = {}
    for few, many in sorted(_alike(names), key=lambda pair: -counts[pair[0]]):
        if counts[few] > counts[many] or (counts[few] == counts[many] and few < many):
            few, many = many, few
        if few in alike or not counts[few]:
            continue
        is_same = _plain(names[few]) == _plain(names[many])
        if is_same or _is_taken_for(probabilities, rows_of[few], few, many):
            why = "differs in case, spaces or marks alone" if is_same else "spelt almost the same"
            alike[few] = Merge(names[few], names[many], "name", why)
    confused = _confused(names, probabilities, labels, rows_of)
    named = {one.label for one in alike.values()}
    return [*alike.values(), *(one for one in confused if not {one.label, one.into} & named)]


def _plain(name: str) -> str:
    # Accents that are marks of their own are no word characters.
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKD", name.casefold()))


def _alike(names: Sequence[str]) -> set[tuple[int, int]]:
    """Return pairs of names that are equal when a letter, of long ones two, is left out of each.

    That finds letters that are missing, added, changed or exchanged with the next. Numbers in
    names, such as ``level 1``, have to be the same.
    """
    by_form: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, name in enumerate(names):
        plain = _plain(name)
        forms = {plain} if plain else {name}
        if len(plain) >= MIN_LETTERS and not plain.isdecimal():
            for _ in range(1 + (len(plain) >= MIN_LETTERS_OF_TWO)):
                forms |= {one[:at] + one[at + 1 :] for one in forms for at in range(len(one))}
        digits = re.sub(r"\D", "", plain)
        for form in forms:
            by_form[form, digits].append(number)
    return {
        (one, other)
        for numbers in by_form.values()
        for place, one in enumerate(numbers)
        for other in numbers[place + 1 :]
    }


def _is_taken_for(
    probabilities: NDArray[np.float32], rows: NDArray[np.int64], few: int, many: int
) -> bool:
    """Return whether rows of a class are given to another one rather than to any else."""
    own = probabilities[rows]
    others = np.delete(np.arange(own.shape[1]), few)
    is_best = others[own[:, others].argmax(axis=1)] == many
    is_above = own[:, many] > own[:, few]
    is_likely = own[:, many].mean() >= MIN_LIFT * probabilities[:, many].mean()
    return bool(2 * is_above.sum() >= len(own) and (is_likely or 2 * is_best.sum() >= len(own)))


def _confused(
    names: Sequence[str],
    probabilities: NDArray[np.float32],
    labels: NDArray[np.int64],
    rows_of: Sequence[NDArray[np.int64]],
) -> Iterator[Merge]:
    """Yield pairs of classes between which a head decides no better than by chance."""
    predicted = probabilities.argmax(axis=1)
    wrong = predicted != labels
    pairs = np.sort(np.stack([labels[wrong], predicted[wrong]], axis=1), axis=1)
    for one, other in np.unique(pairs, axis=0).tolist():
        sizes = [len(rows_of[number]) for number in (one, other)]
        if min(sizes) < MIN_ROWS:
            continue
        share = [
            float(np.mean(probabilities[rows_of[mine], mine] > probabilities[rows_of[mine], its]))
            for mine, its in ((one, other), (other, one))
        ]
        balanced, rows = sum(share) / 2, 4 / (1 / sizes[0] + 1 / sizes[1])
        if balanced < MAX_TOLD_APART and wilson_interval(balanced * rows, rows)[0] <= 0.5:
            few, many = sorted((one, other), key=lambda number: len(rows_of[number]))
            why = f"a head tells them apart for {balanced:.0%} of the rows; chance is 50%"
            yield Merge(names[few], names[many], "model", why)
