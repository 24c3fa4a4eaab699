"""The decisive words of test rows and classes, for the report of a run."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pyarrow

from finetune.data.dataset import texts_of
from finetune.evaluation.explain import MAX_PIECES, MAX_WORDS, Predict, explain
from finetune.runs.results import ClassWord, ClassWords
from finetune.tasks.base import Logits, Task
from finetune.tasks.explanation import Explanation, find_words
from finetune.tasks.tables import MAX_MISTAKES

# Test rows to explain, and the fraction of a run's work that this can take.
MAX_ROWS, MAX_WORK_SHARE, MIN_TOKENS, CHARACTERS_PER_TOKEN = 200, 0.1, 2_000, 4
MAX_VARIANTS = MAX_WORDS + 2 * MAX_PIECES
WORDS_PER_CLASS, MIN_CHANGE = 15, 0.005


def explain_rows(
    task: Task,
    predict: Predict,
    rows: pyarrow.Table,
    logits: Logits,
    *,
    mistakes: Sequence[int],
    tokens: float,
) -> tuple[dict[int, Explanation], list[int]]:
    """Explain mistakes and a random sample of test rows, within a fraction of the run's work.

    ``tokens`` is the work of the run: the tokens that the model processed. Return the
    explanations by number, and the numbers that are in the sample.
    """
    sample = np.random.default_rng(0).permutation(len(rows))[:MAX_ROWS].tolist()
    in_turn = chain.from_iterable(zip_longest(mistakes[:MAX_MISTAKES], sample))
    order = [*dict.fromkeys(row for row in in_turn if row is not None)]
    texts = texts_of(rows).joined.take(order).to_pylist()
    # The number of rows must not depend on the clock, so that a repeated run writes the same files.
    sizes = [len(text) * (1 + min(len(find_words(text)), MAX_VARIANTS)) for text in texts]
    characters = CHARACTERS_PER_TOKEN * max(MAX_WORK_SHARE * tokens, MIN_TOKENS)
    chosen = order[: int(np.searchsorted(np.cumsum(sizes), characters, side="right"))]
    if not chosen:
        return {}, []
    columns = [column.take(chosen).to_pylist() for column in texts_of(rows).columns]
    explanations = explain(task, predict, logits[chosen], *columns)
    explained = dict(zip(chosen, explanations, strict=True))
    return explained, [row for row in sample if row in explained]


def words_of_classes(
    task: Task, logits: Logits, explained: Mapping[int, Explanation], numbers: Sequence[int]
) -> dict[str, ClassWords]:
    """Return the decisive words of each class, from some of the explained rows."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    class_rows: Counter[str] = Counter()
    if not len(numbers) or not task.class_names:
        return {}
    predicted: list[Any] = task.to_json(task.read_logits(logits[numbers]).predicted)
    for number, names in zip(numbers, predicted, strict=True):
        names = [names] if isinstance(names, str) else names
        class_rows.update(names)
        for change in explained[number]:
            name, word = change.label or names[0], change.word.casefold()
            totals[name][word] += change.change  # type: ignore[assignment]
            counts[name][word] += 1
    return {
        name: ClassWords(
            class_rows[name],
            [
                ClassWord(word, total / class_rows[name], counts[name][word])
                for word, total in sorted(totals[name].items(), key=lambda item: item[1])
                if total / class_rows[name] <= -MIN_CHANGE
            ][:WORDS_PER_CLASS],
        )
        for name in task.class_names
        if class_rows[name]
    }
