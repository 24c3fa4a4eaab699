"""What is odd about data: repeats, contradictions, test rows that are in the training split.

Two texts are the same here if they are for the splits that are held out: up to case and spaces.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow.compute as pc
from datasets import DatasetDict
from numpy.typing import NDArray

from finetune.data.repeats import number_splits
from finetune.data.tables import TextColumns, column_of, texts_of
from finetune.tasks.base import BALANCE_CLASSES, Task
from finetune.tasks.labels import listed_counts

EXAMPLES = 3
SHORT_CHARACTERS = 3
RARE_ROWS = 10
STRONG_IMBALANCE = 10.0
# A tail is long if the longest text has more than so many times the tokens of all but 0.5%.
LONG_TAIL = 2.0
# Emoji and rare words are unknown to a model that suits the texts otherwise.
MAX_UNKNOWN = 0.05


WINDOWS = "--long-texts windows, which reads all of them"


@dataclass(frozen=True)
class Repeats:
    """Rows that repeat an earlier row's text exactly, or ignoring case and spaces, and examples."""

    rows: int
    texts: int
    rows_up_to_case: int
    texts_up_to_case: int
    examples: list[str]


@dataclass(frozen=True)
class Conflict:
    """A text with several labels."""

    text: str
    labels: list[str]


@dataclass(frozen=True)
class Conflicts:
    """How many texts have several labels, and examples."""

    texts: int
    examples: list[Conflict]


@dataclass(frozen=True)
class ShortTexts:
    """Rows with a text shorter than ``SHORT_CHARACTERS``, and how many of them are empty."""

    rows: int
    empty: int
    examples: list[str]


@dataclass(frozen=True)
class SharedText:
    """A row whose text is in the training split, and the labels that it has there."""

    text: str
    label: str
    train_labels: list[str]


@dataclass(frozen=True)
class Overlap:
    """Rows whose texts are in the training split; ``disagreeing`` have a label they lack there."""

    rows: int
    disagreeing: int
    examples: list[SharedText]


@dataclass(frozen=True)
class Balance:
    """The largest and the smallest class with rows, the ratio of their rows, and rare classes."""

    largest: str
    smallest: str
    ratio: float
    rare: dict[str, int]


@dataclass(frozen=True)
class Suggestion:
    """What was found, and what a user can do about it."""

    finding: str
    remedy: str


@dataclass(frozen=True)
class Findings:
    """What was found: by split, except for the balance and oddities of the training labels."""

    rows: dict[str, int]
    classes: dict[str, dict[str, int]]
    repeats: dict[str, Repeats]
    conflicts: dict[str, Conflicts]
    short_texts: dict[str, ShortTexts]
    overlap: dict[str, Overlap]
    balance: Balance | None
    figures: dict[str, dict[str, float]]
    odd_labels: Sequence[Suggestion]


@dataclass(frozen=True)
class Lengths:
    """Tokens of texts."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: int


@dataclass(frozen=True)
class SplitLengths(Lengths):
    """Tokens of texts, and the texts that are longer than the maximum; their share in 0..1."""

    cut_rows: int
    cut_share: float


@dataclass(frozen=True)
class LengthFindings:
    """Tokens of the texts of each split under a model's tokenizer.

    Args:
        beyond_suggested: Training texts that are longer than ``suggested_max_length``.
        beyond_model: Training texts that are longer than the model reads at once.
        unknown_share: Share of the training tokens that the vocabulary lacks, in 0..1.
    """

    model: str
    max_length: int
    suggested_max_length: int
    beyond_suggested: int
    beyond_model: int
    unknown_share: float
    splits: dict[str, SplitLengths]


@dataclass(frozen=True)
class _Split:
    """A split's texts or pairs, numbers of texts and of labels over all splits, and label names."""

    texts: TextColumns
    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: Sequence[str]

    @property
    def labelled(self) -> NDArray[np.int64]:
        """The text and the label of each row as one number."""
        return self.numbers * len(self.names) + self.labels

    def texts_at(self, rows: NDArray[np.int64]) -> list[str]:
        """Return the texts of the first few of these rows."""
        examples: list[str] = self.texts.take(rows[:EXAMPLES]).joined.to_pylist()
        return examples

    def labels_of(self, number: int) -> list[str]:
        """Return the names of the labels that a text has here."""
        return sorted({self.names[label] for label in self.labels[self.numbers == number]})


def check_splits(splits: DatasetDict, task: Task) -> Findings:
    """Look for what is odd in splits, ``train`` among them, without a model."""
    texts = {split: texts_of(rows) for split, rows in splits.items()}
    labels = {split: task.labels(column_of(rows, "label")) for split, rows in splits.items()}
    all_texts = number_splits({split: own.columns for split, own in texts.items()})
    ends = np.cumsum([len(rows) for rows in splits.values()])[:-1]
    distinct, numbers = np.unique(
        np.concatenate(list(labels.values())), axis=0, return_inverse=True
    )
    names = [task.format_label(label) for label in distinct]
    parts = {
        split: _Split(texts[split], all_texts[split], own_labels, names)
        for split, own_labels in zip(splits, np.split(numbers, ends), strict=True)
    }
    classes = {split: task.count_classes(own) for split, own in labels.items()}
    odd = [Suggestion(*one) for one in task.find_oddities(labels["train"])]
    balance = weigh_classes(classes["train"]) if task.class_names else None
    if balance:
        odd = [*_about_balance(balance, remedy=BALANCE_CLASSES), *odd]
    return Findings(
        rows={split: len(rows) for split, rows in splits.items()},
        classes=classes,
        repeats={split: _find_repeats(part) for split, part in parts.items()},
        conflicts={split: _find_conflicts(part) for split, part in parts.items()},
        short_texts={split: _find_short_texts(part) for split, part in parts.items()},
        overlap={
            split: _find_overlap(part, train=parts["train"])
            for split, part in parts.items()
            if split != "train"
        },
        balance=balance,
        figures={split: task.describe(own) for split, own in labels.items()},
        odd_labels=odd,
    )


def weigh_classes(counts: Mapping[str, int]) -> Balance:
    """Compare the largest and the smallest class that has rows, by the rows of each class."""
    present = {name: count for name, count in counts.items() if count > 0}
    largest, smallest = max(present, key=present.__getitem__), min(present, key=present.__getitem__)
    rare = {name: count for name, count in counts.items() if count < RARE_ROWS}
    return Balance(largest, smallest, present[largest] / present[smallest], rare)


def describe_lengths(lengths: NDArray[np.int64]) -> Lengths:
    """Describe the tokens of texts, special ones included: int64 of shape [rows]."""
    p50, p95, p99 = (float(np.percentile(lengths, share)) for share in (50, 95, 99))
    return Lengths(float(lengths.mean()), p50, p95, p99, int(lengths.max()))


def measure_lengths(lengths: NDArray[np.int64], *, max_length: int) -> SplitLengths:
    """Describe the tokens of a split's texts, int64 of shape [rows], under a maximum."""
    cut_rows = int(np.count_nonzero(lengths > max_length))
    described = describe_lengths(lengths)
    return SplitLengths(**asdict(described), cut_rows=cut_rows, cut_share=cut_rows / len(lengths))


def suggest_max_length(lengths: NDArray[np.int64], *, max_tokens: int) -> int:
    """Return the smallest multiple of 8 that cuts no text, or 0.5% of them where a few are long.

    ``lengths`` are the tokens of each training text, int64 of shape [rows]; the model takes
    ``max_tokens``.

    >>> suggest_max_length(np.array([13, 22, 41]), max_tokens=512)
    48
    """
    nearly_all = float(np.percentile(lengths, 99.5))
    longest = int(lengths.max())
    needed = nearly_all if longest > LONG_TAIL * nearly_all else longest
    return min(8 * int(np.ceil(needed / 8)), max_tokens)


def suggest_model(*, unknown_tokens: int, tokens: int) -> Suggestion | None:
    """Suggest another model if too many tokens are unknown to the vocabulary of this one."""
    share = unknown_tokens / max(tokens, 1)
    if share <= MAX_UNKNOWN:
        return None
    return Suggestion(
        f"{share:.0%} of the tokens are unknown to the vocabulary of the model, which sees nothing"
        " of these words",
        "--model xlm-roberta-base, which is multilingual, or a model of the texts' language",
    )


def suggest_changes(
    findings: Findings, *, lengths: LengthFindings | None, reads_pairs: bool = False
) -> list[Suggestion]:
    """Return what a user may want to change; ``None`` if the lengths are not known."""
    changes = [*findings.odd_labels, *_about_texts(findings)]
    if lengths and lengths.suggested_max_length > lengths.max_length:
        train = lengths.splits["train"]
        found = (
            f"training texts longer than {lengths.max_length} tokens, which are cut:"
            f" {train.cut_rows:,} ({train.cut_share:.1%})"
        )
        changes.append(Suggestion(found, f"--max-length {lengths.suggested_max_length}"))
    if lengths and lengths.beyond_model:
        share = lengths.beyond_model / findings.rows["train"]
        found = (
            f"training texts longer than the model reads at once: {lengths.beyond_model:,}"
            f" ({share:.1%})"
        )
        remedy = "shorten the longer text of each" if reads_pairs else WINDOWS
        changes.append(Suggestion(found, remedy))
    return changes


def _find_repeats(split: _Split) -> Repeats:
    exact = pc.value_counts(split.texts.joined).field("counts").to_numpy()
    numbers, first_rows, counts = np.unique(split.numbers, return_index=True, return_counts=True)
    repeated = first_rows[counts > 1]
    return Repeats(
        rows=int((exact - 1).sum()),
        texts=int((exact > 1).sum()),
        rows_up_to_case=len(split.numbers) - len(numbers),
        texts_up_to_case=len(repeated),
        examples=split.texts_at(np.sort(repeated)),
    )


def _find_conflicts(split: _Split) -> Conflicts:
    labelled = np.unique(split.labelled)
    label_counts = np.unique(labelled // len(split.names), return_counts=True)[1]
    _, first_rows = np.unique(split.numbers, return_index=True)
    rows = np.sort(first_rows[label_counts > 1])
    examples = [
        Conflict(text, split.labels_of(split.numbers[row]))
        for row, text in zip(rows.tolist(), split.texts_at(rows), strict=False)
    ]
    return Conflicts(len(rows), examples)


def _find_short_texts(split: _Split) -> ShortTexts:
    characters = np.minimum.reduce(
        [pc.utf8_length(pc.utf8_trim_whitespace(one)).to_numpy() for one in split.texts.columns]
    )
    rows = np.flatnonzero(characters < SHORT_CHARACTERS)
    return ShortTexts(len(rows), int(np.count_nonzero(characters == 0)), split.texts_at(rows))


def _find_overlap(split: _Split, *, train: _Split) -> Overlap:
    shared = np.flatnonzero(np.isin(split.numbers, train.numbers))
    agrees = np.isin(split.labelled[shared], train.labelled)
    rows = shared[np.argsort(agrees, kind="stable")]  # those with another label there come first
    examples = [
        SharedText(text, split.names[split.labels[row]], train.labels_of(split.numbers[row]))
        for row, text in zip(rows.tolist(), split.texts_at(rows), strict=False)
    ]
    return Overlap(len(shared), int(np.count_nonzero(~agrees)), examples)


def _about_balance(balance: Balance, *, remedy: str) -> Iterator[Suggestion]:
    largest, smallest = balance.largest, balance.smallest
    if balance.ratio >= STRONG_IMBALANCE:
        found = f"{largest} has {balance.ratio:.1f} times the training rows of {smallest}"
        yield Suggestion(found, remedy)
    if balance.rare:
        found = f"classes with fewer than {RARE_ROWS} training rows: {listed_counts(balance.rare)}"
        yield Suggestion(found, "bring more rows of them, or join them with others")


def _about_texts(findings: Findings) -> Iterator[Suggestion]:
    for split, conflicts in findings.conflicts.items():
        if conflicts.texts:
            found = f"texts of {split} with several labels: {conflicts.texts:,}"
            yield Suggestion(found, "decide on one label for each")
    for split, short in findings.short_texts.items():
        if short.rows:
            found = f"texts of {split} shorter than {SHORT_CHARACTERS} characters: {short.rows:,}"
            yield Suggestion(found, "look whether they say enough to be classified")
    for split, shared in findings.overlap.items():
        if shared.rows:
            found = f"rows of {split} whose text is in train too: {shared.rows:,}"
            yield Suggestion(
                f"{found}, with another label there: {shared.disagreeing:,}",
                "remove them from train: a model that has seen them looks better than it is",
            )
