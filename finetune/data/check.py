"""What is odd about data: repeats, contradictions, test rows that stand in the training split.

Two texts are the same here if they are for the splits that are held out: up to case and spaces.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import DatasetDict
from numpy.typing import NDArray

from finetune.data.repeats import normal_form, rows_by_text

EXAMPLES = 3
SHORT_CHARACTERS = 3
RARE_ROWS = 10
STRONG_IMBALANCE = 10.0
# A tail is long if the longest text has more than so many times the tokens of all but 0.5 %.
LONG_TAIL = 2.0

Metrics = dict[str, Any]


def check_splits(splits: DatasetDict) -> Metrics:
    """Look for what is odd in splits, ``train`` among them, without a model.

    Returns:
        By split: ``rows``, ``classes``, ``repeats``, ``conflicts``, ``short_texts`` and, of all
        but ``train``, ``overlap``. Of ``train`` alone: ``balance``. Each is what the function of
        this module says that finds it.
    """
    names = splits["train"].features["label"].names
    texts = {split: list(rows["text"]) for split, rows in splits.items()}
    labels = {split: [names[label] for label in rows["label"]] for split, rows in splits.items()}
    counts = {split: Counter(labels[split]) for split in splits}
    classes = {split: {name: counts[split][name] for name in names} for split in splits}
    return {
        "rows": {split: len(rows) for split, rows in splits.items()},
        "classes": classes,
        "repeats": {split: find_repeats(texts[split]) for split in splits},
        "conflicts": {split: find_conflicts(texts[split], labels[split]) for split in splits},
        "short_texts": {split: find_short_texts(texts[split]) for split in splits},
        "overlap": {
            split: find_overlap(
                texts[split],
                labels[split],
                train_texts=texts["train"],
                train_labels=labels["train"],
            )
            for split in splits
            if split != "train"
        },
        "balance": weigh_classes(classes["train"]),
    }


def find_repeats(texts: Sequence[str]) -> Metrics:
    """Count the rows that repeat an earlier row's text.

    Returns:
        ``rows`` that do so letter for letter, and the ``texts`` that recur in this way;
        ``rows_up_to_case`` and ``texts_up_to_case``, the same with case and spaces ignored;
        ``examples`` of the latter.
    """
    recurring = [count for count in Counter(texts).values() if count > 1]
    groups = [rows for rows in rows_by_text(texts).values() if len(rows) > 1]
    return {
        "rows": sum(recurring) - len(recurring),
        "texts": len(recurring),
        "rows_up_to_case": sum(map(len, groups)) - len(groups),
        "texts_up_to_case": len(groups),
        "examples": [texts[rows[0]] for rows in groups[:EXAMPLES]],
    }


def find_conflicts(texts: Sequence[str], labels: Sequence[str]) -> Metrics:
    """Find the texts that have several labels.

    Returns:
        How many ``texts``, and ``examples`` with ``text`` and ``labels``.
    """
    conflicts = [
        {"text": texts[rows[0]], "labels": sorted({labels[row] for row in rows})}
        for rows in rows_by_text(texts).values()
        if len({labels[row] for row in rows}) > 1
    ]
    return {"texts": len(conflicts), "examples": conflicts[:EXAMPLES]}


def find_short_texts(texts: Sequence[str]) -> Metrics:
    """Find the texts of fewer than ``SHORT_CHARACTERS`` characters besides the spaces around them.

    Returns:
        How many ``rows``, how many of them are ``empty``, and ``examples``.
    """
    short = [text for text in texts if len(text.strip()) < SHORT_CHARACTERS]
    return {
        "rows": len(short),
        "empty": sum(not text.strip() for text in short),
        "examples": short[:EXAMPLES],
    }


def find_overlap(
    texts: Sequence[str],
    labels: Sequence[str],
    *,
    train_texts: Sequence[str],
    train_labels: Sequence[str],
) -> Metrics:
    """Find the rows of a split whose texts stand in the training split too.

    Returns:
        How many ``rows``; how many of them are ``disagreeing``, with a label that the text has
        not there; and ``examples``, these first, with ``text``, ``label`` and ``train_labels``.
    """
    train_rows = rows_by_text(train_texts)
    shared = []
    for text, label in zip(texts, labels, strict=True):
        if rows := train_rows.get(normal_form(text)):
            there = sorted({train_labels[row] for row in rows})
            shared.append({"text": text, "label": label, "train_labels": there})
    shared.sort(key=lambda row: row["label"] in row["train_labels"])
    return {
        "rows": len(shared),
        "disagreeing": sum(row["label"] not in row["train_labels"] for row in shared),
        "examples": shared[:EXAMPLES],
    }


def weigh_classes(counts: Mapping[str, int]) -> Metrics:
    """Compare the largest and the smallest class.

    Args:
        counts: Rows of each class.

    Returns:
        The ``largest`` class; the ``smallest`` of those that have rows; ``ratio``, the rows of
        the one over those of the other; and ``rare``, the rows of each class that has fewer than
        ``RARE_ROWS``.
    """
    present = {name: count for name, count in counts.items() if count > 0}
    largest, smallest = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
    return {
        "largest": largest,
        "smallest": smallest,
        "ratio": present[largest] / present[smallest],
        "rare": {name: count for name, count in counts.items() if count < RARE_ROWS},
    }


def measure_lengths(lengths: NDArray[np.int64], *, max_length: int) -> Metrics:
    """Describe how long the texts of a split are.

    Args:
        lengths: Tokens of each text, special ones included: int64 of shape [rows].
        max_length: Most tokens that a text may keep.

    Returns:
        ``mean``, ``p50``, ``p95``, ``p99`` and ``max``, in tokens; ``cut_rows``, the texts that
        are longer than the maximum, and ``cut_share``, in 0..1.
    """
    cut_rows = int(np.count_nonzero(lengths > max_length))
    cut = {"cut_rows": cut_rows, "cut_share": cut_rows / len(lengths)}
    return {**describe_lengths(lengths), **cut}


def describe_lengths(lengths: NDArray[np.int64]) -> Metrics:
    """Return ``mean``, ``p50``, ``p95``, ``p99`` and ``max`` of lengths, int64 of shape [rows]."""
    return {
        "mean": float(lengths.mean()),
        **{f"p{share}": float(np.percentile(lengths, share)) for share in (50, 95, 99)},
        "max": int(lengths.max()),
    }


def suggest_max_length(lengths: NDArray[np.int64], *, max_tokens: int) -> int:
    """Return the smallest multiple of 8 that cuts no text, or 0.5 % of them where a few are long.

    Args:
        lengths: Tokens of each training text: int64 of shape [rows].
        max_tokens: Tokens of the longest text that the model takes.

    >>> suggest_max_length(np.array([13, 22, 41]), max_tokens=512)
    48
    """
    nearly_all = float(np.percentile(lengths, 99.5))
    longest = int(lengths.max())
    needed = nearly_all if longest > LONG_TAIL * nearly_all else longest
    return min(8 * int(np.ceil(needed / 8)), max_tokens)


def suggest_changes(findings: Metrics, *, lengths: Metrics | None) -> list[dict[str, str]]:
    """Return what a user may want to change, each as ``finding`` and ``remedy``.

    Args:
        findings: What :func:`check_splits` returns.
        lengths: ``max_length``; ``suggested_max_length``; and of each of the ``splits`` what
            :func:`measure_lengths` returns. ``None`` if the lengths are not known.
    """
    pairs = [
        *_about_balance(findings["balance"]),
        *_about_texts(findings),
        *_about_overlap(findings["overlap"]),
        *(_about_lengths(lengths) if lengths else ()),
    ]
    return [{"finding": finding, "remedy": remedy} for finding, remedy in pairs]


def _about_balance(balance: Metrics) -> Iterator[tuple[str, str]]:
    if balance["ratio"] >= STRONG_IMBALANCE:
        yield (
            f"{balance['largest']} has {balance['ratio']:.1f} times the training rows of"
            f" {balance['smallest']}",
            "--class-weights balanced",
        )
    if balance["rare"]:
        classes = ", ".join(f"{name} ({count})" for name, count in balance["rare"].items())
        yield (
            f"classes with fewer than {RARE_ROWS} training rows: {classes}",
            "bring more rows of them, or join them with others",
        )


def _about_texts(findings: Metrics) -> Iterator[tuple[str, str]]:
    for split, conflicts in findings["conflicts"].items():
        if conflicts["texts"]:
            yield (
                f"texts of {split} with several labels: {conflicts['texts']:,}",
                "decide on one label for each",
            )
    for split, short in findings["short_texts"].items():
        if short["rows"]:
            yield (
                f"texts of {split} with fewer than {SHORT_CHARACTERS} characters:"
                f" {short['rows']:,}",
                "look whether they say enough to be classified",
            )


def _about_overlap(overlap: Mapping[str, Metrics]) -> Iterator[tuple[str, str]]:
    for split, shared in overlap.items():
        if shared["rows"]:
            yield (
                f"rows of {split} whose text stands in train too: {shared['rows']:,}, with another"
                f" label there: {shared['disagreeing']:,}",
                "take them out of train: a model that has seen them looks better than it is",
            )


def _about_lengths(lengths: Metrics) -> Iterator[tuple[str, str]]:
    if lengths["suggested_max_length"] > lengths["max_length"]:
        train = lengths["splits"]["train"]
        yield (
            f"training texts of more than {lengths['max_length']} tokens, which lose their end:"
            f" {train['cut_rows']:,} ({train['cut_share']:.1%})",
            f"--max-length {lengths['suggested_max_length']}",
        )
