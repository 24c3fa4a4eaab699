"""Explains predictions by leaving out each word of a text and predicting again.

Each change can be reproduced by hand: predict the text without the word.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune.tasks.base import Logits, Outputs, Task
from finetune.tasks.explanation import Explanation, Spans, WordChange, find_words, leave_out

Predict = Callable[[Sequence[str], Sequence[str] | None], Logits]
"""Returns the logits of texts, or of first and second texts of pairs."""
Targets = Mapping[int, str | None]
"""The outputs to explain, each with its class if there can be several."""

# In texts with more words, sentences or other pieces are left out first. Then only the words of
# the strongest pieces are left out.
MAX_WORDS, MAX_PIECES, STRONGEST = 60, 30, 3
_ENDS = r".!?\n\u3002\uff01\uff1f"
SENTENCE = re.compile(rf"[^{_ENDS}]*[{_ENDS}]+|[^{_ENDS}]+")
# Maximum words returned per text.
MAX_CHANGES = 20
COLUMNS = ("text", "text_pair")


class _Part(NamedTuple):
    """A part of a text to leave out. ``side`` is 1 for the second text of a pair."""

    row: int
    side: int
    word: str
    spans: Spans


def explain(
    task: Task,
    predict: Predict,
    logits: Logits,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    targets: Sequence[Targets] | None = None,
) -> list[Explanation]:
    """Return the decisive words of each prediction, given its logits, [texts, outputs].

    The explanation of a multi-label text lists the words of each predicted class. It is empty if no
    class is predicted. ``targets`` are other outputs of each text to explain.
    """
    columns = [texts] if pairs is None else [texts, pairs]
    outputs = task.read_logits(logits)
    before = _values_of(outputs)

    def measure(parts: Sequence[_Part]) -> NDArray[np.float32]:
        """Measure the changes of all values if a part is left out: [parts, outputs]."""
        if not parts:
            return before[:0]
        rows, changed = [part.row for part in parts], []
        for side, column in enumerate(columns):
            shown = (column[part.row] for part in parts)
            left = [
                leave_out(text, part.spans) if part.side == side else text
                for text, part in zip(shown, parts, strict=True)
            ]
            changed.append(left)
        after = _values_of(task.read_logits(predict(changed[0], [*changed, None][1])))
        return after - before[rows]

    if targets is None:
        targets = [_targets(task, outputs, row) for row in range(len(texts))]
    parts = _choose_words(columns, targets, measure)
    changes = measure(parts)
    explained: list[list[WordChange]] = [[] for _ in texts]
    for part, values in zip(parts, changes, strict=True):
        column = COLUMNS[part.side] if pairs is not None else None
        for target, label in targets[part.row].items():
            change = WordChange(part.word, round(float(values[target]), 6), label, column)
            explained[part.row].append(change)
    both = zip(*columns, strict=True)
    return [
        Explanation.of(" | ".join(text), _strongest(of_row))
        for text, of_row in zip(both, explained, strict=True)
    ]


def _values_of(outputs: Outputs) -> NDArray[np.float32]:
    """Return the probability of each class, or the regression values: [rows, outputs]."""
    if outputs.probabilities is None:
        return np.asarray(outputs.predicted, np.float32).reshape(-1, 1)
    return outputs.probabilities


def _targets(task: Task, outputs: Outputs, row: int) -> Targets:
    """Return the predicted outputs of a text."""
    predicted = np.asarray(outputs.predicted[row])
    if outputs.probabilities is None:
        return {0: None}
    if predicted.ndim == 0:
        return {int(predicted): None}
    return {number: task.class_names[number] for number in np.flatnonzero(predicted).tolist()}


def _choose_words(
    columns: Sequence[Sequence[str]],
    targets: Sequence[Targets],
    measure: Callable[[Sequence[_Part]], NDArray[np.float32]],
) -> list[_Part]:
    """Choose the words to leave out in each text."""
    rows = [row for row, explained in enumerate(targets) if explained]
    places = [(row, side) for row in rows for side in range(len(columns))]
    whole = {place: [(0, len(columns[place[1]][place[0]]))] for place in places}
    words = {place: find_words(columns[place[1]][place[0]]) for place in places}
    regions: dict[int, list[tuple[int, int, int]]] = {}
    for (row, side), spans in whole.items():
        regions.setdefault(row, []).extend((side, *span) for span in spans)

    def words_in(row: int) -> list[_Part]:
        return [
            _Part(row, side, columns[side][row][slice(*spans[0])], spans)
            for side in range(len(columns))
            for spans in words[row, side].values()
            if any(
                at == side and start <= first and last <= end
                for at, start, end in regions[row]
                for first, last in spans
            )
        ]

    while long := [row for row in regions if len(words_in(row)) > MAX_WORDS]:
        pieces = [
            _Part(row, side, "", [span])
            for row in long
            for side, start, end in regions[row]
            for span in _split(columns[side][row], start, end, MAX_PIECES // len(regions[row]))
        ]
        changes = measure(pieces)
        for row in long:
            own = [number for number, piece in enumerate(pieces) if piece.row == row]
            falls = changes[own][:, [*targets[row]]].min(axis=1)
            strongest = np.argsort(falls, kind="stable")[:STRONGEST].tolist()
            chosen = [pieces[own[number]] for number in strongest]
            regions[row] = [(piece.side, *piece.spans[0]) for piece in chosen]
    return [part for row in regions for part in words_in(row)]


def _split(text: str, start: int, end: int, count: int) -> Spans:
    """Return the sentences of a part of a text, or groups of them or of its words, up to a count.

    The part has more words than that.
    """
    spans = [(start + m.start(), start + m.end()) for m in SENTENCE.finditer(text[start:end])]
    if len(spans) < 2:
        found = find_words(text[start:end]).values()
        spans = sorted((start + first, start + last) for word in found for first, last in word)
    size = math.ceil(len(spans) / count)
    groups = (spans[first : first + size] for first in range(0, len(spans), size))
    return [(group[0][0], group[-1][1]) for group in groups]


def _strongest(changes: Sequence[WordChange]) -> list[WordChange]:
    """Return the largest changes, by class, largest fall first."""
    labels = list(dict.fromkeys(change.label for change in changes))
    kept = sorted(changes, key=lambda change: -abs(change.change))[:MAX_CHANGES]
    return sorted(kept, key=lambda change: (labels.index(change.label), change.change))
