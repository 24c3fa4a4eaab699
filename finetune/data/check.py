"""Problems in the data: duplicates, contradictory labels, test rows in the training split.

Two texts are equal if they differ only in case and spaces, like in held-out splits. A new check
of texts needs a function of (split, train) that returns a ``Finding``, and an entry in ``CHECKS``.
Both are frames with a row per text: ``text``, ``number`` (shared by equal texts) and ``label``.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas
import pyarrow
from numpy.typing import NDArray

from finetune.data.dataset import Splits, number_splits, texts_of
from finetune.events import WarningMessage
from finetune.tasks.base import Task
from finetune.tasks.explanation import find_words
from finetune.tasks.labels import listed, listed_counts, name_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_EXAMPLES = 3
# Words in this fraction of a class, and in hardly any other text, may be a footer or a template.
# In TREC, no word comes close: "who" is in 48% of the questions about persons.
MIN_IN_CLASS, MAX_IN_OTHERS, MAX_TEMPLATE_ROWS = 0.75, 0.05, 2_000
RARE_ROWS = 10
STRONG_IMBALANCE, BALANCE = 10.0, "use --class-weights balanced"
# Minimum ratio of rows between a class and its misspelling.
MISSPELLING_RATIO, MIN_SIMILARITY, MAX_COMPARED_NAMES = 5, 0.85, 500
# Texts are unusually long if the longest has this many times more tokens than 99.5% of the texts.
LONG_TAIL = 2.0
# Maximum fraction of unknown tokens for a suitable model. They come from emoji and rare words.
MAX_UNKNOWN = 0.05
# If the vocabulary contains words of the script, tokens per letter reach about 0.75 (Korean).
MAX_TOKENS_PER_LETTER, MAX_TOKENS_PER_CHARACTER = 0.85, 1.3
SCRIPT_TEXTS, SCRIPT_WORDS = 1_000, 5_000
FIRST_LETTER_BEYOND_LATIN, EAST_ASIAN = "\u0370", re.compile("[\u3040-\u30ff\u4e00-\u9fff]")
# The vocabulary of the default model is English.
MULTILINGUAL_MODEL = "bert-base-multilingual-cased"
# What a check finds in a split, as in the JSON: counts and a few examples.
Finding = dict[str, Any]


@dataclass(frozen=True)
class Lengths:
    """Token counts with the model's tokenizer, and the number of training texts beyond limits."""

    model: str
    max_length: int
    suggested_max_length: int
    beyond_suggested: int
    beyond_model: int
    unknown_share: float
    splits: dict[str, dict[str, float]]


def _labels_of(rows: pandas.DataFrame, number: int) -> list[str]:
    """Return the labels of a text."""
    return sorted({*rows["label"][rows["number"] == number]})


def find_repeats(split: pandas.DataFrame, train: pandas.DataFrame) -> Finding:
    """Count rows that repeat the text of an earlier row, exactly or up to case and spaces."""
    repeated = split[split.duplicated("number", keep=False)]
    first, exact = repeated.drop_duplicates("number"), repeated["text"].value_counts()
    return {
        "rows": int((exact - 1).sum()),
        "texts": int((exact > 1).sum()),
        "rows_up_to_case": len(repeated) - len(first),
        "texts_up_to_case": len(first),
        "examples": first["text"][:MAX_EXAMPLES].tolist(),
    }


def find_conflicts(split: pandas.DataFrame, train: pandas.DataFrame) -> Finding:
    """Count texts with several labels."""
    repeated = split[split.duplicated("number", keep=False)]
    labeled = repeated.drop_duplicates(["number", "label"])
    first = labeled[labeled.duplicated("number", keep=False)].drop_duplicates("number")
    examples = [
        {"text": row.text, "labels": _labels_of(split, row.number)}
        for row in first[:MAX_EXAMPLES].itertuples()
    ]
    return {"texts": len(first), "examples": examples}


def find_overlap(split: pandas.DataFrame, train: pandas.DataFrame) -> Finding | None:
    """Count rows whose text is also in the training split, in total and with another label."""
    if split is train:
        return None
    shared = split[split["number"].isin(train["number"])]
    train = train[train["number"].isin(shared["number"])]
    keys = [pandas.MultiIndex.from_frame(part[["number", "label"]]) for part in (shared, train)]
    agrees = keys[0].isin(keys[1])
    examples = [
        {"text": row.text, "label": row.label, "train_labels": _labels_of(train, row.number)}
        for row in pandas.concat([shared[~agrees], shared[agrees]])[:MAX_EXAMPLES].itertuples()
    ]
    return {"rows": len(shared), "disagreeing": int((~agrees).sum()), "examples": examples}


class Check(NamedTuple):
    """A check: its function, the titles of its counts, and the remedy if the first is not 0."""

    find: Callable[[pandas.DataFrame, pandas.DataFrame], Finding | None]
    titles: Mapping[str, str]
    remedy: str | None = None


# Checks by their key in the JSON.
CHECKS = {
    "repeats": Check(
        find_repeats,
        {
            "rows": "duplicates of an earlier row",
            "texts": "texts with duplicates",
            "rows_up_to_case": "duplicates ignoring case and spaces",
        },
    ),
    "conflicts": Check(
        find_conflicts,
        {"texts": "texts with contradictory labels"},
        "choose one label for each text",
    ),
    "overlap": Check(
        find_overlap,
        {"rows": "rows whose text is also in train", "disagreeing": "with another label in train"},
        "remove them from train, because they make a model look better than it is",
    ),
}


def check_splits(splits: Splits, task: Task) -> dict[str, dict[str, Any]]:
    """Check splits, including ``train``, for problems that need no model to find.

    Return ``rows``, ``classes``, ``figures`` and the findings of ``CHECKS``, for each split.
    """
    texts = {split: texts_of(rows) for split, rows in splits.items()}
    text_numbers = number_splits({split: columns.columns for split, columns in texts.items()})
    labels = {split: task.labels(rows["label"]) for split, rows in splits.items()}
    parts = {}
    for split, columns in texts.items():
        distinct, numbers = np.unique(labels[split], axis=0, return_inverse=True)
        names = np.array([task.format_label(label) for label in distinct], object)
        text = columns.joined.to_pandas(types_mapper=pandas.ArrowDtype)
        rows = {"text": text, "number": text_numbers[split], "label": names[numbers]}
        parts[split] = pandas.DataFrame(rows)
    report: dict[str, dict[str, Any]] = {
        "rows": {split: len(rows) for split, rows in splits.items()},
        "classes": {split: task.count_classes(array) for split, array in labels.items()},
        "figures": {split: task.describe(array) for split, array in labels.items()},
    }
    if task.class_names:
        report["templates"] = find_templates(parts["train"])
    for name, check in CHECKS.items():
        findings = {split: check.find(part, parts["train"]) for split, part in parts.items()}
        report[name] = {split: finding for split, finding in findings.items() if finding}
    return report


def find_imbalance(counts: Mapping[str, int]) -> Iterator[WarningMessage]:
    """Yield suggestions for strong class imbalance and for rare classes."""
    present = sorted(filter(counts.__getitem__, counts), key=counts.__getitem__)
    if not present:
        return
    smallest, largest = present[0], present[-1]
    if (ratio := counts[largest] / counts[smallest]) >= STRONG_IMBALANCE:
        finding = f"{largest} has {ratio:.1f} times the training rows of {smallest}"
        yield WarningMessage(finding, BALANCE)
    if rare := {name: count for name, count in counts.items() if count < RARE_ROWS}:
        finding = f"classes with fewer than {RARE_ROWS} training rows: {listed_counts(rare)}"
        yield WarningMessage(finding, "add rows of these classes, or merge them with others")


def find_misspelled_names(counts: Mapping[str, int]) -> Iterator[WarningMessage]:
    """Yield rare classes whose names almost match a class with many more rows.

    >>> [row.message for row in find_misspelled_names({"billing": 90, "biling": 2, "refund": 80})]
    ["'biling' (2 rows) may be a misspelling of 'billing'"]
    """
    for name, other in match_misspelled_names(counts).items():
        rows = "1 row" if counts[name] == 1 else f"{counts[name]:,} rows"
        finding = f"{name!r} ({rows}) may be a misspelling of {other!r}"
        yield WarningMessage(finding, "use --label-map FILE, which renames and merges classes")


def match_misspelled_names(counts: Mapping[str, int]) -> dict[str, str]:
    """Return the probable correct name of each class from ``find_misspelled_names``."""
    matches = {}
    for name, count in counts.items() if len(counts) <= MAX_COMPARED_NAMES else ():
        common = [other for other in counts if counts[other] >= MISSPELLING_RATIO * max(count, 1)]
        same_digits = [
            other for other in common if re.findall(r"\d", other) == re.findall(r"\d", name)
        ]
        for other in difflib.get_close_matches(name, same_digits, n=1, cutoff=MIN_SIMILARITY):
            matches[name] = other
    return matches


def find_templates(train: pandas.DataFrame) -> dict[str, list[str]]:
    """Return, by class, the words in nearly all of its texts and in hardly any other text.

    Ignore single words and class names, because the texts may be about them.

    >>> rows = [(f"ticket {n} via Acme", "a") for n in range(10)] + [("a ticket", "b")] * 10
    >>> find_templates(pandas.DataFrame(rows, columns=["text", "label"]))
    {'a': ['acme', 'via']}
    """
    sample = train.sample(min(len(train), MAX_TEMPLATE_ROWS), random_state=0)
    words = [{*find_words(text)} for text in sample["text"]]
    every = Counter(word for of_text in words for word in of_text)
    templates = {}
    for name, numbers in sample.reset_index().groupby("label").indices.items():
        counts = Counter(word for number in numbers for word in words[number])
        own, others = len(numbers), len(words) - len(numbers)
        typical = sorted(
            word
            for word, count in counts.items()
            if count >= MIN_IN_CLASS * own and every[word] - count <= MAX_IN_OTHERS * others
            if word not in find_words(name_as_text(str(name)))
        )
        if len(typical) > 1 and min(own, others) >= RARE_ROWS:
            templates[str(name)] = typical
    return templates


def describe_templates(templates: Mapping[str, list[str]]) -> Iterator[WarningMessage]:
    """Yield a finding for each class of ``find_templates``."""
    for name, words in templates.items():
        finding = f"words in nearly all texts of {name!r} and hardly any others: {listed(words)}"
        remedy = "remove these words if they are a signature, a footer or a template"
        yield WarningMessage(finding, remedy)


def describe_lengths(
    lengths: NDArray[np.int64], *, max_length: int | None = None
) -> dict[str, float]:
    """Summarize token counts of shape [rows], and how many texts a maximum truncates."""
    p50, p95, p99 = np.percentile(lengths, (50, 95, 99)).tolist()
    longest = int(lengths.max())
    described = {"mean": float(lengths.mean()), "p50": p50, "p95": p95, "p99": p99, "max": longest}
    if max_length is not None:
        cut_rows = int(np.count_nonzero(lengths > max_length))
        described |= {"cut_rows": cut_rows, "cut_share": cut_rows / len(lengths)}
    return described


def suggest_max_length(lengths: NDArray[np.int64], *, max_tokens: int) -> int:
    """Return the smallest multiple of 8 that truncates no text, or 0.5% of them if a few are long.

    >>> suggest_max_length(np.array([13, 22, 41]), max_tokens=512)
    48
    """
    nearly_all, longest = float(np.percentile(lengths, 99.5)), int(lengths.max())
    needed = nearly_all if longest > LONG_TAIL * nearly_all else longest
    return min(8 * int(np.ceil(needed / 8)), max_tokens)


def suggest_model(
    tokenizer: "PreTrainedTokenizerFast",
    texts: pyarrow.ChunkedArray,
    *,
    unknown_tokens: int,
    tokens: int,
) -> WarningMessage | None:
    """Suggest another model if the vocabulary does not cover the language of the texts."""
    share = unknown_tokens / max(tokens, 1)
    if share > MAX_UNKNOWN:
        finding = f"{share:.0%} of the tokens are not in the model's vocabulary"
    elif _are_spelled(tokenizer, texts):
        finding = "for this script, the model's vocabulary contains only single letters"
    else:
        return None
    model = f"use --model {MULTILINGUAL_MODEL}, or another model for this language"
    return WarningMessage(finding, model)


def _are_spelled(tokenizer: "PreTrainedTokenizerFast", texts: pyarrow.ChunkedArray) -> bool:
    """Return whether most words are in another script and tokenized as single letters.

    In Chinese and Japanese one token per letter is normal; several are bytes of unknown letters.
    """
    words = " ".join(texts[:SCRIPT_TEXTS].to_pylist()).split()[:SCRIPT_WORDS]
    highest = [max(filter(str.isalpha, word), default="") for word in words]
    foreign = [
        word
        for word, letter in zip(words, highest, strict=True)
        if letter >= FIRST_LETTER_BEYOND_LATIN
    ]
    if 2 * len(foreign) <= len(words):
        return False
    encoded = tokenizer.backend_tokenizer.encode_batch_fast(foreign, add_special_tokens=False)
    letters = "".join(filter(str.isalpha, "".join(foreign)))
    east_asian = len(EAST_ASIAN.findall(letters))
    usual = MAX_TOKENS_PER_CHARACTER * east_asian
    usual += MAX_TOKENS_PER_LETTER * (len(letters) - east_asian)
    return sum(map(len, encoded)) > usual > 0


def suggest_changes(
    report: Mapping[str, Mapping[str, Any]], *, lengths: Lengths | None
) -> list[WarningMessage]:
    """Return suggestions for the user. ``lengths`` is None without a tokenizer."""
    classes = report["classes"]["train"]
    changes = [*find_imbalance(classes)]
    changes += find_misspelled_names(classes)
    changes += describe_templates(report.get("templates", {}))
    for name, (_, titles, remedy) in CHECKS.items():
        for split, finding in report[name].items():
            counts = [f"{title}: {finding[key]:,}" for key, title in titles.items()]
            if remedy and finding[next(iter(titles))]:
                changes.append(WarningMessage(f"{split}: {', '.join(counts)}", remedy))
    if lengths and lengths.suggested_max_length > lengths.max_length:
        train = lengths.splits["train"]
        cut = f"training texts truncated to {lengths.max_length} tokens: {train['cut_rows']:,}"
        remedy = f"use --max-length {lengths.suggested_max_length}"
        changes.append(WarningMessage(f"{cut} ({train['cut_share']:.1%})", remedy))
    if lengths and lengths.beyond_model:
        share = lengths.beyond_model / report["rows"]["train"]
        long = f"training texts longer than the model can read at once: {lengths.beyond_model:,}"
        remedy = "use --long-texts windows, which reads whole texts, or shorten sentence pairs"
        changes.append(WarningMessage(f"{long} ({share:.1%})", remedy))
    return changes
